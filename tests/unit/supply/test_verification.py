"""A policy of trust holds on every way to a skill: what differs from lock or signature is nobody's, and costs no other."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kdskills import load_bundle
from kdskills.app import Host, Settings
from kdskills.app.settings import TrustSettings
from kdskills.builtin.executors.subprocess import SubprocessExecutor
from kdskills.bundle import SkillsDescriptor
from kdskills.bundle.descriptor import TrustPolicy
from kdskills.bundle.lock_file import lock_of
from kdskills.errors import FileRefused, KdskillsError, PolicyUnavailable
from kdskills.execution import SkillMount
from kdskills.execution.protocol import ExecutionOptions
from kdskills.execution.stage import stage_skill
from kdskills.remote.publish import _write
from kdskills.session import SkillRuntime
from kdskills.skills.registry import SkillRegistry
from kdskills.skills.roots import SkillRoot, Snapshot
from kdskills.skills.safe_open import read_tree, tree_digest_of
from kdskills.supply.lock import LockedSkill, skills_text
from kdskills.supply.signatures import SIGNATURE_FILE, TrustAnchors
from kdskills.supply.verification import judge_of
from kdskills.turn import SkillsSubsystem, build_skills_instruction_block, set_skills_descriptor
from kdskills.turn import subsystem as subsystem_module
from tests.unit.supply.signing_lab import Publisher, make_skill

BAD = "acme.brief"
OLD = 1_700_000_000


@dataclass
class Shop:
    """A bundle with a locked and signed skill, one that imports it, one beside it, and the operator's folders."""

    bundle: Path
    state: Path
    publisher: Publisher

    def skill(self, name: str = "brief") -> Path:
        """Return the folder of a skill."""
        return self.bundle / "skills/acme" / name

    def lock(self) -> None:
        """Lock all skills as they are now."""
        skills = {}
        for folder in sorted((self.bundle / "skills/acme").iterdir()):
            files = read_tree(folder)
            skills[f"acme/{folder.name}"] = LockedSkill("./elsewhere", digest=tree_digest_of(files), files=files)
        lock_of(self.bundle).write_text(skills_text(lock_of(self.bundle), skills))

    def settle(self) -> None:
        """Make all files old, as they are after installation: only then do their stamps prove anything."""
        for path in self.bundle.rglob("*"):
            os.utime(path, (OLD, OLD), follow_symlinks=False)

    def host(self, **trust: Any) -> Host:
        """Return a Host whose settings ask for these policies."""
        settings = Settings(
            state_dir=self.state, index_dir=self.state / "index", trust=TrustSettings(**trust), executor="subprocess",
            allow_unisolated=True, min_isolation="none",
        )  # fmt: skip
        return Host(settings, entry_points=False)

    def describe(self, trust: Mapping[str, Any]) -> None:
        """Write a descriptor with these policies."""
        text = json.dumps({"custom_skills_root": "skills", "trust": trust})
        (self.bundle / "skills_descriptor.json").write_text(text)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """Make a shop in which everything is in order."""
    publisher = Publisher.with_key(tmp_path / "publisher")
    shop = Shop(tmp_path / "bundle", tmp_path / "state", publisher)
    TrustAnchors(shop.state).add(publisher.anchor)
    for name in ("brief", "fine", "needs"):
        folder = make_skill(shop.skill(name), f"Text of {name}.")
        if name == "needs":
            front = "---\nname: needs\ndescription: Needs.\nimports: [acme.brief]\n---\nText of needs.\n"
            (folder / "SKILL.md").write_text(front)
        publisher.sign(folder)
    shop.describe({})
    shop.lock()
    shop.settle()
    monkeypatch.setenv("KDSKILLS_STATE_DIR", str(shop.state))
    monkeypatch.setenv("KDSKILLS_INDEX_DIR", str(shop.state / "index"))
    return shop


def _changed(shop: Shop) -> None:
    (shop.skill() / "scripts/run.py").write_text("print('bad')\n")


def _resigned(shop: Shop) -> None:
    stranger = Publisher.with_key(shop.state / "stranger")
    (shop.skill() / "scripts/run.py").write_text("print('bad')\n")
    stranger.sign(shop.skill())
    shop.lock()


def _unsigned(shop: Shop) -> None:
    (shop.skill() / SIGNATURE_FILE).unlink()
    shop.lock()


def _unlocked(shop: Shop) -> None:
    make_skill(shop.skill("more"))
    (shop.skill("more")).rename(shop.skill("brief2"))
    lock = lock_of(shop.bundle)
    lock.write_text(lock.read_text().replace('"acme/brief"', '"acme/other"'))


def _mode(shop: Shop) -> None:
    (shop.skill() / "SKILL.md").chmod(0o755)


def _link(shop: Shop) -> None:
    (shop.skill() / "scripts/run.py").unlink()
    (shop.skill() / "scripts/run.py").symlink_to(shop.skill("fine") / "scripts/run.py")


def _linked_signature(shop: Shop) -> None:
    (shop.skill() / SIGNATURE_FILE).rename(shop.state / "aside")
    (shop.skill() / SIGNATURE_FILE).symlink_to(shop.state / "aside")


ENFORCE, REQUIRE = {"lock": "enforce"}, {"signatures": "require"}
HARMS: dict[str, tuple[Callable[[Shop], object], dict[str, Any], str]] = {
    "changed, locked": (_changed, ENFORCE, "lock_mismatch"),
    "changed, signed": (_changed, REQUIRE, "signature_invalid"),
    "other signer": (_resigned, REQUIRE, "signer_untrusted"),
    "signer not named": (lambda _: None, REQUIRE | {"signers": ["else"]}, "signer_untrusted"),
    "unsigned": (_unsigned, REQUIRE, "signature_invalid"),
    "not in the lock": (_unlocked, ENFORCE, "lock_mismatch"),
    "mode": (_mode, ENFORCE, "lock_mismatch"),
    "link": (_link, ENFORCE, "lock_mismatch"),
    "linked signature": (_linked_signature, ENFORCE, "lock_mismatch"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_refused_when_discovered(shop: Shop, harm: str) -> None:
    """Every harm makes its skill invalid with the code of what is wrong, and leaves the others as they are."""
    change, trust, code = HARMS[harm]
    change(shop)
    subsystem = shop.host(**trust).subsystem(load_bundle(shop.bundle))
    invalid = subsystem.snapshot.invalid
    assert code in {finding.code for finding in invalid[BAD].diagnostics}
    if "signer" not in harm:
        assert "acme.fine" in subsystem.registry
    else:
        assert trust.get("signers") is None or not subsystem.registry
    assert BAD not in subsystem.view().skills


@pytest.mark.parametrize("harm", [name for name in HARMS if "signers" not in HARMS[name][1]])
def test_warned(shop: Shop, harm: str) -> None:
    """With `warn` the same skill stays, and what is wrong is told."""
    change, _, code = HARMS[harm]
    change(shop)
    subsystem = shop.host(lock="warn", signatures="warn").subsystem(load_bundle(shop.bundle))
    findings = [finding for finding in subsystem.registry[BAD].diagnostics if finding.code == code]
    assert [finding.severity for finding in findings] == ["warning"]


def test_other_skill(shop: Shop) -> None:
    """A whole other signed skill in a skill's folder, which no signature tells, takes neither name: the lock has both."""
    for path in ("SKILL.md", "scripts/run.py", SIGNATURE_FILE):
        (shop.skill() / path).write_bytes((shop.skill("fine") / path).read_bytes())
    assert BAD not in _by_settings(shop).registry
    text = (shop.skill() / "SKILL.md").read_text().replace("name: fine", "name: brief")
    (shop.skill() / "SKILL.md").write_text(text)
    shop.publisher.sign(shop.skill())
    assert BAD in _by_settings(shop).snapshot.invalid


def test_order(shop: Shop) -> None:
    """Where everything is in order, the strictest policy refuses nothing and says nothing."""
    subsystem = shop.host(lock="enforce", signatures="require", signers=("acme",)).subsystem(load_bundle(shop.bundle))
    assert [*subsystem.registry] == [BAD, "acme.fine", "acme.needs"]
    assert not [each for each in subsystem.diagnostics if each.severity != "info"]


async def _listed(shop: Shop, subsystem: SkillsSubsystem) -> bool:
    view = subsystem.view()
    text = view.catalog("gallery").text + str(view.search("brief", limit=10)) + str(view.picker())
    return BAD in view.listed or "acme.brief" in text


async def _instructions(shop: Shop, subsystem: SkillsSubsystem) -> bool:
    with subsystem.activate():
        return "Text of brief" in str(build_skills_instruction_block([BAD, "acme.fine"]))


async def _imported(shop: Shop, subsystem: SkillsSubsystem) -> bool:
    with subsystem.activate():
        return "Text of brief" in str(build_skills_instruction_block("acme.needs"))


async def _loaded(shop: Shop, subsystem: SkillsSubsystem) -> bool:
    async with SkillRuntime(subsystem=subsystem) as runtime:
        session = await runtime.create_session()
        await session.load([BAD])
        return bool(await session.active())


async def _read(shop: Shop, subsystem: SkillsSubsystem) -> bool:
    async with SkillRuntime(subsystem=subsystem) as runtime:
        session = await runtime.create_session()
        await session.load([BAD])
        return bool((await session.read("scripts/run.py")).text)


async def _described(shop: Shop, subsystem: SkillsSubsystem) -> bool:
    async with SkillRuntime(subsystem=subsystem) as runtime:
        return bool(await runtime.describe(BAD))


async def _exported(shop: Shop, subsystem: SkillsSubsystem) -> bool:
    exports = (subsystem.export_runtime_globals(), subsystem.view().export_runtime_globals())
    return any(row["id"] == BAD for export in exports for row in export["SKILLS_DESCRIPTOR"]["skills"])


async def _published(shop: Shop, subsystem: SkillsSubsystem) -> bool:
    from kdskills.app.publication import Publication

    entries, _ = Publication(subsystem.view(), {}, cache=shop.state / "stages").entries()
    return any(entry.full_id == BAD for entry in entries)


async def _overlaid(shop: Shop, subsystem: SkillsSubsystem) -> bool:
    return BAD in subsystem.overlay([]).view().skills


async def _skill_tree(shop: Shop, subsystem: SkillsSubsystem) -> bool:
    return bool(subsystem.registry[BAD].tree_digest())


async def _staged(shop: Shop, subsystem: SkillsSubsystem) -> bool:
    skill = subsystem.registry[BAD]
    assert skill.folder is not None
    return bool(stage_skill(SkillMount(BAD, skill.folder, skill.tree_digest()), shop.state / "stages"))


async def _ran(shop: Shop, subsystem: SkillsSubsystem) -> bool:
    executor = SubprocessExecutor(ExecutionOptions(allow_unisolated=True, state_dir=shop.state / "runs"))
    runtime = SkillRuntime(subsystem=subsystem, run_scripts=True, executor=executor, profile="unsafe-local")
    async with runtime:
        session = await runtime.create_session()
        await session.load([BAD])
        return "ran" in (await session.run_script("scripts/run.py")).stdout


WAYS: dict[str, Callable[[Shop, SkillsSubsystem], Awaitable[bool]]] = {
    "listed": _listed,
    "instructions": _instructions,
    "imported": _imported,
    "loaded": _loaded,
    "read": _read,
    "described": _described,
    "exported": _exported,
    "published to MCP": _published,
    "overlay": _overlaid,
    "tree digest": _skill_tree,
    "staged": _staged,
    "run": _ran,
}


async def _reached(way: str, shop: Shop, subsystem: SkillsSubsystem) -> bool:
    try:
        return await WAYS[way](shop, subsystem)
    except (KdskillsError, KeyError):
        return False


def _by_settings(shop: Shop) -> SkillsSubsystem:
    return shop.host(lock="enforce").subsystem(load_bundle(shop.bundle))


def _by_descriptor(shop: Shop) -> SkillsSubsystem:
    shop.describe({"acme": {"lock": "enforce"}})
    return shop.host().subsystem(load_bundle(shop.bundle))


def _by_settings_over_descriptor(shop: Shop) -> SkillsSubsystem:
    shop.describe({"acme": {"lock": "off", "signatures": "off"}, "*": {"lock": "warn"}})
    return _by_settings(shop)


def _by_mistyped_descriptor(shop: Shop) -> SkillsSubsystem:
    shop.describe({"acmee": {"lock": "enforce"}})
    return shop.host().subsystem(load_bundle(shop.bundle))


def _by_library(shop: Shop) -> SkillsSubsystem:
    shop.describe({"*": {"lock": "enforce"}})
    bundle = load_bundle(shop.bundle)
    return SkillsSubsystem(bundle.descriptor, bundle_root=bundle.root, index_dir=None)


def _by_export_of_descriptor(shop: Shop) -> SkillsSubsystem:
    shop.describe({"*": {"signatures": "require"}})
    active = set_skills_descriptor(load_bundle(shop.bundle).descriptor, bundle_root=shop.bundle)
    subsystem_module._ACTIVE.set(None)
    return active


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "said",
    [
        _by_settings,
        _by_settings_over_descriptor,
        _by_descriptor,
        _by_mistyped_descriptor,
        _by_library,
        _by_export_of_descriptor,
    ],
)
async def test_no_way(shop: Shop, way: str, said: Callable[[Shop], SkillsSubsystem]) -> None:
    """On every way, a skill that differs is out of reach, and one that does not is within; whoever states the policy."""
    assert await _reached(way, shop, said(shop))
    _changed(shop)
    (shop.skill() / "SKILL.md").write_text("---\nname: brief\ndescription: Briefs.\n---\nText of brief, and more.\n")
    assert not await _reached(way, shop, said(shop))


@pytest.mark.parametrize("way", [way for way in WAYS if way not in {"listed", "overlay"}])
@pytest.mark.parametrize("path", ["SKILL.md", "scripts/run.py"])
async def test_change_after_start(shop: Shop, way: str, path: str) -> None:
    """What is changed after the start, of an unchanged size and with its old times, slips in on no way."""
    subsystem = _by_library(shop)
    subsystem = SkillsSubsystem(subsystem.descriptor, bundle_root=shop.bundle, index_dir=None, auto_refresh=None)
    assert await _reached(way, shop, subsystem)
    file = shop.skill() / path
    file.write_bytes(file.read_bytes().replace(b"brief.", b"BRIEF.").replace(b"ran", b"bad"))
    os.utime(file, (OLD, OLD))
    texts = way in {"instructions", "imported"} and path != "SKILL.md"  # of which the text is still the locked one
    assert await _reached(way, shop, subsystem) == texts


def test_next_look(shop: Shop) -> None:
    """The next look takes a changed skill away and brings a mended one back, also where only a script changed; a lock that
    was made again counts at once.
    """
    subsystem = _by_library(shop)
    assert BAD in subsystem.registry
    _changed(shop)
    subsystem.refresh()
    assert BAD not in subsystem.registry
    shop.lock()
    subsystem.refresh()
    assert BAD in subsystem.registry
    assert subsystem.registry[BAD].tree_digest()
    lock_of(shop.bundle).unlink()
    subsystem.refresh()
    assert not subsystem.registry


def test_anchors_taken_away(shop: Shop) -> None:
    """Who is trusted no longer has signed nothing from the next look on."""
    subsystem = shop.host(signatures="require").subsystem(load_bundle(shop.bundle))
    assert len(subsystem.registry) == 3
    TrustAnchors(shop.state).remove("acme")
    subsystem.refresh()
    assert {each.code for each in subsystem.snapshot.invalid[BAD].diagnostics} >= {"signer_untrusted"}


@pytest.mark.parametrize(
    ("file", "text", "trust", "code"),
    [
        ("bundle/kdskills.lock", "[", {"lock": "enforce"}, "lock_invalid"),
        ("bundle/kdskills.lock", "[skill]\na = 1\n", {"lock": "enforce"}, "lock_invalid"),
        ("state/trust.json", "[", {"signatures": "require"}, "anchors_unreadable"),
    ],
)
def test_unreadable_closes(shop: Shop, file: str, text: str, trust: dict[str, Any], code: str) -> None:
    """A lock or a file of anchors that cannot be read closes everything, says so, and opens again when it is mended."""
    path = shop.bundle.parent / file
    before = path.read_bytes()
    path.write_text(text)
    subsystem = shop.host(**trust).subsystem(load_bundle(shop.bundle))
    assert not subsystem.registry
    assert {code} <= {finding.code for finding in subsystem.diagnostics}
    path.write_bytes(before)
    subsystem.refresh()
    assert len(subsystem.registry) == 3


def test_missing_extra_closes(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, nothing that needs a signature is used; the finding names the command that installs it."""
    monkeypatch.setitem(sys.modules, "OpenSSL", None)
    subsystem = shop.host(signatures="require").subsystem(load_bundle(shop.bundle))
    assert not subsystem.registry
    finding = next(each for each in subsystem.snapshot.invalid[BAD].diagnostics if each.code == "missing_extra")
    assert "kdskills[trust]" in finding.message


def test_nobody_keeps_policy(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is installed that keeps a descriptor's policy, there are no skills, instead of all."""
    monkeypatch.setattr(subsystem_module, "JUDGES", "kdskills.nothing")
    with pytest.raises(PolicyUnavailable):
        _by_library(shop)


def test_only_its_namespace(shop: Shop) -> None:
    """A policy of one namespace asks nothing of another; the settings may only be made stricter."""
    make_skill(shop.bundle / "skills/lab/notes")
    shop.describe({"acme": {"lock": "enforce"}})
    subsystem = shop.host(lock="off").subsystem(load_bundle(shop.bundle))
    assert "lab.notes" in subsystem.registry
    shop.describe({"lab": {"lock": "off"}})
    subsystem = shop.host(lock="enforce").subsystem(load_bundle(shop.bundle))
    assert "lab.notes" in subsystem.snapshot.invalid


def test_overlay_skills(shop: Shop, tmp_path: Path) -> None:
    """Skills that a user brings along, and uploaded ones, are asked the same."""
    make_skill(tmp_path / "mine/notes")
    make_skill(tmp_path / "uploaded/report")
    host = shop.host(signatures="require")
    uploaded = SkillRoot("uploaded://p/report", tmp_path / "uploaded", "uploaded:report", "overlay")
    subsystem = host.subsystem(load_bundle(shop.bundle), roots=[uploaded])
    assert "public.report" in subsystem.snapshot.invalid
    mine = SkillRoot("user://mine", tmp_path / "mine", "mine", "user")
    assert "user.notes" not in subsystem.overlay([mine]).view().skills
    shop.publisher.sign(tmp_path / "mine/notes")
    assert "user.notes" in subsystem.overlay([mine]).view().skills


def test_codex_roots(shop: Shop, tmp_path: Path) -> None:
    """A file that changed after the start is not written to the skills of another agent."""
    import contextlib

    subsystem = _by_library(shop)
    view = subsystem.view()
    _changed(shop)
    folder, notes = _write(tmp_path / "home", view, {"brief": (BAD, None)}, {BAD: "Text"}, contextlib.ExitStack())
    assert not (Path(folder) / "brief/scripts/run.py").exists()
    assert "scripts/run.py is not published" in notes[0].message


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count the folders that are read whole."""
    from kdskills.supply import verification

    read: list[str] = []
    real = verification._reading_of
    monkeypatch.setattr(verification, "_reading_of", lambda *args: (read.append(args[0]), real(*args))[1])
    return read


def test_read_once(shop: Shop, counted: list[str]) -> None:
    """A skill is read whole once for every change of it, also by later processes; a file that others may write to is not
    believed.
    """
    _by_settings(shop).refresh()
    assert len(counted) == 3
    _by_settings(shop).refresh()
    assert len(counted) == 3
    cache = next((shop.state / "index").glob("*.trust"))
    cache.chmod(0o666)
    _by_settings(shop)
    assert len(counted) == 3
    cache = next((shop.state / "index").glob("*.trust"))
    cache.chmod(0o666)
    assert _by_settings(shop).registry
    assert len(counted) == 6
    cache.chmod(0o600)
    cache.write_text('{"format": 1, "folders": {"x": {}}}')
    assert _by_settings(shop).registry
    assert len(counted) == 9


def test_cold_look(shop: Shop, counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A look through all folders asks for no file again that it has just met, and a changed one is noticed all the same."""
    from kdskills.supply import verification

    policy = TrustPolicy(lock="enforce", signatures="require")

    def look() -> Snapshot:
        judge = judge_of(SkillsDescriptor(), shop.bundle, shop.state, usual=policy, cache=shop.state / "index")
        root = SkillRoot("bundle://skills", shop.bundle / "skills", "skills", "bundle")
        return SkillRegistry([root], index_dir=None, judge=judge).snapshot()

    assert len(look().skills) == len(counted) == 3
    asked: list[str] = []
    real = verification._stamps
    monkeypatch.setattr(verification, "_stamps", lambda *args: (asked.append(args[0]), real(*args))[1])
    assert len(look().skills) == len(counted) == 3
    assert asked == []
    _changed(shop)
    assert BAD in look().invalid
    assert counted[3:] == [str(shop.skill())]


def test_near_namespaces(shop: Shop) -> None:
    """A policy of a namespace that is there, or of a name unlike any, is asked of no other one."""
    make_skill(shop.bundle / "skills/acme2/notes")
    _changed(shop)
    for trust in ({"acme2": ENFORCE}, {"elsewhere": ENFORCE}, {"acme": {}, "acmee": ENFORCE}):
        shop.describe(trust)
        subsystem = shop.host().subsystem(load_bundle(shop.bundle))
        assert BAD in subsystem.registry
        assert ("acme2.notes" in subsystem.registry) == (trust.keys() == {"elsewhere"})


def test_off_costs_nothing(shop: Shop, counted: list[str]) -> None:
    """Without a policy nothing of it is imported, and no folder is read whole."""
    import subprocess

    assert shop.host().subsystem(load_bundle(shop.bundle)).registry
    assert counted == []
    code = (
        "import sys; from kdskills import load_bundle; from kdskills.turn import SkillsSubsystem;"
        f"b = load_bundle({str(shop.bundle)!r}); s = SkillsSubsystem(b.descriptor, bundle_root=b.root, index_dir=None);"
        "assert s.registry; assert not [m for m in sys.modules if m.startswith(('kdskills.supply', 'kdskills.app'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pinned_bytes(shop: Shop) -> None:
    """A file that came after the judgement is no file of the skill, whatever it holds."""
    from kdskills.skills.folder import skill_bytes

    skill = _by_library(shop).registry[BAD]
    (shop.skill() / "scripts/new.py").write_text("print('ran')\n")
    assert skill_bytes(skill, "scripts/run.py", 1000)
    with pytest.raises(FileRefused) as refused:
        skill_bytes(skill, "scripts/new.py", 1000)
    assert refused.value.code == "skill_changed"


def test_pinned_modes(shop: Shop) -> None:
    """A program made runnable after the judgement, or a text, is another one: no digest, so nothing is staged or run of it."""
    skill = _by_library(shop).registry[BAD]
    script = shop.skill() / "scripts/run.py"
    digest, mode = skill.tree_digest(), script.stat().st_mode
    script.chmod(mode ^ 0o111)
    with pytest.raises(FileRefused) as refused:
        skill.tree_digest()
    assert refused.value.code == "skill_changed"
    script.chmod(mode)
    assert skill.tree_digest() == digest


@pytest.mark.parametrize("row", [[1] * 8, ["x"] * 7, None, {}])
def test_foreign_cache(shop: Shop, counted: list[str], row: Any) -> None:
    """A file of kept verdicts with a row that is none says nothing: what it was of is read again."""
    assert _by_settings(shop).registry
    cache = next((shop.state / "index").glob("*.trust"))
    document = json.loads(cache.read_text())
    document["folders"][next(iter(document["folders"]))] = row
    cache.write_text(json.dumps(document))
    assert len(_by_settings(shop).registry) == 3
    assert len(counted) > 3

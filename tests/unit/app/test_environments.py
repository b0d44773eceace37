"""Environments of a Host: what skills declare is locked beside the bundle, built, told and removed, by the operator's policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdskills.app import Host, Settings
from kdskills.app.environments import lock_of
from kdskills.app.operations import Context
from kdskills.environments.codes import EnvironmentFailed
from kdskills.errors import BadRequest
from tests.unit.environments.conftest import LoopIndex
from tests.unit.environments.conftest import index as index  # noqa: PLC0414 - a fixture

TOP = "---\nname: {name}\ndescription: Does things for a test.\n---\nDo it.\n"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with a skill `pdf` that declares a package, whose script `other.py` declares another."""
    root = tmp_path / "lab"
    scripts = root / "skills/pdf/scripts"
    scripts.mkdir(parents=True)
    (root / "skills_descriptor.yaml").write_text("custom_skills_root: skills\n")
    (root / "skills/pdf/SKILL.md").write_text(TOP.format(name="pdf"))
    (root / "skills/pdf/requirements.txt").write_text("one>=1\n")
    (scripts / "plain.py").write_text("import one\n")
    (scripts / "other.py").write_text('# /// script\n# dependencies = ["two"]\n# ///\nimport two\n')
    (root / "skills/bare").mkdir()
    (root / "skills/bare/SKILL.md").write_text(TOP.format(name="bare"))
    return root


@pytest.fixture
def host_of(tmp_path: Path, index: LoopIndex, monkeypatch):
    """Make Hosts whose packages come from the loopback index, and whose cache is the test's."""
    monkeypatch.setattr("kdskills.environments.store.cache_dir", lambda: tmp_path / "cache")
    index.add("one")
    index.add("two", requires=("one",))

    def make(policy: str = "locked") -> Host:
        url = {"loop": index.indexes[0].url}
        settings = Settings(environments=policy, environment_index=url, state_dir=tmp_path / "state")
        return Host(settings, entry_points=False)

    return make


async def answered(host, name, bundle, *, emit=None, **arguments):
    """Return the answer of an operation on environments."""
    return await host.invoke(f"environments.{name}", {"bundle": str(bundle), **arguments}, Context(emit=emit))


def states(answer):
    """Return the state of each environment by key."""
    return {row.key: row.state for row in answer.rows}


KEYS = ("public.pdf", "public.pdf/scripts/other.py")


async def test_environments_are_planned_locked_built_shown_and_removed(host_of, bundle, index):
    """The five operations, in order: a plan writes nothing, a lock says what is built, and what is removed can be built again."""
    host, events = host_of(), []
    planned = await answered(host, "plan", bundle)
    assert (states(planned), planned.ok) == (dict.fromkeys(KEYS, "planned"), True)
    assert not lock_of(bundle).exists()
    assert (await answered(host, "lock", bundle, check=True)).ok is False
    locked = await answered(host, "lock", bundle)
    assert (states(locked), locked.changed) == (dict.fromkeys(KEYS, "locked"), True)
    assert locked.rows[1].packages == ("one 1.0", "two 1.0")
    text = lock_of(bundle).read_bytes()
    again = await answered(host, "lock", bundle, upgrade=True)
    assert (again.changed, lock_of(bundle).read_bytes()) == (False, text)
    assert (await answered(host, "lock", bundle, check=True)).ok
    assert (await answered(host, "show", bundle)).ok is False
    built = await answered(host, "build", bundle, emit=events.append)
    assert (states(built), built.ok) == (dict.fromkeys(KEYS, "built"), True)
    assert {event.kind for event in events} == {"find", "download", "built"}
    index.asked.clear()
    assert (await answered(host, "show", bundle)).ok
    assert not index.asked
    cleaned = await answered(host, "clean", bundle, skills=["pdf"])
    assert cleaned.freed > 0
    assert states(cleaned) == dict.fromkeys(KEYS, "locked")
    assert (await answered(host, "build", bundle)).ok


async def test_a_lock_follows_its_skills(host_of, bundle, index):
    """Changed requirements are stale until locked again, entries nobody asks for go, and what still holds is not touched."""
    host = host_of()
    await answered(host, "lock", bundle)
    index.add("one", "2.0")
    (bundle / "skills/pdf/scripts/other.py").unlink()
    assert states(await answered(host, "show", bundle)) == {KEYS[0]: "locked", KEYS[1]: "unneeded"}
    kept = await answered(host, "lock", bundle)
    assert [(row.key, row.packages) for row in kept.rows] == [(KEYS[0], ("one 1.0",))]
    (bundle / "skills/pdf/requirements.txt").write_text("one>=2\n")
    stale = await answered(host, "build", bundle)
    assert (stale.ok, stale.rows[0].state, stale.rows[0].code) == (False, "stale", "environment_lock_stale")
    assert (await answered(host, "lock", bundle)).rows[0].packages == ("one 2.0",)


async def test_one_environment_that_fails_keeps_no_other_from_its_lock(host_of, bundle):
    """A package nobody has fails its skill alone, with code and who must act; a declaration that is none is its author's."""
    (bundle / "skills/bare/requirements.txt").write_text("nobody-has-it\n")
    (bundle / "skills/pdf/scripts/bad.py").write_text('# /// script\n# dependencies = ["-r x"]\n# ///\n')
    answer = await answered(host_of(), "lock", bundle)
    rows = {row.key: (row.state, row.code, row.who) for row in answer.rows}
    assert rows["public.bare"] == ("failed", "environment_unavailable", "operator")
    assert rows["public.pdf/scripts/bad.py"] == ("failed", "environment_invalid", "author")
    assert rows["public.pdf"] == ("locked", "", "")
    assert answer.ok is False


async def test_skills_are_chosen_by_id(host_of, bundle):
    """Only the named skills are looked at; an unknown one is `unknown_skill`."""
    (bundle / "skills/bare/requirements.txt").write_text("one\n")
    host = host_of()
    assert list(states(await answered(host, "lock", bundle, skills=["public.bare"]))) == ["public.bare"]
    assert set(states(await answered(host, "lock", bundle))) == {*KEYS, "public.bare"}
    with pytest.raises(BadRequest) as caught:
        await answered(host, "lock", bundle, skills=["nobody"])
    assert caught.value.code == "unknown_skill"


async def test_node_packages_without_a_lock_are_told_with_the_command(host_of, bundle):
    """A package.json without a package-lock.json is its author's to mend; Python packages of the skill are locked."""
    (bundle / "skills/pdf/package.json").write_text(json.dumps({"dependencies": {"left-pad": "1.3.0"}}))
    answer = await answered(host_of(), "lock", bundle)
    rows = {row.key: (row.state, row.code) for row in answer.rows}
    assert rows["public.pdf/package.json"] == ("failed", "environment_invalid")
    assert rows["public.pdf"] == ("locked", "")


async def test_a_hostile_lock_file_is_refused(host_of, bundle):
    """A lock file that is none ends every operation with its code, and stays as it is."""
    lock_of(bundle).write_text("[environment\n")
    for name in ("plan", "lock", "build", "show", "clean"):
        with pytest.raises(EnvironmentFailed) as caught:
            await answered(host_of(), name, bundle)
        assert caught.value.code == "environment_lock_invalid"
    assert lock_of(bundle).read_text() == "[environment\n"


async def test_off_builds_nothing(host_of, bundle):
    """With the setting `off` a lock can be written, and nothing is downloaded or unpacked."""
    host = host_of("off")
    await answered(host, "lock", bundle)
    answer = await answered(host, "build", bundle)
    assert {row.code for row in answer.rows} == {"environment_off"}


async def test_versions_of_the_image_are_taken_where_they_fit(host_of, bundle, index):
    """What the image has is locked in the image's version, so that both fit in one program; where that cannot be, another is."""
    host = host_of()
    name, version = next(iter(host.environments.image.items()))
    index.add(name, version)
    index.add(name, "9999.0")
    (bundle / "skills/pdf/requirements.txt").write_text(f"{name}\n")
    (bundle / "skills/bare/requirements.txt").write_text(f"{name}>=9999\n")
    rows = {row.key: row.packages for row in (await answered(host, "lock", bundle)).rows}
    assert rows["public.pdf"] == (f"{name} {version}",)
    assert rows["public.bare"] == (f"{name} 9999.0",)


async def test_skills_of_a_bundle_share_versions_where_they_can(host_of, bundle, index):
    """A new entry takes the versions that others are locked to, though newer ones are there; it takes another if it must."""
    host = host_of()
    await answered(host, "lock", bundle)
    index.add("one", "2.0")
    (bundle / "skills/bare/requirements.txt").write_text("one\n")
    rows = {row.key: row.packages for row in (await answered(host, "lock", bundle)).rows}
    assert rows["public.bare"] == ("one 1.0",)
    upgraded = {row.key: row.packages for row in (await answered(host, "lock", bundle, upgrade=True)).rows}
    assert upgraded["public.bare"] == upgraded["public.pdf"] == ("one 2.0",)


async def test_auto_brings_what_a_script_declares(host_of, bundle, index):
    """With `auto` a script gets what nobody locked, what is locked and not built, and what a stale lock lacks; no lock is written."""
    host = host_of("auto")
    subsystem = host.subsystem(host.bundle(bundle))
    packages, skill = host.wiring.packages(subsystem), subsystem.registry["public.pdf"]
    mount = packages.of_script(skill, "scripts/other.py", skill.folder)
    assert (mount.root / "python/two.py").is_file()
    assert not lock_of(bundle).exists()
    await answered(host, "lock", bundle)
    await answered(host, "clean", bundle)
    assert packages.of_script(skill, "scripts/other.py", skill.folder) == mount
    assert packages.of_skills([skill]) == mount  # the packages of all its scripts
    (bundle / "skills/pdf/requirements.txt").write_text("two>=3\n")
    index.add("two", "3.0")
    stale = packages.of_script(skill, "scripts/plain.py", skill.folder)
    assert (stale.root / "python/two.py").read_text() == "VERSION = '3.0'\n"
    locked = host_of("locked")
    with pytest.raises(EnvironmentFailed) as caught:
        locked.wiring.packages(subsystem).of_script(skill, "scripts/plain.py", skill.folder)
    assert caught.value.code == "environment_lock_stale"


async def test_suggested_packages_are_locked_when_asked_for(host_of, bundle, index):
    """What a script imports and nothing declares is brought with `suggested` alone; the script then gets it, and no guesses."""
    index.add("pypdf")
    scripts = bundle / "skills/bare/scripts"
    scripts.mkdir()
    (scripts / "read.py").write_text("import json, pypdf, pydantic, guessed_thing_of_nobody\n")
    (bundle / "skills/pdf/scripts/plain.py").write_text("import one, pypdf\n")
    host, read, plain = host_of(), "public.bare/scripts/read.py", "public.pdf/scripts/plain.py"
    assert set(states(await answered(host, "lock", bundle))) == set(KEYS)
    rows = {row.key: row for row in (await answered(host, "lock", bundle, suggested=True)).rows}
    assert (rows[read].requirements, rows[plain].requirements) == (("pypdf",), ("one>=1", "pypdf"))
    assert (await answered(host, "lock", bundle, suggested=True, check=True)).ok
    assert not (await answered(host, "lock", bundle, check=True)).ok
    assert (await answered(host, "build", bundle, suggested=True)).ok
    subsystem = host.subsystem(host.bundle(bundle))
    packages = host.wiring.packages(subsystem)
    for full_id, script in (("public.bare", "scripts/read.py"), ("public.pdf", "scripts/plain.py")):
        skill = subsystem.registry[full_id]
        assert (packages.of_script(skill, script, skill.folder).root / "python/pypdf.py").is_file()


async def test_known_faults_of_locked_packages_are_told(host_of, bundle, tmp_path):
    """Operations tell advisories by package; a check fails on them from a severity on, and other operations do not."""
    fault = {
        "id": "X-1",
        "affected": [
            {
                "package": {"ecosystem": "PyPI", "name": "One"},
                "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "1.1"}]}],
            }
        ],
        "database_specific": {"severity": "HIGH"},
    }
    (tmp_path / "known.json").write_text(json.dumps(fault))
    host, words = host_of(), {"advisories": str(tmp_path / "known.json")}
    for name in ("plan", "lock", "build", "show"):
        answer = await answered(host, name, bundle, **words)
        rows = [[(fault.id, fault.severity, fault.fixed) for fault in row.advisories] for row in answer.rows]
        assert (answer.ok, rows) == (True, [[("X-1", "high", "1.1")]] * 2), name
    assert (await answered(host, "lock", bundle, check=True)).ok
    assert not (await answered(host, "lock", bundle, check=True, **words)).ok
    assert not (await answered(host, "lock", bundle, check=True, fail_on="high", **words)).ok
    assert (await answered(host, "lock", bundle, check=True, fail_on="critical", **words)).ok
    (tmp_path / "known.json").write_text("{}")
    with pytest.raises(EnvironmentFailed) as caught:
        await answered(host, "lock", bundle, check=True, **words)
    assert caught.value.code == "environment_advisories_invalid"

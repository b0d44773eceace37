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


async def test_node_packages_are_refused_by_a_code(host_of, bundle):
    """A skill with a package.json is told that those packages are not brought; its Python packages are."""
    (bundle / "skills/pdf/package.json").write_text(json.dumps({"dependencies": {"left-pad": "1.3.0"}}))
    answer = await answered(host_of(), "lock", bundle)
    rows = {row.key: (row.state, row.code) for row in answer.rows}
    assert rows["public.pdf/package.json"] == ("failed", "environment_node_unsupported")
    assert rows["public.pdf"] == ("locked", "")


async def test_a_hostile_lock_file_is_refused(host_of, bundle):
    """A lock file that is none ends every operation with its code, and stays as it is."""
    lock_of(bundle).write_text("[environment\n")
    for name in ("plan", "lock", "build", "show", "clean"):
        with pytest.raises(EnvironmentFailed) as caught:
            await answered(host_of(), name, bundle)
        assert caught.value.code == "environment_lock_invalid"
    assert lock_of(bundle).read_text() == "[environment\n"


def skill_of(host, bundle):
    """Return the skill `pdf` of the bundle."""
    return host.subsystem(host.bundle(bundle)).registry["public.pdf"]


async def test_a_script_gets_what_is_built_for_it(host_of, bundle):
    """With `locked` a script without a built environment is refused with the command; then it gets its own, or its skill's."""
    host = host_of()
    skill, lock = skill_of(host, bundle), lock_of(bundle)
    for script in ("scripts/plain.py", "scripts/other.py", None):
        with pytest.raises(EnvironmentFailed) as caught:
            host.environments.mount_for(skill, script, lock)
        assert (caught.value.code, caught.value.who) == ("environment_missing", "operator")
        assert caught.value.details["command"] == f"kdskills env build {bundle}"
    await answered(host, "lock", bundle)
    await answered(host, "build", bundle)
    plain = host.environments.mount_for(skill, "scripts/plain.py", lock)
    other = host.environments.mount_for(skill, "scripts/other.py", lock)
    assert sorted(path.name for path in (plain.root / "python").glob("*.py")) == ["one.py"]
    assert sorted(path.name for path in (other.root / "python").glob("*.py")) == ["one.py", "two.py"]
    assert host.environments.mount_for(skill, None, lock) == plain
    (bundle / "skills/pdf/requirements.txt").write_text("two\n")
    host = host_of()
    with pytest.raises(EnvironmentFailed) as caught:
        host.environments.mount_for(skill_of(host, bundle), "scripts/plain.py", lock)
    assert caught.value.code == "environment_lock_stale"


async def test_what_the_image_has_needs_no_environment(host_of, bundle):
    """A script whose packages are all in the image, or are for another platform, starts without anything being built."""
    (bundle / "skills/pdf/requirements.txt").write_text("pydantic>=2\none; sys_platform == 'win32'\n")
    host = host_of()
    assert host.environments.mount_for(skill_of(host, bundle), "scripts/plain.py", lock_of(bundle)) is None


async def test_the_policy_decides(host_of, bundle):
    """`off` brings nothing and builds nothing, `auto` builds what nobody locked, `ask` asks once something is locked."""
    lock, off = lock_of(bundle), host_of("off")
    assert off.environments.mount_for(skill_of(off, bundle), "scripts/plain.py", lock) is None
    await answered(off, "lock", bundle)
    answer = await answered(off, "build", bundle)
    assert {row.code for row in answer.rows} == {"environment_off"}
    ask, asked = host_of("ask"), []
    with pytest.raises(EnvironmentFailed, match="not built"):
        ask.environments.mount_for(skill_of(ask, bundle), None, lock, ask=lambda locked: asked.append(locked.key))
    assert asked == ["public.pdf"]
    assert ask.environments.mount_for(skill_of(ask, bundle), None, lock, ask=lambda _: True).root.is_dir()
    lock.unlink()
    auto = host_of("auto")
    mount = auto.environments.mount_for(skill_of(auto, bundle), "scripts/other.py", lock)
    assert (mount.root / "python/two.py").is_file()
    assert not lock.exists()


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

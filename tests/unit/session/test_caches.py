"""What is kept from one model call to the next, and what makes it be made anew."""

from __future__ import annotations

import os
from typing import Any

import pytest

from kdskills.session import SkillRuntime
from kdskills.session.reading import SMALL
from kdskills.session.tools import INPUTS, schema


async def test_equal_state_gives_equal_bytes_and_specs(runtime: SkillRuntime) -> None:
    """Nothing changed: the same text, and the very same specs."""
    session = await runtime.create_session(initial=["sales"])
    first, specs = await session.instructions(), session.tool_specs()
    assert await session.instructions() == first
    assert session.tool_specs() is specs


async def test_an_edit_within_one_tick_reaches_the_next_call(bundle: Any, runtime: SkillRuntime) -> None:
    """A description changes to one of the same size, with the old time put back: catalog and staleness follow."""
    session = await runtime.create_session(initial=["sales"])
    assert "About sales." in (await session.instructions()).available
    file = bundle.root / "skills/acme/sales/SKILL.md"
    stamp = file.stat()
    file.write_text(file.read_text().replace("About sales.", "About tales."))
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert file.stat().st_size == stamp.st_size
    after = await session.instructions()
    assert ("About tales." in after.available, "About sales." in after.available) == (True, False)
    assert 'stale="true"' in after.active


async def test_policy_reaches_the_next_call(bundle: Any) -> None:
    """A filter that begins to deny takes the skill out of catalog, enum and active skills at once."""
    denied: dict[str, str] = {}
    runtime = SkillRuntime(subsystem=bundle.subsystem(filters=[lambda consumer, skills: dict(denied)]))
    session = await runtime.create_session(initial=["sales"])
    before = await session.instructions()
    assert ("sales" in _enum(session), "sales" in before.available, "sales" in before.active) == (True, True, True)
    denied["acme.sales"] = "not now"
    after = await session.instructions()
    assert ("sales" in _enum(session), "sales" in after.available, "sales" in after.active) == (False, False, False)
    assert not (await session.call("skills_read", {"path": "SKILL.md", "skill": "sales"})).ok
    denied.clear()
    assert "sales" in _enum(session)
    assert "sales" not in (await session.instructions()).active


async def test_a_skill_that_comes_or_goes_reaches_the_next_call(bundle: Any, runtime: SkillRuntime) -> None:
    """The enum is that of the skills there are now."""
    session = await runtime.create_session()
    before = _enum(session)
    bundle.skill("acme.zebra")
    assert _enum(session) == [*before, "zebra"]
    (bundle.root / "skills/acme/zebra/SKILL.md").unlink()
    assert _enum(session) == before


async def test_consumers_do_not_share_what_is_kept(runtime: SkillRuntime) -> None:
    """A consumer that may see more gets its own catalog and enum, before and after one that may not."""
    decision = await runtime.create_session()
    other = await runtime.create_session(consumer="writer")
    for _ in range(2):
        assert "embargo" not in (await decision.instructions()).available
        assert "embargo" in (await other.instructions()).available
        assert ("embargo" in _enum(decision), "embargo" in _enum(other)) == (False, True)


@pytest.mark.parametrize("tool", list(INPUTS))
def test_a_schema_can_be_changed_without_harm(tool: str) -> None:
    """A schema belongs to who asked for it: the next one is as it should be, however deep it was spoilt."""
    first = schema(tool, ["a"])
    pristine = repr(first)
    for field in first["properties"].values():
        field.clear()
    first["required"].append("everything")
    assert repr(schema(tool, ["a"])) == pristine
    spoilt = schema("skills.load")["properties"]["mode"]["enum"]
    spoilt.append("destroy")
    assert schema("skills.load")["properties"]["mode"]["enum"] == ["replace", "add"]


@pytest.mark.parametrize("size", [SMALL - 1, SMALL, SMALL + 1])
async def test_small_and_large_files_read_the_same(bundle: Any, runtime: SkillRuntime, size: int) -> None:
    """Decoding on the spot or in a thread gives the same answer, and refuses the same bytes."""
    bundle.file("acme.sales", "references/long.txt", b"\xc3\xa4" * (size // 2) + b"a" * (size % 2))
    bundle.file("acme.sales", "references/bad.txt", b"a" * (size - 1) + b"\xff")
    session = await runtime.create_session(initial=["sales"])
    found = await session.read("references/long.txt")
    assert (found.size, len(found.text or ""), found.truncated) == (size, size // 2 + size % 2, False)
    reply = await session.call("skills_read", {"path": "references/bad.txt"})
    assert (reply.ok, dict(reply.error or {}).get("code")) == (False, "not_text")


def _enum(session: Any) -> list[str]:
    """The names the load tool offers."""
    names: list[str] = session.tool_specs()[0].input_schema["properties"]["names"]["items"]["enum"]
    return names

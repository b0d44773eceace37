"""`skills.matrix` and pages of `skills.list`: every cell as the gate says it, narrowed, sorted, and told to nobody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kdskills.app import Host, Settings
from kdskills.app.crowd import write_crowd
from kdskills.app.identity import Identity
from kdskills.app.operations import Context
from kdskills.errors import BadRequest, CallRefused

EDITOR, READER = "desk.editor", "desk.reader"
SKILLS = {
    "billing/dunning": "description: Dunning letters for late bills.",
    "billing/invoice": "description: Reads invoices and extracts amounts.",
    "desk/brief": "description: Writes a brief.\ndisclosure: hidden",
    "desk/letter": "description: Writes a letter.\ndisable-model-invocation: true",
    "desk/for-editors": f"description: Edits pages.\ninclude_for: [{EDITOR}]",
    "desk/with-tools": "description: Asks the archive.",
    "desk/odd": "description: Keeps the calendar.\nversion: [1]",
    "desk/broken": "description: [",
    "internal/wheels": "description: Wheels of the house.",
}


def make(folder: Path, skills: dict[str, str], body: str = "Do it.") -> None:
    """Write skills as `{namespace/name: frontmatter}`."""
    for full_id, text in skills.items():
        skill = folder / "skills" / full_id
        skill.mkdir(parents=True)
        (skill / "SKILL.md").write_text(f"---\nname: {skill.name}\n{text}\n---\n{body}\n")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with a skill in every state, and two consumers with rules."""
    folder = tmp_path / "bundle"
    make(folder, SKILLS)
    (folder / "skills/desk/with-tools/tools.yaml").write_text("tools:\n- {id: archive.ask, required: true}\n")
    long_one = folder / "skills/billing/invoice/SKILL.md"
    long_one.write_text(long_one.read_text() + "Amounts. " * 500)
    rules = {EDITOR: {"disabled": ["billing.dunning"]}, READER: {"enabled": ["billing.*"]}, "*": {}, "@clerks": {}}
    (folder / "skills_descriptor.json").write_text(json.dumps({"agents_config": rules, "consumers": ["desk.third"]}))
    return folder


@pytest.fixture
def host(bundle: Path, tmp_path: Path) -> Host:
    """A Host whose project `local` has the bundle."""
    settings = Settings(bundle=bundle, state_dir=tmp_path / "state", index_dir=tmp_path / "index")
    return Host(settings, entry_points=False)


def remote(**changes: Any) -> Context:
    """Return the context of a caller with a token of the reader."""
    facts = {"agent": READER, "scopes": frozenset({"skills:read"}), "door": "http"} | changes
    return Context(identity=Identity(**facts))


def ids(answer: Any) -> list[str]:
    """Return the full ids of an answer."""
    return [row.full_id for row in answer.skills]


@pytest.mark.parametrize("arguments", [{}, {"tools": ("archive.ask",)}, {"tools": ()}, {"include_internal": True}])
async def test_every_cell_is_what_the_list_says(host: Host, arguments: dict[str, Any]) -> None:
    """State and code of each cell are those of `skills.list` for that consumer; counts are those of the cells."""
    matrix = await host.call("skills.matrix", consumers=(EDITOR, READER, "nobody.else"), **arguments)
    assert [column.consumer for column in matrix.consumers] == [EDITOR, READER, "nobody.else"]
    states: set[str] = set()
    for place, column in enumerate(matrix.consumers):
        listed = await host.call("skills.list", consumer=column.consumer, **arguments)
        expected = {row.full_id: (row.state, row.code) for row in listed.skills}
        cells = {row.full_id: row.cells[place] for row in matrix.skills}
        assert {full_id: (cell.state, cell.code) for full_id, cell in cells.items()} == expected
        rows = [state for state, _ in expected.values()]
        assert column.counts == {state: rows.count(state) for state in column.counts}
        states |= {*rows}
    assert states == {"listed", "hidden", "unlisted", "refused", "invalid"}


async def test_columns_are_those_that_the_bundle_names(host: Host, bundle: Path) -> None:
    """Consumers of rules, of the list and of a recording are there, groups and everybody are not, and each once."""
    assert [each.consumer for each in (await host.call("skills.matrix")).consumers] == [EDITOR, READER, "desk.third"]
    demo = "kdskills_demo: 1\nreplies:\n- {role: desk.recorded, text: hello}\n- {role: desk.editor, text: hello}\n"
    (bundle / "demo.yaml").write_text(demo)
    named = [each.consumer for each in (await host.call("skills.matrix")).consumers]
    assert named[:3] == [EDITOR, READER, "desk.third"]
    assert len(named) == len({*named})


async def test_a_bundle_that_names_nobody(tmp_path: Path) -> None:
    """There is one column then, that of an anonymous consumer."""
    make(tmp_path / "b", {"desk/brief": "description: Writes."})
    host = Host(Settings(index_dir=None), entry_points=False)
    answer = await host.call("skills.matrix", bundle=tmp_path / "b")
    assert [each.consumer for each in answer.consumers] == [None]
    assert [cell.state for cell in answer.skills[0].cells] == ["listed"]


async def test_unknown_consumers_are_told(host: Host) -> None:
    """A column of a consumer that nothing names comes with a warning, one of the bundle's own does not."""
    answer = await host.call("skills.matrix", consumers=(EDITOR, "desk.editr"))
    assert [(each.code, each.ref) for each in answer.diagnostics] == [("consumer_unknown", "desk.editr")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"filter": "AMOUNTS"}, ["billing.invoice"]),
        ({"filter": "nothing at all"}, []),
        ({"namespace": "billing"}, ["billing.dunning", "billing.invoice"]),
        ({"namespace": "bill"}, []),
        ({"state": "invalid"}, ["desk.broken"]),
        ({"state": "listed", "consumer": READER}, ["billing.dunning", "billing.invoice"]),
        ({"state": "refused", "consumer": EDITOR}, ["billing.dunning", "internal.wheels"]),
        ({"state": "listed", "consumer": "not.a.column"}, []),
        ({"state": "hidden"}, ["desk.brief"]),
        ({"min_tokens": 500}, ["billing.invoice"]),
        ({"max_tokens": 0}, ["desk.broken"]),
        ({"findings": "error"}, ["desk.broken"]),
        ({"findings": "warning"}, ["desk.odd"]),
        ({"findings": "any"}, ["desk.broken", "desk.odd"]),
        ({"findings": "none", "namespace": "billing"}, ["billing.dunning", "billing.invoice"]),
        ({"query": "extract the amounts of an invoice"}, ["billing.invoice"]),
        ({"query": "wheels"}, ["internal.wheels"]),
        ({"query": "zyzzyva* NEAR/2 \0"}, []),
    ],
)
async def test_filters(host: Host, arguments: dict[str, Any], expected: list[str]) -> None:
    """Each filter narrows the rows and nothing else: columns, their counts and the namespaces stay."""
    whole, answer = await host.call("skills.matrix"), await host.call("skills.matrix", **arguments)
    assert ids(answer) == expected
    assert (answer.total, answer.skills_total) == (len(expected), len(SKILLS))
    assert (answer.consumers, answer.namespaces) == (whole.consumers, whole.namespaces)
    assert answer.namespaces == {"billing": 2, "desk": 6, "internal": 1}


async def test_sorting(host: Host) -> None:
    """Most tokens and most findings come first; states are those of the column asked for; a query sorts by fit."""
    assert ids(await host.call("skills.matrix", sort="tokens"))[0] == "billing.invoice"
    assert ids(await host.call("skills.matrix", sort="findings"))[:2] == ["desk.broken", "desk.odd"]
    assert ids(await host.call("skills.matrix", sort="name"))[1:3] == ["desk.brief", "billing.dunning"]
    answer = await host.call("skills.matrix", sort="state", consumer=READER)
    assert ids(answer)[:2] == ["billing.dunning", "billing.invoice"]
    assert [row.cells[1].state for row in answer.skills] == ["listed"] * 2 + ["refused"] * 6 + ["invalid"]
    by_fit = await host.call("skills.matrix", query="writes a letter")
    assert ids(by_fit)[0] == "desk.letter"
    assert ids(await host.call("skills.matrix", query="writes a letter", sort="id")) == sorted(ids(by_fit))


async def test_pages_are_the_whole(host: Host) -> None:
    """Pages by offset give every row once, in order, and say when there are no more."""
    whole, rows, more = ids(await host.call("skills.matrix")), [], True
    while more:
        page = await host.call("skills.matrix", limit=4, offset=len(rows))
        rows, more = rows + ids(page), page.more
        assert page.total == len(whole)
    assert rows == whole == sorted(whole)
    assert (ids(await host.call("skills.matrix", offset=1000)), page.more) == ([], False)


async def test_a_caller_elsewhere_is_told_of_its_own(host: Host) -> None:
    """There is its own column, with what it may use; what it may not does not exist in rows, counts or namespaces."""
    answer = await host.invoke("skills.matrix", {}, remote())
    assert ids(answer) == ["billing.dunning", "billing.invoice"]
    assert [(each.consumer, each.counts["listed"]) for each in answer.consumers] == [(READER, 2)]
    assert sum(answer.consumers[0].counts.values()) == answer.skills_total == 2
    assert answer.namespaces == {"billing": 2}
    for arguments in ({"state": "refused"}, {"namespace": "desk"}, {"query": "writes a brief"}, {"findings": "error"}):
        assert ids(await host.invoke("skills.matrix", arguments, remote())) == []
    assert ids(await host.invoke("skills.matrix", {"query": "late bills"}, remote())) == ["billing.dunning"]


@pytest.mark.parametrize(
    "arguments", [{"consumers": [EDITOR]}, {"consumers": [READER, EDITOR]}, {"tools": []}, {"include_internal": True}]
)
async def test_a_caller_elsewhere_borrows_no_view(host: Host, arguments: dict[str, Any]) -> None:
    """Columns of others, tools and what is internal are the host's to say; its own column may be named."""
    with pytest.raises(CallRefused) as refused:
        await host.invoke("skills.matrix", arguments, remote())
    assert refused.value.code == "not_yours_to_say"
    assert (await host.invoke("skills.matrix", {"consumers": [READER]}, remote())).skills_total == 2
    assert (await host.invoke("skills.matrix", arguments, remote(scopes=frozenset({"admin"})))).skills_total == len(
        SKILLS
    )


@pytest.mark.parametrize(
    "arguments",
    [{"consumers": []}, {"consumers": ["a"] * 33}, {"limit": 0}, {"limit": 501}, {"offset": -1}, {"sort": "size"}],
)
async def test_arguments_out_of_range(host: Host, arguments: dict[str, Any]) -> None:
    """What is out of range is refused before anything is looked at."""
    with pytest.raises(BadRequest):
        await host.call("skills.matrix", **arguments)


async def test_a_changed_file_is_seen(host: Host, bundle: Path) -> None:
    """Rules and files are those of now: a skill that is added stands in the next answer, in every column."""
    await host.call("skills.matrix")
    make(bundle, {"billing/added": "description: Added meanwhile."})
    subsystem = (await host.project_skills("local")).subsystem
    subsystem.refresh()
    row = next(row for row in (await host.call("skills.matrix")).skills if row.full_id == "billing.added")
    assert [cell.state for cell in row.cells] == ["listed"] * 3


async def test_the_list_has_pages(host: Host) -> None:
    """In every order pages by cursor give each skill once, as the whole list does, and `visible` is that of the page."""
    for sort in ("id", "name", "state", "tokens"):
        whole = await host.call("skills.list", sort=sort)
        rows: list[Any] = []
        visible: list[str] = []
        cursor = None
        while not rows or cursor is not None:
            page = await host.call("skills.list", sort=sort, limit=2, cursor=cursor)
            assert (len(page.skills) <= 2, page.total) == (True, len(SKILLS))
            rows, visible, cursor = [*rows, *page.skills], [*visible, *page.visible], page.next_cursor
        assert tuple(rows) == whole.skills
        assert (sorted(visible), whole.next_cursor, whole.total) == (sorted(whole.visible), None, len(SKILLS))


@pytest.mark.parametrize("cursor", ["x", "WyJhIl0", "WzEsMiwzXQ", "é", "A" * 2048])
async def test_a_cursor_of_another_list(host: Host, cursor: str) -> None:
    """A cursor that this list, in this order, did not give is refused with its path."""
    other = (await host.call("skills.list", sort="tokens", limit=1)).next_cursor
    for wrong in (cursor, other):
        with pytest.raises(BadRequest) as refused:
            await host.call("skills.list", cursor=wrong, limit=1)
        assert refused.value.details["errors"][0]["path"] == "/cursor"


async def test_pages_tell_nobody_more(host: Host) -> None:
    """Totals and cursors of a caller elsewhere are those of what it is told of."""
    page = await host.invoke("skills.list", {"limit": 1}, remote())
    assert (page.total, ids(page)) == (2, ["billing.dunning"])
    rest = await host.invoke("skills.list", {"limit": 1, "cursor": page.next_cursor}, remote())
    assert (ids(rest), rest.next_cursor) == (["billing.invoice"], None)


async def test_thousands_take_one_look(tmp_path: Path) -> None:
    """Among thousands of skills a page holds what it was asked for alone, and its answer stays small."""
    namespaces = write_crowd(tmp_path / "b/skills", 1200)
    rules = {f"team.{number}": {"enabled": [f"{name}.*" for name in namespaces[number::2]]} for number in range(5)}
    (tmp_path / "b/skills_descriptor.json").write_text(json.dumps({"agents_config": rules}))
    host = Host(Settings(bundle=tmp_path / "b", state_dir=tmp_path / "s", index_dir=tmp_path / "i"), entry_points=False)
    answer = await host.call("skills.matrix", limit=50)
    assert (len(answer.skills), answer.total, len(answer.consumers)) == (50, 1200, 5)
    assert all(sum(column.counts.values()) == 1200 for column in answer.consumers)
    assert len(answer.model_dump_json()) < 64 * 1024

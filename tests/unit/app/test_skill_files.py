"""`skills.files` and `skills.file`: what is there, in pieces, as sessions read it, and nothing that is withheld."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from kdskills.app import Host, Settings
from kdskills.app.identity import SCOPES, Identity, own_client
from kdskills.app.operations import Context
from kdskills.app.operations.skill_files import MAX_FILE_BYTES, MAX_FILES
from kdskills.errors import BadRequest, KdskillsError
from kdskills.skills.safe_open import walk_tree

SKILL = "---\nname: brief\ndescription: Writes a brief.\n---\nWrite it.\n"
ADMIN = Context(identity=Identity(agent="ann", scopes=frozenset({"admin"}), door="http"))
READER = Context(identity=Identity(agent="ann", scopes=frozenset({"skills:read"}), door="http"))
MODEL = Context(identity=Identity(agent="ann", scopes=SCOPES, door="mcp"))


@pytest.fixture
def skill(tmp_path: Path) -> Path:
    """The folder of a skill with a reference, a script, data and evaluations."""
    folder = tmp_path / "bundle/skills/desk/brief"
    files = {
        "SKILL.md": SKILL.encode(),
        "references/häuser.md": "Häuser 🏠 und Gärten\n".encode() * 3,
        "scripts/run.py": b"print('hello')\n",
        "data/table.bin": bytes(range(256)) * 4,
        "evals/evals.yaml": b"- {id: one, answer: 42}\n",
    }
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    (folder / "scripts/run.py").chmod(0o755)
    return folder


@pytest.fixture
def host(skill: Path, tmp_path: Path) -> Host:
    """A Host whose project `local` has the skill."""
    return Host(Settings(bundle=skill.parents[2], state_dir=tmp_path / "state", index_dir=None), entry_points=False)


async def code(host: Host, context: Context | None = None, **arguments: Any) -> str:
    """Return the code that `skills.file` refuses with."""
    with pytest.raises(KdskillsError) as refused:
        await host.invoke("skills.file", {"ref": "desk.brief"} | arguments, context or READER)
    return refused.value.code


async def test_files_are_told(host: Host, skill: Path) -> None:
    """Path, kind, type, size, whether it may be run, and the digest of its bytes, sorted by path."""
    answer = await host.invoke("skills.files", {"ref": "desk.brief"}, READER)
    rows = {row.path: row for row in answer.files}
    assert list(rows) == ["SKILL.md", "data/table.bin", "references/häuser.md", "scripts/run.py"]
    for path, row in rows.items():
        data = (skill / path).read_bytes()
        assert (row.kind, row.size, row.digest) == ("file", len(data), f"sha256:{hashlib.sha256(data).hexdigest()}")
    assert [row.executable for row in rows.values()] == [False, False, False, True]
    assert (rows["SKILL.md"].media_type, rows["scripts/run.py"].media_type) == ("text/markdown", "text/x-python")
    assert (answer.total, answer.bytes, answer.more, answer.truncated) == (
        4, sum(row.size or 0 for row in answer.files), False, False,
    )  # fmt: skip


@pytest.mark.parametrize(("context", "told"), [(ADMIN, True), (READER, False), (MODEL, False)])
async def test_evaluations_are_withheld(host: Host, context: Context, told: bool) -> None:
    """People who are told of everything see that there are any; nobody gets a digest or a byte of them."""
    answer = await host.invoke("skills.files", {"ref": "desk.brief", "below": "evals/"}, context)
    assert [(row.path, row.withheld, row.digest) for row in answer.files] == [("evals/evals.yaml", True, None)][
        : int(told)
    ]
    for path in ("evals/evals.yaml", "Evals/evals.yaml", "./evals/evals.yaml", "evals//evals.yaml"):
        assert await code(host, context, path=path) == "resource_not_found"


async def test_a_model_on_this_machine_is_told_no_evaluations(host: Host) -> None:
    """An author's client of MCP works on files of this machine, and is a model all the same."""
    identity = own_client("author", "local", "local", None)
    own = Context(
        identity=Identity(
            **{name: getattr(identity, name) for name in ("agent", "scopes", "local", "tools")}, door="mcp"
        )
    )
    answer = await host.invoke("skills.files", {"ref": "desk.brief"}, own)
    assert not any(row.withheld for row in answer.files)


async def test_pages_of_files(host: Host, skill: Path) -> None:
    """Pages by offset give each file once; `below` narrows, and digests can be left out."""
    for number in range(30):
        (skill / f"data/{number:02}.txt").write_text(str(number))
    rows: list[str] = []
    more = True
    while more:
        page = await host.call(
            "skills.files", ref="desk.brief", below="data/", limit=7, offset=len(rows), digests=False
        )
        assert not any(row.digest for row in page.files)
        rows, more = [*rows, *(row.path for row in page.files)], page.more
    assert rows == [*(f"data/{number:02}.txt" for number in range(30)), "data/table.bin"]


async def test_thousands_of_files_are_bounded(host: Host, skill: Path) -> None:
    """Of more files than are looked at the answer says so, and stays a page."""
    await host.call("skills.files", ref="desk.brief")
    (skill / "many").mkdir()
    for number in range(MAX_FILES + 5):
        os.close(os.open(skill / f"many/{number}", os.O_CREAT | os.O_WRONLY))
    answer = await host.call("skills.files", ref="desk.brief", limit=10)
    assert (len(answer.files), answer.truncated, answer.more) == (10, True, True)
    assert answer.total <= MAX_FILES
    assert len(walk_tree(skill, most=100)) == 100


async def test_links_and_devices_are_named_and_never_read(host: Host, skill: Path, tmp_path: Path) -> None:
    """A link stands there as a link, a FIFO as something else; no bytes of either are given, nor of what a link means."""
    (tmp_path / "secret").write_text("secret")
    (skill / "references/link.md").symlink_to(tmp_path / "secret")
    (skill / "out").symlink_to(tmp_path)
    os.mkfifo(skill / "data/pipe")
    await host.call("skills.files", ref="desk.brief")
    rows = {
        row.path: (row.kind, row.size, row.digest) for row in (await host.call("skills.files", ref="desk.brief")).files
    }
    assert rows["references/link.md"] == rows["out"] == ("link", 0, None)
    assert rows["data/pipe"] == ("other", 0, None)
    assert await code(host, path="references/link.md") == "path_denied"
    assert await code(host, path="out/secret") == "path_denied"
    assert await code(host, path="data/pipe") == "not_a_file"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("../brief/SKILL.md", "path_denied"),
        ("/etc/passwd", "path_denied"),
        ("references\\x", "path_denied"),
        ("C:x", "path_denied"),
        (".", "path_denied"),
        (" ", "invalid_argument"),
        ("references", "not_a_file"),
        ("SKILL.md/x", "resource_not_found"),
        ("nothing", "resource_not_found"),
        ("a" * 4000, "resource_not_found"),
        ("%2e%2e/SKILL.md", "resource_not_found"),
    ],
)
async def test_hostile_names_are_refused(host: Host, path: str, expected: str) -> None:
    """A path is taken as sessions take it: no form that leads elsewhere is followed or decoded."""
    assert await code(host, path=path) == expected


@pytest.mark.parametrize("limit", [4, 5, 7, 1000])
async def test_pieces_of_text_are_the_text(host: Host, skill: Path, limit: int) -> None:
    """Pieces end between characters, whatever the limit, and one after the other they are the file."""
    text, offset = "", 0
    while offset is not None:
        piece = await host.call(
            "skills.file", ref="desk.brief", path="references/häuser.md", offset=offset, limit=limit
        )
        assert piece.data is None
        assert "\ufffd" not in piece.text
        text, offset = text + piece.text, piece.next_offset
    data = (skill / "references/häuser.md").read_bytes()
    assert (text.encode(), piece.size, piece.digest) == (data, len(data), f"sha256:{hashlib.sha256(data).hexdigest()}")


async def test_pieces_of_bytes(host: Host, skill: Path) -> None:
    """What is no text comes in base64; asked for as text it is refused; text can be had in base64."""
    arguments = {"ref": "desk.brief", "path": "data/table.bin", "limit": 1000}
    first = await host.call("skills.file", **arguments)
    rest = await host.call("skills.file", **arguments, offset=first.next_offset)
    data = base64.b64decode(first.data) + base64.b64decode(rest.data)
    assert (data, rest.next_offset) == ((skill / "data/table.bin").read_bytes(), None)
    assert await code(host, path="data/table.bin", encoding="text") == "not_text"
    whole = await host.call("skills.file", ref="desk.brief", path="SKILL.md", encoding="base64")
    assert (base64.b64decode(whole.data), whole.text) == (SKILL.encode(), None)
    beyond = await host.call("skills.file", ref="desk.brief", path="SKILL.md", offset=10**9)
    assert (beyond.text, beyond.next_offset) == ("", None)


async def test_a_file_too_large_is_not_read(host: Host, skill: Path) -> None:
    """It stands in the list without a digest."""
    with (skill / "data/huge").open("wb") as stream:
        stream.truncate(MAX_FILE_BYTES + 1)
    assert await code(host, path="data/huge") == "too_large"
    answer = await host.call("skills.files", ref="desk.brief", below="data/huge")
    assert [(row.size, row.digest) for row in answer.files] == [(MAX_FILE_BYTES + 1, None)]


async def test_what_is_refused_does_not_exist(host: Host, skill: Path) -> None:
    """A caller elsewhere is told of no file of a skill that its agent may not use; an administrator is told why."""
    (skill.parents[2] / "skills_descriptor.yaml").write_text("agents_config: {ann: {disabled: [desk.brief]}}\n")
    for name, more in (("skills.files", {}), ("skills.file", {"path": "SKILL.md"})):
        for context, expected in ((READER, "unknown_skill"), (ADMIN, "denied")):
            with pytest.raises(BadRequest) as refused:
                await host.invoke(name, {"ref": "desk.brief"} | more, context)
            assert refused.value.code == expected


async def test_a_bundle_by_its_folder(host: Host, skill: Path) -> None:
    """The account of the machine names a bundle's folder; others may not."""
    answer = await host.call("skills.file", bundle=skill.parents[2], ref="desk.brief", path="scripts/run.py")
    assert answer.text == "print('hello')\n"
    assert await code(host, bundle=str(skill.parents[2]), path="SKILL.md") == "not_yours_to_say"

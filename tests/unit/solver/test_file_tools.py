"""`files.read`, `files.edit`, `files.grep`, `files.glob`, in turns with a scripted model."""

import json
import time

import pytest

from kdskills.errors import ModelFailed
from kdskills.models import ModelImage
from kdskills.session.approval import Denial
from kdskills.solver import PlainWiring, file_tools
from kdskills.solver.file_tools import image_type, linear_pattern
from kdskills.solver.loop import compact
from kdskills.testing.models import ScriptedModel, call, say

PNG = b"\x89PNG\r\n\x1a\n\0\0"


@pytest.fixture
def ask(solve):
    """Return a function that calls tools with the skill `sales` loaded, and gives their calls."""

    async def run(*replies, files=(), **options):
        result = await solve([call("skills_load", names=["sales"]), *replies, say("done")], files=files, **options)
        return [step.calls[0] for step in result.steps[1:] if step.calls]

    return run


def value(made):
    """Return the decoded answer of a call, which must be ok."""
    assert made.error is None, made
    return json.loads(made.result)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.txt", "one\ntwo\n"),
        ("/work/a.txt", "one\ntwo\n"),
        ("turn:a.txt", "one\ntwo\n"),
        ("data/sales.csv", "region,total\nnorth,42\n"),
        ("/work/data/sales.csv", "region,total\nnorth,42\n"),
        ("/skills/acme.sales/scripts/sum.py", "print(42)\n"),
        ("$SKILL_DIR/scripts/sum.py", "print(42)\n"),
        ("${SKILL_DIR}/references/notes.md", "Mind the totals [[S:1]].\n"),
    ],
)
async def test_a_path_means_what_it_means_in_a_command(ask, path, text):
    """The turn's folder and loaded skills, by the spellings skills use."""
    (made,) = await ask(call("files_read", path=path), files=[("a.txt", b"one\ntwo\n")])
    assert value(made)["text"] == text


@pytest.mark.parametrize("tool", ["files_read", "files_edit", "files_grep", "files_glob"])
@pytest.mark.parametrize(
    ("path", "codes"),
    [
        ("../x", {"path_denied"}),
        ("/etc/passwd", {"path_denied"}),
        ("/work/../etc/passwd", {"path_denied"}),
        ("/skills/acme.sales/../acme.secret/SKILL.md", {"path_denied"}),
        ("/skills/acme.sales/..", {"path_denied"}),
        ("/skills/acme.secret/SKILL.md", {"skill_not_active"}),
        ("/skills/acme.brief/SKILL.md", {"skill_not_active"}),
        ("/skills", {"path_denied"}),
        ("a\0b", {"path_denied"}),
        ("link", {"path_denied", "resource_not_found"}),
        ("none", {"resource_not_found"}),
    ],
)
async def test_hostile_paths_are_refused(build, tool, path, codes):
    """Nothing of the host, nothing of a skill that is not loaded, and no link."""
    more = {"files_edit": {"old": "a", "new": "b"}, "files_grep": {"pattern": "."}}.get(tool, {})
    from kdskills.solver import ReactSolver

    replies = [call("skills_load", names=["sales"]), call(tool, path=path, **more), say("done")]
    async with build(replies) as system:
        solver = ReactSolver(system)
        async with solver.prepare_session("x") as turn:
            (turn.workspace.root / "link").symlink_to("/etc/passwd")
            await solver.work(turn)
    (made,) = turn.result.steps[1].calls
    assert made.error in codes


async def test_read_gives_lines_and_says_where_to_go_on(ask):
    """Lines are counted from 1; a line longer than an answer is cut, and told."""
    text = "".join(f"line {number}\n" for number in range(1, 101)).encode()
    middle, last, beyond, long = await ask(
        call("files_read", path="a.txt", offset=10, limit=2),
        call("files_read", path="a.txt", offset=100),
        call("files_read", path="a.txt", offset=500),
        call("files_read", path="long"),
        files=[("a.txt", text), ("long", b"x" * 500_000)],
    )
    assert value(middle) | {"size": 0} == {
        "path": "a.txt", "size": 0, "lines": 100, "shown": [10, 11], "next_offset": 12, "text": "line 10\nline 11\n",
    }  # fmt: skip
    assert (value(last)["text"], "next_offset" in value(last)) == ("line 100\n", False)
    assert (value(beyond)["text"], value(beyond)["shown"]) == ("", None)
    assert (value(long)["cut"], len(value(long)["text"]) < 100_000) == ("line 1 has 500000 characters", True)


async def test_what_is_no_text_is_told(ask):
    """An image is named as one to a model that takes none; other bytes are refused."""
    image, binary = await ask(
        call("files_read", path="a.png"), call("files_read", path="b.bin"), files=[("a.png", PNG), ("b.bin", b"\0\1")]
    )
    named = value(image)
    assert (named["shown"], named["media_type"], named["size"]) == (False, "image/png", len(PNG))
    assert "program" in named["note"]
    assert binary.error == "not_text"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a\1", "image/gif"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image/webp"),
        (b"RIFF\0\0\0\0WAVEfmt ", None),
        (b"<svg/>", None),
        (b"", None),
    ],
)
def test_an_image_is_known_by_its_first_bytes(data, kind):
    """Whatever its name says."""
    assert image_type(data) == kind


async def test_an_image_is_shown_to_a_model_that_takes_images(solve):
    """Beside the answer, and no longer once its result is left out; a generator that takes none gets the text."""
    script = [call("files_read", path="a.png"), say("done")]
    files = [("a.png", PNG), ("b.txt", b"text")]
    model = ScriptedModel(script)
    result = await solve(model=model, files=files, images=True)
    assert value(result.steps[0].calls[0]) == {
        "path": "a.png", "size": len(PNG), "media_type": "image/png", "shown": True,
    }  # fmt: skip
    assert model.requests[1].messages[-1].images == (ModelImage("image/png", PNG),)
    step = model.requests[1].messages[1:]
    assert [message.images != () for message in compact(step * 3, (), 1)] == [False, False, False, True, False, True]
    blind = ScriptedModel(list(script))
    blind.takes_images = True
    await solve(model=blind, files=files, images=False)
    assert blind.requests[1].messages[-1].images == ()


async def test_images_that_a_provider_refuses_are_left_out(solve):
    """The request is made once more without them, and so are later ones; one without images is not made again."""
    refused = ModelFailed("no image", status=400)
    model = ScriptedModel([call("files_read", path="a.png"), refused, call("files_read", path="b.txt"), say("done")])
    result = await solve(model=model, files=[("a.png", PNG), ("b.txt", b"text")], images=True)
    shown = [any(message.images for message in request.messages) for request in model.requests]
    assert (result.status, shown) == ("final", [False, True, False, False])
    answers = [
        [message.text for message in request.messages if message.tool == "files_read"] for request in model.requests
    ]
    assert ["the provider refused it" in texts[0] for texts in answers[1:]] == [False, True, True]
    assert "the provider refused it" not in answers[3][1]  # the text file's
    with pytest.raises(ModelFailed):
        await solve([refused])


async def test_images_have_bounds(ask, monkeypatch):
    """One that is too large, and more than a turn may show, are refused with what to do instead."""
    monkeypatch.setattr(file_tools, "MAX_IMAGE", 20)
    monkeypatch.setattr(file_tools, "MAX_IMAGES", 25)
    files = [("large.png", PNG + b"\0" * 20), *((f"{name}.png", PNG) for name in "abc")]
    calls = [call("files_read", path=path) for path, _ in files]
    large, first, second, third = await ask(*calls, files=files, images=True)
    assert (large.error, first.error, second.error, third.error) == ("too_large", None, None, "too_large")


async def test_edit_replaces_an_exact_text_once_or_everywhere(ask):
    """A text that is absent or stands there more often is refused with its count; line ends and BOM stay."""
    written, absent, many, every, same, unchanged = await ask(
        call("react_write", path="/work/a.txt", text="\ufeffx = 1\r\nx = 2\r\n"),
        call("files_edit", path="a.txt", old="y", new="z"),
        call("files_edit", path="a.txt", old="x", new="z"),
        call("files_edit", path="a.txt", old="x", new="z", all=True),
        call("files_edit", path="a.txt", old="z", new="z"),
        call("files_read", path="a.txt"),
    )
    assert (written.error, absent.error, many.error, same.error) == (None, *["invalid_argument"] * 3)
    assert value(every)["replaced"] == 2
    assert value(unchanged)["text"] == "z = 1\r\nz = 2\r\n"
    assert value(unchanged)["size"] == len("\ufeffz = 1\r\nz = 2\r\n".encode())


async def test_the_counts_of_an_edit_are_told(build):
    """The model learns how often its text occurs, and what to do."""
    from kdskills.solver import ReactSolver
    from kdskills.testing.models import ScriptedModel

    model = ScriptedModel([call("files_edit", path="data.txt", old="a", new="b"), say("done")])
    async with build(model=model) as system:
        await ReactSolver(system).run("x", files=[("data.txt", b"a a a")])
    assert "old occurs 3 times in 'data.txt'" in model.requests[-1].messages[-1].text


async def test_inputs_data_and_skills_are_not_edited(ask):
    """What was handed in, the bundle's data and skills stay as they are."""
    calls = await ask(
        call("files_edit", path="a.txt", old="a", new="b"),
        call("files_edit", path="data/sales.csv", old="north", new="b"),
        call("files_edit", path="$SKILL_DIR/scripts/sum.py", old="42", new="43"),
        files=[("a.txt", b"a")],
    )
    assert [made.error for made in calls] == ["path_denied"] * 3


async def test_grep_finds_lines_in_the_turn_and_in_skills(ask):
    """As `path:line:text`, by path; files that are no text are told."""
    files = [("a.py", b"import os\nx = 1\n"), ("sub/b.py", b"IMPORT re\n"), ("c.txt", b"import c\n"), ("d.bin", b"\0")]
    everywhere, by_name, folder, skill, few, none = await ask(
        call("files_grep", pattern="^import"),
        call("files_grep", pattern="import", glob="*.py", ignore_case=True),
        call("files_grep", pattern="i", path="sub", ignore_case=True),
        call("files_grep", pattern="total|42", path="$SKILL_DIR"),
        call("files_grep", pattern=".", limit=1, glob="a.py"),
        call("files_grep", pattern="nowhere to be found"),
        files=files,
    )
    assert value(everywhere)["matches"] == ["a.py:1:import os", "c.txt:1:import c"]
    assert value(everywhere)["skipped"] == ["d.bin: not_text"]
    assert value(by_name)["matches"] == ["a.py:1:import os", "sub/b.py:1:IMPORT re"]
    assert value(folder)["matches"] == ["sub/b.py:1:IMPORT re"]
    assert value(skill)["matches"] == [
        "/skills/acme.sales/references/notes.md:1:Mind the totals [[S:1]].",
        "/skills/acme.sales/scripts/sum.py:1:print(42)",
    ]
    assert (len(value(few)["matches"]), "more" in value(few)) == (1, True)
    assert value(none)["matches"] == []


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*b", "(.*)*x", "(x+x+)+y", "a{1000}", "(?i)(ä|Ä)+!", "(a?){30}a{30}", ".*.*.*=.*"]
)
def test_pattern_bombs_end_at_once(pattern):
    """A pattern is matched in time linear in the line."""
    began = time.monotonic()
    linear_pattern(pattern).search("a" * 100_000)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("pattern", ["(?=a)", r"(a)\1", "((a{1000}){1000}){1000}", "[", "(" * 900])
async def test_patterns_that_cannot_be_used_are_told(ask, pattern):
    """The words say what is wrong, and that look-around and references are not there."""
    (made,) = await ask(call("files_grep", pattern=pattern))
    assert made.error == "invalid_argument"


@pytest.mark.parametrize(
    ("arguments", "paths"),
    [
        ({"pattern": "*.py"}, ["a.py"]),
        ({"pattern": "**/*.py"}, ["a.py", "sub/b.py"]),
        ({"pattern": "*.py", "path": "sub"}, ["sub/b.py"]),
        ({"pattern": "/work/sub/*"}, ["sub/b.py"]),
        ({"pattern": "**", "path": "data"}, ["data/sales.csv"]),
        ({"pattern": "$SKILL_DIR/scripts/*"}, ["/skills/acme.sales/scripts/sum.py"]),
        ({"pattern": "/skills/acme.sales/*.md"}, ["/skills/acme.sales/SKILL.md"]),
        ({"pattern": "*" * 40 + "b"}, []),
    ],
)
async def test_glob_lists_paths(ask, arguments, paths):
    """Patterns go from the folder down; `**` is any number of folders."""
    (made,) = await ask(call("files_glob", **arguments), files=[("a.py", b""), ("sub/b.py", b"")])
    assert value(made)["paths"] == paths


async def test_a_glob_never_leads_out(ask):
    """As paths do not."""
    (made,) = await ask(call("files_glob", pattern="../*"))
    assert made.error == "path_denied"


class Policy(PlainWiring):
    """Refuses the reading of one file of a skill."""

    def deny(self, request):
        """Deny it, whatever tool asks."""
        return Denial("private") if request.path == "references/notes.md" else None


async def test_a_file_a_policy_refuses_is_not_read_and_not_searched(ask):
    """The other files of the skill are."""
    read, searched = await ask(
        call("files_read", path="$SKILL_DIR/references/notes.md"),
        call("files_grep", pattern=".", path="$SKILL_DIR"),
        wiring=Policy(),
    )
    assert read.error == "skill_denied"
    assert value(searched)["skipped"] == ["/skills/acme.sales/references/notes.md: skill_denied"]
    assert "totals" not in searched.result

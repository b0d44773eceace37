"""Files of evaluations: every form of them, hostile ones, and rows that are added."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdskills.errors import Conflict, FileRefused
from kdskills.evals.files import SPELLINGS, Eval, add_row, read

PATH = "skills/acme/hello/evals/evals.json"


def test_the_published_form(bundle):
    """Rows under `evals` have their prompt, answer, files and assertions; unknown keys are kept."""
    bundle.put("skills/acme/hello/evals/files/a.csv", "1")
    row = {
        "id": 1,
        "prompt": "Hi",
        "expected_output": "Hello",
        "files": ["evals/files/a.csv"],
        "assertions": ["polite"],
    }
    found = bundle.rows({"skill_name": "hello", "evals": [row | {"level": {"a": [1]}}]})
    assert found.evals == (
        Eval(
            "acme.hello/1",
            "Hi",
            "acme.hello",
            files=("evals/files/a.csv",),
            expected="Hello",
            assertions=("polite",),
            source=f"{PATH}#1",
            folder=str(bundle.root / "skills/acme/hello"),
            owner="acme.hello",
            extra={"level": {"a": [1]}},
        ),
    )
    assert found.diagnostics == ()


def test_bare_lists_with_the_skill_expected(bundle):
    """`question`, `ground_truth` and `expected_behavior` are read; no skill expected is a row that must not trigger its own."""
    common = {"expected_script": "check.py", "ground_truth": "It runs.", "expected_behavior": ["Ran it"]}
    found = bundle.rows(
        [
            {"id": "a", "question": "one", "expected_skill": "bye", **common},
            {"id": "b", "question": "two", "expected_skill": None, **common},
            {"id": "c", "question": "three", "acceptable_skills": ["acme/bye"], "must_not": ["bye", "sorry"]},
        ]
    )
    assert [(row.id, row.skill, row.should_trigger, row.acceptable, row.must_not) for row in found.evals] == [
        ("a", "acme.bye", True, (), ()),
        ("b", None, False, (), ("acme.hello",)),
        ("c", "acme.hello", True, ("acme.bye",), ("acme.bye", "sorry")),
    ]
    assert found.evals[0].extra == {}
    assert found.evals[0].checks == ({"script_ran": "check.py"},)
    assert (found.evals[0].expected, found.evals[0].assertions) == ("It runs.", ("Ran it",))


def test_trigger_sets(bundle):
    """`query` with `should_trigger` is about the skill whose folder it is in."""
    found = bundle.rows([{"query": "x", "should_trigger": True}, {"query": "y", "should_trigger": "false"}])
    assert [(row.skill, row.should_trigger, row.must_not) for row in found.evals] == [
        ("acme.hello", True, ()),
        (None, False, ("acme.hello",)),
    ]
    assert [row.id for row in found.evals] == ["acme.hello/evals-1", "acme.hello/evals-2"]


def test_our_own_keys(bundle, codes):
    """Keys under `kdskills` become fields; one that is wrong does not count, the others do."""
    own = {"checks": [{"contains": "Hello"}], "consumer": "c", "skills": ["bye"], "repeat": 3, "budget": 900}
    found = bundle.rows(
        [{"prompt": "a", "kdskills": own}, {"prompt": "b", "kdskills": own | {"repeat": 0, "chekcs": []}}]
    )
    for row, repeat in zip(found.evals, (3, 1), strict=True):
        assert row.checks == ({"contains": "Hello"},)
        assert (row.consumer, row.skills, row.repeat, row.budget) == ("c", ("acme.bye",), repeat, 900)
    assert codes(found) == ["eval_key_broken"] * 2
    assert "kdskills.chekcs" in " ".join(finding.message for finding in found.diagnostics)


@pytest.mark.parametrize("name", ["bye", "BYE", "acme/bye", "acme:bye", "acme.bye", "$bye", "sk:bye", "bye/SKILL.md"])
def test_names_of_skills(bundle, codes, name):
    """A skill may be named barely, with its namespace, or by its full id."""
    found = bundle.rows([{"question": "q", "expected_skill": name}])
    assert (found.evals[0].skill, codes(found)) == ("acme.bye", [])


def test_a_skill_that_is_not_there_is_told(bundle, codes):
    """The row stays, and counts as one that nothing can pass."""
    found = bundle.rows([{"question": "q", "expected_skill": "nobody"}])
    assert (found.evals[0].skill, codes(found)) == ("nobody", ["eval_skill_unknown"])


def test_a_bundle_has_evaluations_of_its_own(bundle):
    """Those in the bundle's `evals/` name their skill in the row, the file or by the folder; without one none is right."""
    bundle.put("evals/all.json", [{"prompt": "a", "expected_skill": "bye"}, {"prompt": "b", "expected_skill": None}])
    bundle.put("evals/bye/more.json", [{"prompt": "c"}])
    found = bundle.rows({"skill_name": "hello", "cases": [{"input": "d"}]}, "evals/cases.json")
    facts = {row.prompt: (row.skill, row.should_trigger, row.must_not) for row in found.evals}
    assert facts == {
        "a": ("acme.bye", True, ()),
        "b": (None, False, ()),
        "c": ("acme.bye", True, ()),
        "d": ("acme.hello", True, ()),
    }


def test_lines(bundle, codes):
    """In `.jsonl` each line is a row; a broken line costs that line alone."""
    found = bundle.rows('{"prompt": "a"}\n\n{"prompt": \n{"prompt": "b"}\n', "skills/acme/hello/evals/x.jsonl")
    assert [row.source[-2:] for row in found.evals] == ["#1", "#4"]
    assert [(finding.code, finding.line) for finding in found.diagnostics] == [("eval_file_broken", 3)]


def test_one_skill_alone(bundle):
    """The folder of a skill is read without its bundle; paths are relative to it."""
    bundle.put(PATH, [{"id": "x", "prompt": "p"}])
    (row,) = read(bundle.root / "skills/acme/hello").evals
    assert (row.source, row.owner and row.owner.rpartition(".")[2]) == ("evals/evals.json#1", "hello")


def test_ids_are_unique(bundle, codes):
    """Ids that two skills use get the skill in front, and one that stands twice in a file is told."""
    bundle.put("skills/acme/bye/evals/evals.json", [{"id": "same", "prompt": "p"}])
    found = bundle.rows([{"id": "same", "prompt": "p"}, {"id": "same", "prompt": "q"}, {"id": 7, "prompt": "r"}])
    assert [row.id for row in found.evals] == ["acme.bye/same", "acme.hello/same", "acme.hello/same#2", "acme.hello/7"]
    assert codes(found) == ["eval_id_taken"]


@pytest.mark.parametrize(
    ("content", "code", "line", "column"),
    [
        ('{"evals": [\n  {"prompt": }', "eval_file_broken", 2, 14),
        ("", "eval_file_broken", 1, 1),
        (b'[{"prompt": "\xff"}]', "eval_file_broken", None, None),
        ("[" * 100_000, "eval_file_broken", None, None),
        ('[{"prompt": "p", "n": ' + "9" * 5_000 + "}]", "eval_file_broken", None, None),
        ('{"settings": 1}', "eval_file_unknown", None, None),
        ("3", "eval_file_unknown", None, None),
    ],
)
def test_files_that_cannot_be_understood(bundle, content, code, line, column):
    """A file that is none is told with its name and, where there is one, line and column; nothing raises."""
    found = bundle.rows(content)
    (finding,) = found.diagnostics
    assert (found.evals, finding.code, finding.path, finding.line, finding.column) == ((), code, PATH, line, column)


@pytest.mark.parametrize(
    "row", [3, None, "text", ["p"], {}, {"prompt": ""}, {"prompt": "  "}, {"prompt": "x" * 1_048_577}]
)
def test_rows_that_cannot_be_understood(bundle, row):
    """Each is an error with file and row, and costs no other row."""
    found = bundle.rows([{"prompt": "a"}, row, {"prompt": "b"}])
    assert [(finding.code, finding.severity, finding.ref) for finding in found.diagnostics] == [
        ("eval_row_broken", "error", f"{PATH}#2")
    ]
    assert [row.prompt for row in found.evals] == ["a", "b"]


def test_a_prompt_of_a_megabyte(bundle, codes):
    """It is a prompt like others."""
    found = bundle.rows([{"prompt": "x" * 1_048_576}])
    assert (len(found.evals[0].prompt), codes(found)) == (1_048_576, [])


@pytest.mark.parametrize("key", ["prompt", "should_trigger", "assertions", "files", "must_not", "id"])
@pytest.mark.parametrize("value", [{"a": 1}, [[1]], 1.5, True])
def test_values_of_another_type(bundle, key, value):
    """A value that is none for its key is told or, where it can be read as one, counts; it is never dropped in silence."""
    found = bundle.rows([{"question": "q", key: value}])
    told = {finding.code for finding in found.diagnostics}
    kept = [row for row in found.evals if key in row.extra]
    read_as_one = [row for row in found.evals if key == "should_trigger" and value is True]
    assert read_as_one or (told <= {"eval_key_broken", "eval_row_broken"} and told and (kept or not found.evals))


def test_numbers_json_does_not_have(bundle, codes):
    """NaN and infinity become null and are told, so that results can be written as JSON."""
    found = bundle.rows('[{"prompt": "p", "weight": NaN, "more": [1, -Infinity]}]')
    assert (found.evals[0].extra, codes(found)) == ({"weight": None, "more": [1, None]}, ["eval_key_broken"])


def test_keys_that_stand_twice(bundle, codes):
    """The last one counts, and that is told, for a whole list of rows may be lost by it."""
    found = bundle.rows('{"evals": [{"prompt": "a"}], "evals": [{"prompt": "b"}]}')
    assert ([row.prompt for row in found.evals], codes(found)) == (["b"], ["eval_file_broken"])


@pytest.mark.parametrize(
    "path", ["../bye/SKILL.md", "/etc/passwd", "evals/files/link", "evals/linked/a", "none", "a\0b"]
)
def test_inputs_outside_the_folder(bundle, codes, path):
    """A file handed in that is outside, behind a link or not there is told, and the row stays without it."""
    folder = bundle.root / "skills/acme/hello/evals"
    (folder / "files").mkdir(parents=True)
    (folder / "files/link").symlink_to("/etc/passwd")
    (folder / "linked").symlink_to("/etc")
    found = bundle.rows([{"prompt": "p", "files": [path]}])
    assert (found.evals[0].files, codes(found)) == ((), ["eval_input_refused"])


def test_inputs_of_a_folder(bundle):
    """A folder stands for its files, and paths may be meant from the file of evaluations."""
    bundle.put("skills/acme/hello/evals/files/task/a.py", "")
    bundle.put("skills/acme/hello/evals/files/task/sub/b.py", "")
    found = bundle.rows([{"prompt": "p", "files": ["files/task/", {"path": "evals/files/task/a.py"}]}])
    assert found.evals[0].files == ("evals/files/task/a.py", "evals/files/task/sub/b.py")


def test_links_to_files_of_evaluations(bundle, codes):
    """A file or folder of evaluations that is a link is not followed, and told."""
    secret = bundle.put("secret.json", [{"prompt": "secret"}])
    (bundle.root / "skills/acme/hello/evals").mkdir()
    (bundle.root / PATH).symlink_to(secret)
    (bundle.root / "skills/acme/bye/evals").symlink_to(bundle.root)
    found = read(bundle.root)
    assert (found.evals, codes(found)) == ((), ["eval_file_unreadable"] * 2)


def test_many_rows(bundle, codes):
    """A hundred thousand rows are read, and of as many broken ones a thousand are told."""
    found = bundle.rows([{"id": str(n), "prompt": "p"} if n % 2 else n for n in range(100_000)])
    assert len(found.evals) == 50_000
    assert (len(found.diagnostics), codes(found)[-1]) == (1_001, "eval_findings_cut")


def test_data_beside_evaluations_is_no_evaluation(bundle, codes):
    """JSON that rows work with is not looked at, and in a subfolder only what has rows."""
    for path in ("files/a.json", "results/b.json", "sub/schema.json"):
        bundle.put(f"skills/acme/hello/evals/{path}", "[3, 4]")
    found = bundle.rows([{"prompt": "p"}], "skills/acme/hello/evals/sub/rows.json")
    assert ([row.prompt for row in found.evals], codes(found)) == (["p"], [])


VALUES = {
    "id": st.text(min_size=1) | st.integers(),
    "prompt": st.text(min_size=1).filter(str.strip),
    "skill": st.sampled_from(["hello", "acme.bye", None]),
    "should_trigger": st.booleans(),
    "acceptable": st.lists(st.sampled_from(["hello", "bye"])),
    "must_not": st.lists(st.text(min_size=1)),
    "files": st.just([]),
    "expected": st.text(),
    "assertions": st.lists(st.text(min_size=1)),
}


@st.composite
def rows(draw: Any) -> dict[str, Any]:
    """A row with each field by any of its spellings, or without it, and keys nobody knows."""
    row = draw(st.dictionaries(st.text(max_size=5).map("x-{}".format), st.integers(), max_size=2))
    for field, values in VALUES.items():
        if field == "prompt" or draw(st.booleans()):
            row[draw(st.sampled_from(SPELLINGS[field]))] = draw(values)
    return row


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(rows=st.lists(rows(), max_size=6), form=st.sampled_from(["list", "evals", "cases", "lines"]))
def test_no_row_of_any_spelling_is_lost(bundle, rows, form):
    """However its fields are called and rows are wrapped, each row is read with its prompt, and ids are unique."""
    (bundle.root / PATH).unlink(missing_ok=True)
    (bundle.root / PATH).with_suffix(".jsonl").unlink(missing_ok=True)
    if form == "lines":
        found = bundle.rows("\n".join(map(json.dumps, rows)), PATH + "l")
    else:
        found = bundle.rows(rows if form == "list" else {form: rows})
    prompts = [next(row[key] for key in SPELLINGS["prompt"] if key in row) for row in rows]
    assert [row.prompt for row in found.evals] == [prompt.encode("utf-8", "replace").decode() for prompt in prompts]
    assert len({row.id for row in found.evals}) == len(rows)
    for row, read_row in zip(rows, found.evals, strict=True):
        assert {key for key in row if key.startswith("x-")} <= set(read_row.extra)


# ---- add ----


def test_the_first_row_makes_the_published_file(bundle):
    """A new file has the published form, is what the reader reads, and closes with a line end."""
    folder = bundle.root / "skills/acme/hello"
    assert add_row(folder, {"prompt": "Grüße", "assertions": ["a"]}, skill_name="hello") == "1"
    text = (bundle.root / PATH).read_text()
    assert json.loads(text) == {"skill_name": "hello", "evals": [{"id": 1, "prompt": "Grüße", "assertions": ["a"]}]}
    assert ("Grüße" in text, text.endswith("}\n")) == (True, True)
    assert [row.prompt for row in read(bundle.root).evals] == ["Grüße"]


def test_a_row_is_appended_as_the_others_are_written(bundle):
    """Unknown keys, numbers, order and indentation stay, and fields are called as in the rows that are there."""
    before = '{\n    "z": 1.0,\n    "evals": [\n        {\n            "id": 4,\n            "question": "q",\n            "odd": null\n        }\n    ],\n    "a": "\\u00e9"\n}\n'
    path = bundle.put(PATH, before)
    path.chmod(0o640)
    assert add_row(bundle.root / "skills/acme/hello", {"prompt": "p", "expected_output": "e"}) == "5"
    new = '        },\n        {\n            "id": 5,\n            "question": "p",\n            "expected_output": "e"\n        }\n'
    assert path.read_text() == before.replace("        }\n", new)
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "3",
        '{"rows_": []}',
        '{"evals": {}}',
        b"\xff[]",
        '{"evals": [], "evals": []}',
        '[{"n": NaN}]',
        "[" * 100_000,
    ],
)
def test_a_file_that_is_not_understood_is_left_alone(bundle, content):
    """Nothing is written, and the error says why."""
    path = bundle.put(PATH, content)
    before = path.read_bytes()
    with pytest.raises(FileRefused) as caught:
        add_row(bundle.root / "skills/acme/hello", {"prompt": "p"})
    assert (caught.value.code, path.read_bytes(), [each.name for each in path.parent.iterdir()]) == (
        "eval_file_broken",
        before,
        ["evals.json"],
    )


def test_links_are_not_written_through(bundle, tmp_path):
    """Neither a folder nor a file that is a link is followed."""
    outside = tmp_path / "outside.json"
    outside.write_text("[]")
    folder = bundle.root / "skills/acme/hello"
    (folder / "evals").mkdir()
    (bundle.root / PATH).symlink_to(outside)
    (bundle.root / "skills/acme/bye/evals").symlink_to(tmp_path)
    for name in ("hello", "bye"):
        with pytest.raises(FileRefused):
            add_row(bundle.root / "skills/acme" / name, {"prompt": "p"})
    assert outside.read_text() == "[]"
    assert not (tmp_path / "evals.json").exists()


def test_an_id_is_given_once(bundle):
    """A row with the id of another is refused; rows whose ids are texts get a free one."""
    bundle.put(PATH, [{"id": "x", "prompt": "p"}, {"id": "eval-3", "prompt": "p"}])
    folder = bundle.root / "skills/acme/hello"
    with pytest.raises(Conflict):
        add_row(folder, {"id": "x", "prompt": "q"})
    assert add_row(folder, {"prompt": "q"}) == "eval-4"


def test_two_who_add_at_once(bundle):
    """No row is lost where several threads add to one file."""
    folder = bundle.root / "skills/acme/hello"
    threads = [threading.Thread(target=add_row, args=(folder, {"prompt": str(n)})) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read(folder)
    assert {row.prompt for row in found.evals} == set(map(str, range(8)))
    assert len({row.id for row in found.evals}) == 8
    assert sorted(path.name for path in Path(folder, "evals").iterdir()) == ["evals.json"]

"""Every code, under each verdict, with the severity the table says; and what `validate_skill` adds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kdskills.errors import FileRefused
from kdskills.skills import parse_skill, parse_skill_bytes, validate_skill
from kdskills.skills.findings import CODES

# The table of `docs/reference/skill-format.md`: lenient, spec, skills-ref.
TABLE = {
    **dict.fromkeys(
        (
            "path_missing",
            "not_a_directory",
            "file_missing",
            "unreadable",
            "symlink",
            "too_large",
            "not_utf8",
            "nul_byte",
            "no_frontmatter",
            "unclosed_frontmatter",
            "invalid_yaml",
            "not_a_mapping",
            "name_unsafe",
            "description_missing",
        ),
        "EEE",
    ),
    "dots_close": "WII",
    "bom": "WWW",
    "file_name_case": "WWI",
    "yaml_repaired": "W--",
    "duplicate_key": "WEE",
    **dict.fromkeys(
        (
            "name_missing",
            "name_bad_chars",
            "name_not_lowercase",
            "name_too_long",
            "name_edge_hyphen",
            "name_double_hyphen",
            "name_dir_mismatch",
            "description_too_long",
            "compatibility_too_long",
            "compatibility_type",
        ),
        "WEE",
    ),
    "name_not_ascii": "IWI",
    "metadata_type": "WEI",
    "allowed_tools_type": "WEI",
    "unexpected_fields": "IEE",
    "field_type": "WW-",
    "empty_body": "WWW",
    **dict.fromkeys(("id_normalised", "id_name_differ", "compact_invalid", "sources_invalid", "skill_yaml"), "WW-"),
    "tools_invalid": "EE-",
    "namespace_reserved": "EE-",
}
VERDICTS = ("lenient", "spec", "skills-ref")
OWN_FIELDS = ("id", "namespace", "tags")


def _text(lines: str, *, name: str = "brief", description: str = "d", body: str = "x") -> bytes:
    head = f"name: {name}\n" if name else ""
    return f"---\n{head}description: {description}\n{lines}\n---\n{body}".encode()


FILES: dict[str, bytes] = {
    "too_large": b"x" * 2_097_153,
    "not_utf8": b"\xff",
    "nul_byte": _text("", body="\0"),
    "no_frontmatter": b"# Title",
    "unclosed_frontmatter": b"---\nname: brief\n",
    "invalid_yaml": _text("tags: [a"),
    "not_a_mapping": b"---\n- a\n---\nx",
    "name_unsafe": _text("", name="a/b"),
    "description_missing": _text("", description="' '"),
    "dots_close": b"---\nname: brief\ndescription: d\n...\nx",
    "bom": b"\xef\xbb\xbf" + _text(""),
    "yaml_repaired": _text("", description="a: b"),
    "duplicate_key": _text("license: a\nlicense: b"),
    "name_missing": _text("", name=""),
    "name_bad_chars": _text("", name="a_b"),
    "name_not_lowercase": _text("", name="Brief"),
    "name_too_long": _text("", name="x" * 65),
    "name_edge_hyphen": _text("", name="'-brief'"),
    "name_double_hyphen": _text("", name="a--b"),
    "name_dir_mismatch": _text("", name="other"),
    "name_not_ascii": _text("", name="é"),
    "description_too_long": _text("", description="x" * 1025),
    "compatibility_too_long": _text("compatibility: " + "x" * 501),
    "compatibility_type": _text("compatibility:\n  - a"),
    "metadata_type": _text("metadata:\n  a:\n    - b"),
    "allowed_tools_type": _text("allowed-tools:\n  - Read"),
    "unexpected_fields": _text("Colour: red"),
    "field_type": _text("tags:\n  a: b"),
    "empty_body": _text("", body=" \n"),
    "id_normalised": _text("id: a b"),
    "id_name_differ": _text("id: other"),
    "namespace_reserved": _text("namespace: skills"),
}


def _build(code: str, put: Callable[..., Path], tmp_path: Path) -> Path:
    if code in FILES:
        return put("brief", FILES[code])
    makers: dict[str, Callable[[], Path]] = {
        "path_missing": lambda: tmp_path / "nowhere",
        "not_a_directory": lambda: put("brief", name="README.md") / "README.md",
        "file_missing": lambda: put("brief", None),
        "unreadable": lambda: _fifo(put("brief", None)),
        "symlink": lambda: _link(put("brief", name="real.md")),
        "file_name_case": lambda: put("brief", name="skill.md"),
        "skill_yaml": lambda: put("brief", None, **{"skill.yaml": b"name: brief"}),
        "compact_invalid": lambda: put("brief", **{"compact.md": b"\xff"}),
        "sources_invalid": lambda: put("brief", **{"sources.yaml": b"[a"}),
        "tools_invalid": lambda: put("brief", **{"tools.yaml": b"[a"}),
    }
    return makers[code]()


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "SKILL.md")
    return folder


def _link(folder: Path) -> Path:
    (folder / "SKILL.md").symlink_to("real.md")
    return folder


@pytest.mark.parametrize("verdict", VERDICTS)
@pytest.mark.parametrize("code", TABLE)
def test_each_code_has_its_severity(code: str, verdict: str, put: Callable[..., Path], tmp_path: Path) -> None:
    """A file made to show one code shows it with the severity of the published table, or not at all."""
    path = _build(code, put, tmp_path)
    found = {f.severity for f in validate_skill(path, verdict=verdict, extra_fields=OWN_FIELDS) if f.code == code}
    letter = TABLE[code][VERDICTS.index(verdict)]
    assert found == {{"E": "error", "W": "warning", "I": "info"}[letter]} - {None} if letter != "-" else found == set()
    parsed = parse_skill(path, verdict=verdict, extra_fields=OWN_FIELDS)
    assert parsed.ok is (parsed.skill is not None)
    assert parsed.ok is not any(f.severity == "error" for f in parsed.diagnostics)


@pytest.mark.parametrize("code", TABLE)
def test_code_table_is_the_published_one(code: str) -> None:
    """The table in the code says what the specification says."""
    row = CODES[code]
    letters = "".join({"error": "E", "warning": "W", "info": "I", None: "-"}[row.severity(v)] for v in VERDICTS)
    assert letters == TABLE[code]


def test_no_code_is_without_a_case() -> None:
    """Codes outside the published table are tested where they arise."""
    assert CODES.keys() - set(TABLE) == {"namespace_ignored", "unknown_placeholder"}


def test_duplicate_keys_come_with_invalid_yaml_when_strict(plain: bytes) -> None:
    """The strict verdicts refuse the YAML, not only the key."""
    for verdict in ("spec", "skills-ref"):
        found = parse_skill_bytes(FILES["duplicate_key"], folder="brief", verdict=verdict).diagnostics
        assert [f.code for f in found] == ["duplicate_key", "invalid_yaml"]


def test_bom_hides_the_fence_from_skills_ref() -> None:
    """That tool sees no frontmatter behind a BOM."""
    found = parse_skill_bytes(FILES["bom"], folder="brief", verdict="skills-ref").diagnostics
    assert [f.code for f in found] == ["bom", "no_frontmatter"]


def test_name_unsafe_stands_beside_name_bad_chars() -> None:
    """All that applies to a name is reported."""
    for name, more in (
        ("a/b", []),
        ("..", []),
        ("'.'", []),
        ('"A\\u0007-"', ["name_not_lowercase", "name_edge_hyphen"]),
    ):
        found = {f.code for f in parse_skill_bytes(_text("", name=name), folder="brief").diagnostics}
        assert {"name_unsafe", "name_bad_chars", "name_dir_mismatch", *more} <= found


@pytest.mark.parametrize(
    ("text", "severity"), [("license: [a]", "error"), ("license: 2.0", "error"), ("license: a", None)]
)
def test_license_is_strict_under_spec(text: str, severity: str | None) -> None:
    """A license that is no text refuses under spec."""
    found = parse_skill_bytes(_text(text), folder="brief", verdict="spec").diagnostics
    assert [f.severity for f in found] == ([severity] if severity else [])


def test_blank_compatibility_is_a_type_error_under_spec_only() -> None:
    """A blank compatibility refuses under spec and passes elsewhere."""
    data = _text("compatibility: ''")
    found = {v: [f.code for f in parse_skill_bytes(data, folder="brief", verdict=v).diagnostics] for v in VERDICTS}
    assert found == {"lenient": [], "spec": ["compatibility_type"], "skills-ref": []}


def test_skills_ref_takes_any_type_where_that_tool_does() -> None:
    """Metadata, license and allowed tools may be anything for skills-ref; flow style may not."""
    data = _text("metadata: text\nlicense:\n  - a\nallowed-tools:\n  a: b")
    assert parse_skill_bytes(data, folder="brief", verdict="skills-ref").ok
    assert not parse_skill_bytes(_text("metadata: {}"), folder="brief", verdict="skills-ref").ok


def test_skills_ref_reads_text_only() -> None:
    """For skills-ref every scalar is a text: null is a description, true a value."""
    data = _text("metadata:\n  n: 1\n  t: true", description="null")
    found = parse_skill_bytes(data, folder="brief", verdict="skills-ref")
    assert found.diagnostics == ()
    assert found.skill is not None
    assert found.skill.frontmatter == {"name": "brief", "description": "null", "metadata": {"n": "1", "t": "true"}}


def test_unexpected_fields_are_one_finding_with_all_keys() -> None:
    """One finding names every key; case counts; extra fields are expected."""
    data = _text("Name: x\nfoo: 1\nbar: 2\nversion: 1")
    lenient, spec = (parse_skill_bytes(data, folder="brief", verdict=v).diagnostics for v in ("lenient", "spec"))
    assert [f.ref for f in lenient] == ["Name, foo, bar"]
    assert [f.ref for f in spec] == ["Name, foo, bar, version"]
    assert parse_skill_bytes(data, folder="brief", verdict="spec", extra_fields={"Name", "foo", "bar", "version"}).ok


def test_six_keys_only_in_their_spelling() -> None:
    """`allowed_tools` is not the published key."""
    found = parse_skill_bytes(_text("allowed_tools: Read"), folder="brief", verdict="spec").diagnostics
    assert [(f.code, f.ref) for f in found] == [("unexpected_fields", "allowed_tools")]


def test_findings_have_place_and_cure(put: Callable[..., Path]) -> None:
    """A finding says where in the file and what mends it."""
    folder = put("brief", b"---\nname: brief\ndescription: d\nmetadata: 5\n---\nx")
    found = validate_skill(folder)[0]
    assert (found.path, found.line, found.column, found.ref) == ("SKILL.md", 4, 1, "metadata")
    assert found.fix


def test_validate_adds_companions_sorted(put: Callable[..., Path]) -> None:
    """Findings of companions join, ordered by path, line and code."""
    folder = put(
        "brief",
        b"---\nname: other\ndescription: d\nfoo: 1\n---\n",
        **{"compact.md": b"", "sources.yml": b"5", "tools.yml": b"{}"},
    )
    found = [(f.path, f.code) for f in validate_skill(folder)]
    assert found == [
        ("SKILL.md", "empty_body"),
        ("SKILL.md", "name_dir_mismatch"),
        ("SKILL.md", "unexpected_fields"),
        ("compact.md", "compact_invalid"),
        ("sources.yml", "sources_invalid"),
        ("tools.yml", "tools_invalid"),
    ]
    assert found == [(f.path, f.code) for f in validate_skill(folder / "SKILL.md")]


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "\ud800", "", "/dev/null", "/dev/null/SKILL.md"])
@pytest.mark.parametrize("verdict", VERDICTS)
def test_no_path_raises(path: str, verdict: str) -> None:
    """Whatever the path, there are findings, not exceptions."""
    assert validate_skill(path, verdict=verdict) == list(parse_skill(path, verdict=verdict).diagnostics) != []


def test_only_argument_types_raise(put: Callable[..., Path], plain: bytes) -> None:
    """Wrong types are the caller's mistake."""
    folder = put("brief")
    for call in (
        lambda: parse_skill(5),
        lambda: parse_skill(b"x"),
        lambda: parse_skill(folder, verdict="strict"),
        lambda: parse_skill(folder, extra_fields="name"),
        lambda: parse_skill(folder, extra_fields=[1]),
        lambda: validate_skill(None),
        lambda: parse_skill_bytes("text", folder="x"),
        lambda: parse_skill_bytes(plain, folder=None),
        lambda: parse_skill_bytes(plain, folder="x", extra_fields=5),
    ):
        with pytest.raises(TypeError):
            call()


def test_relative_paths_know_their_folder(put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """`.` and `SKILL.md` are read as the folder they lie in."""
    monkeypatch.chdir(put("brief"))
    for path in (".", "SKILL.md", "./SKILL.md", Path(), "../brief", "../brief/"):
        found = parse_skill(path)
        assert (found.diagnostics, found.skill.name if found.skill else None) == ((), "brief")
        assert found.skill is not None
        assert found.skill.path == Path.cwd() / "SKILL.md"


def test_a_linked_folder_may_be_named(put: Callable[..., Path], tmp_path: Path) -> None:
    """The caller may name a folder by a link; the file in it may be none."""
    (tmp_path / "brief-link").symlink_to(put("brief"))
    assert parse_skill(tmp_path / "brief-link").ok


@pytest.mark.parametrize("target", ["real.md", "nowhere", "SKILL.md", "/etc/hostname", "."])
def test_symlinked_skill_files(target: str, put: Callable[..., Path]) -> None:
    """A link is refused wherever it leads, even into the same folder."""
    folder = put("brief", name="real.md")
    (folder / "SKILL.md").symlink_to(target)
    assert [[f.code for f in parse_skill(path).diagnostics] for path in (folder, folder / "SKILL.md")] == [
        ["symlink"]
    ] * 2


def test_upper_case_file_wins(put: Callable[..., Path]) -> None:
    """With both spellings SKILL.md is the skill."""
    folder = put("brief")
    put("brief", b"junk", name="skill.md")
    assert parse_skill(folder).diagnostics == ()


def test_a_folder_called_skill_md(put: Callable[..., Path]) -> None:
    """A folder in the place of the file is no regular file."""
    folder = put("brief", None)
    (folder / "SKILL.md").mkdir()
    assert [f.code for f in parse_skill(folder).diagnostics] == ["unreadable"]


def test_a_file_the_system_refuses(put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be opened is unreadable, whatever the reason."""
    folder = put("brief")

    def refuse(root: Path, name: str, *, limit: int) -> None:
        raise FileRefused(f"{name} cannot be read: Permission denied", path=name)

    monkeypatch.setattr("kdskills.skills.folder.read_file", refuse)
    assert [(f.code, f.path) for f in parse_skill(folder).diagnostics] == [("unreadable", "SKILL.md")]


def test_refused_skills_keep_an_id(plain: bytes) -> None:
    """A refused file is known by the id it would take."""
    assert parse_skill_bytes(b"junk", folder="My Folder").full_id == "public.My-Folder"
    assert parse_skill_bytes(_text("namespace: acme", description="''"), folder="brief").full_id == "acme.brief"
    assert parse_skill("/nowhere").full_id is None


def test_a_yaml_file_is_no_skill(put: Callable[..., Path]) -> None:
    """A YAML file given as the skill is refused and explained."""
    path = put("brief", **{"skill.yml": b"name: brief"}) / "skill.yml"
    assert [(f.code, f.severity) for f in parse_skill(path).diagnostics] == [
        ("not_a_directory", "error"),
        ("skill_yaml", "warning"),
    ]

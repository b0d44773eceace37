"""What `check` tells authors of bundles: every planted fault with file and line, nothing of what is right, whatever is thrown at it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kdskills.app import Host, Settings
from kdskills.turn.lint import named_files

GOOD = "---\nname: {0}\ndescription: Does {0}. Use it when {0} is needed.\n{1}---\n{2}\n"


@pytest.fixture
def host() -> Host:
    """A Host without plugins of others."""
    return Host(Settings(index_dir=None), entry_points=False)


def write(bundle: Path, files: dict[str, str]) -> None:
    """Write files of a bundle; those of a skill `a` that says and does nothing wrong come by themselves."""
    usual = {"skills/a/SKILL.md": GOOD.format("a", "", "Do it."), "skills_descriptor.yaml": "agents_config: {}\n"}
    for path, text in (usual | files).items():
        (bundle / path).parent.mkdir(parents=True, exist_ok=True)
        (bundle / path).write_text(text)


async def findings(host: Host, bundle: Path) -> list[Any]:
    """Return what `check` finds."""
    return list((await host.call("skills.check", path=bundle)).diagnostics)


def skill(front: str = "", body: str = "Do it.", description: str = "") -> str:
    """Return the file of skill `a`."""
    text = GOOD.format("a", front, body)
    return text.replace("Does a. Use it when a is needed.", description) if description else text


class Fault(NamedTuple):
    """Files of a bundle, and where which code is to be found."""

    code: str
    files: dict[str, str]
    path: str | None
    line: int | None


SKILL, DEMO, RULES = "skills/a/SKILL.md", "demo.yaml", "skills_descriptor.yaml"
CASSETTE = "schema: kdskills.cassette/1\nrequest: Go\n"
FAULTS = [
    *(
        Fault("file_not_there", {SKILL: skill(body=f"Begin.\n\n{line}")}, "a/SKILL.md", 7)
        for line in (
            "Read [the guide](references/guide.md) first.",
            "See [it](./guide.md#part).",
            "Run `scripts/go.py IN OUT`.",
            "Read `references/deep/more.md`.",
            "Take `assets/form.docx` as a start.",
            "![A picture](picture.png)",
            "Run `$SKILL_DIR/scripts/go.py`.",
            "Then read `./references/end.md`.",
        )
    ),
    Fault("file_not_there", {SKILL: skill(body="```bash\npython scripts/go.py\n```")}, "a/SKILL.md", 6),
    *(
        Fault("description_placeholder", {SKILL: skill(description=text)}, "a/SKILL.md", 3)
        for text in (
            "TODO",
            '"TODO: say what this does and when to use it."',
            '"[TODO: Complete this text]"',
            "Lorem ipsum dolor sit amet",
            "Say in one or two sentences what this skill does, and when an agent should use it.",
            "Replace with description of the skill and when it should be used.",
            "Description here",
            "FIXME",
        )
    ),
    *(
        Fault("description_without_when", {SKILL: skill(description=text)}, "a/SKILL.md", 3)
        for text in (
            "House style of the desk for reports and answers.",
            "Converts tables from one format to another.",
            "A guide to the archive of the museum and its rooms.",
            "Makes charts from the tables of a report.",
            "Deploys services to the cluster with a canary.",
            "Draws a map of the region and its rivers.",
            "Rules of the house for letters and for minutes.",
            "The collection of recipes by the cook.",
        )
    ),
    *(
        Fault("import_skipped", {SKILL: skill(f"import:\n  - {ref}\n")}, "a/SKILL.md", 5)
        for ref in ("nothing", "desk.nothing", "sk:nothing", "public.b", "acme.a", "a.b.c", "A", "public.aa")
    ),
    *(
        Fault(
            "citation_dropped",
            {SKILL: skill(body=f"One.\nTwo {token}."), "skills/a/sources.yaml": rows},
            "a/SKILL.md",
            6,
        )
        for token in ("[[S:2]]", "[[S:1,3]]", "[[S:1-3]]", "[[ S : 7 ]]")
        for rows in ("- {sid: 1, url: https://a.example/}\n", "sources:\n- sid: 1\n  url: https://a.example/\n")
    ),
    *(
        Fault(code, {"skills/a/sources.yaml": f"- sid: 1\n  url: https://a.example/\n{row}\n"}, "a/sources.yaml", 3)
        for code, row in (
            ("source_without_identity", "- sid: 2\n  title: B"),
            ("source_without_identity", "- {sid: 3}"),
            ("source_bad_sid", "- sid: no\n  url: https://b.example/"),
            ("source_bad_sid", "- {sid: 0, url: https://b.example/}"),
            ("source_bad_sid", "- {sid: -4, url: https://b.example/}"),
            ("source_bad_sid", "- {sid: 1.5, url: https://b.example/}"),
            ("duplicate_sid", "- {sid: 1, url: https://b.example/}"),
            ("source_bad_url", '- {sid: 2, url: "https://[b"}'),
        )
    ),
    *(
        Fault("tool_not_known", {"skills/a/tools.yaml": f"- skills.run_script\n- {entry}\n"}, "a/tools.yaml", 2)
        for entry in ("skills.run_scripts", "react.writ", "{id: io.save, required: true}", "exec.pyton")
    ),
    *(
        Fault("tool_not_known", {SKILL: skill(f"allowed-tools: {text}\n")}, "a/SKILL.md", 4)
        for text in ("Bsh", "Read Wrte", "Bash(git:*) Raed", "Frobnicate")
    ),
    *(
        Fault("interpreter_unknown", {f"skills/a/scripts/{name}": text}, f"a/scripts/{name}", 1)
        for name, text in (
            *((f"go.{suffix}", "x\n") for suffix in ("rb", "pl", "php", "ps1", "lua", "R")),
            ("go", "#!/bin/sh\n"),
            ("more/go.jl", "x\n"),
        )
    ),
    *(
        Fault("demo_invalid", {DEMO: text}, DEMO, line)
        for text, line in (
            ("schema: [\n", 2),
            ("schema: other/1\n", None),
            (f"{CASSETTE}unknown: 1\n", None),
            (f'{CASSETTE}match: "shape\nfiles: []\n', 3),
            (f"{CASSETTE}replies: [{{}}]\n", None),
            ("[" * 500, 1),
            ("- 1\n", None),
            (f"{CASSETTE}expect: {{a: 2024-13-45}}\n", None),
        )
    ),
    *(
        Fault("demo_skill_unknown", {DEMO: f"{CASSETTE}{text}"}, DEMO, 3)
        for text in (
            "expect: {skills: [nothing]}\n",
            "expect: {skills: [public.a, public.nothing]}\n",
            'expect: {skills: ["desk.a"]}\n',
            "replies: [{role: x, when: {active: [nothing]}, reply: {text: y}}]\n",
            "replies: [{role: x, when: {active: [a, b]}, reply: {text: y}}]\n",
            "replies: [{role: x, reply: {calls: [{tool: skills.load, arguments: {names: [b]}}]}}]\n",
            "replies: [{role: x, reply: {calls: [{tool: skills_load, arguments: {names: [b]}}]}}]\n",
            "replies: [{role: x, reply: {calls: [{tool: skills.load, arguments: {names: [a, sk:b]}}]}}]\n",
        )
    ),
    *(
        Fault(
            "rule_matches_nothing",
            {RULES: f"# {rule}\nagents_config:\n  solver.codegen:\n    {key}: [{rule}]\n"},
            RULES,
            4,
        )
        for key in ("enabled", "disabled")
        for rule in ("nothing", "public.b", "desk.b", "'desk.*'")
    ),
    *(
        Fault("invalid_yaml", {SKILL: f"---\nname: a\n{front}\nversion: x\n---\nDo it.\n"}, "a/SKILL.md", 3)
        for front in (
            'description: "Open',
            "description: 'Open",
            'tags: ["a, b]',
            "tags: ['a]",
            'license: "x\\',
            'compatibility: "a',
            "author: \"it's",
            'author: \'a "b"',
        )
    ),
    *(
        Fault("root_missing", {RULES: f"# root\n{line}\n"}, RULES, 2)
        for line in (
            "custom_skills_root: elsewhere",
            "CUSTOM_SKILLS_ROOT: elsewhere",
            "custom_skills_root: skills/a/more",
            "custom_skills_root: './none'",
        )
    ),
    *(
        Fault("body_long", {SKILL: skill(body=body)}, "a/SKILL.md", 5)
        for body in (
            "word " * 4_100,
            "line\n" * 4_100,
            "日本語" * 2_300,
            "```\n" + "x " * 10_100 + "\n```",
            "|a|b|\n" * 3_400,
        )
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{each.code}-{number}" for number, each in enumerate(FAULTS)])
async def test_planted_faults_are_told_where_they_are(host: Host, tmp_path: Path, fault: Fault) -> None:
    """Each fault is told once, with file, line and cure."""
    write(tmp_path, fault.files)
    told = [each for each in await findings(host, tmp_path) if each.code == fault.code]
    assert [(each.path, each.line) for each in told] == [(fault.path, fault.line)]
    assert told[0].fix


@pytest.mark.parametrize(
    "files",
    [
        {},
        {SKILL: skill(body="Read [it](references/g.md), `scripts/go.py`."), "skills/a/references/g.md": "x", "skills/a/scripts/go.py": ""},
        {SKILL: skill(body="See [x](https://a.example/b.md), [y](#part), [z](mailto:a@b.md), [w](/etc/x.md).")},
        {SKILL: skill(body="Create `scripts/new.py`; such as `references/finance.md`; `scripts/<name>.py`; `assets/*.png`.")},
        {SKILL: skill(body="```python\nopen('references/x.md')\n```\n```markdown\n[a](references/x.md)\n```\n`[a](b.md)`")},
        {SKILL: skill(body="Run `your/scripts/x.py`, `~/scripts/x.py`, `/opt/scripts/x.py`, `scripts/perf/deep/x.py`.")},
        {SKILL: skill("agent_disclosure: hidden\n", description="House style of the desk for the reports.")},
        {SKILL: skill("when_to_use: a report is due\n", description="House style of the desk for the reports.")},
        {SKILL: skill(description="Hausregeln der Redaktion für Berichte und Antworten.")},
        {SKILL: skill(body="As `[[S:9]]` says.\n```\n[[S:9]]\n```")},
        {SKILL: skill("allowed-tools: Bash(git:*) Read Write mcp__files__read\n")},
        {"skills/a/tools.yaml": "- id: tools.price\n- mine\n", "tools.py": "def price(x: int): ...\nNAME = 'mine'\n"},
        {"skills/a/scripts/go.ps1": "x", "skills/a/scripts/go.py": "", "skills/a/scripts/data.txt": "", "skills/a/scripts/LICENSE": "x"},
        {DEMO: f"{CASSETTE}expect: {{skills: [a, public.a]}}\nreplies: [{{role: x, when: {{active: [SK1]}}, reply: {{}}}}]\n"},
        {SKILL: skill("import: [public.b]\n"), "skills/b/SKILL.md": GOOD.format("b", "include_for: [desk]\n", "Words.")},
        {RULES: "agents_config:\n  solver.codegen: {enabled: [a], disabled: ['public.*']}\n"},
    ],
    ids=range(16),
)  # fmt: skip
async def test_what_is_right_is_not_told(host: Host, tmp_path: Path, files: dict[str, str]) -> None:
    """Nothing is found where nothing is wrong."""
    write(tmp_path, files)
    assert await findings(host, tmp_path) == []


HINTED = [
    ("A `scripts/turn.py` script would be helpful to store in the skill.", None),
    ("Examples:\n\n- `references/finance.md` for schemas", None),
    ("Create these files:\n\n1. `scripts/load.py`\n2. `assets/form.docx`", None),
    ("**Examples:**\n  \n* `references/finance.md` for schemas", None),
    ("Example output:\n\n```\nassets/report.html\n```", None),
    ("Read `references/more.md` if present.", None),
    ("Read `references/more.md` (optional).", None),
    ("If `other` is installed, prefer its `scripts/check.py`.", None),
    ("It must conform to `other`'s `references/form.json`.", None),
    ("Load `references/form.md` of the `other` skill.", None),
    ("The checkout must contain `scripts/train.py`.", None),
    ("Obtain `assets/logo.png` from the user.", None),
    ("There is no `references/faq.md`.", None),
    ("Register it in `scripts/__init__.py`.", None),
    ("See [the conventions](.notes/conventions.md).", None),
    ("Work at the repository root.\n\n```bash\npython scripts/build.py\n```", None),
    ("````markdown\n```bash\npython scripts/go.py\n```\n````", None),
    ("```markdown\n# Title\n```bash\npython scripts/go.py\n```\n`references/x.md`\n```", None),
    ("To create the chart, run `scripts/chart.py`.", "scripts/chart.py"),
    ("Write the letter using `assets/letter.docx`.", "assets/letter.docx"),
    ("For more examples, see:\n\n- `references/more.md`", "references/more.md"),
    ("This skill's `references/rules.md` says more.", "references/rules.md"),
    ("```run``` it.\n\nThen read `references/end.md`.", "references/end.md"),
    ("```bash\n# draw\npython scripts/draw.py\n```\nRead on.", "scripts/draw.py"),
    ("Do not guess; read `references/rules.md`.", "references/rules.md"),
    ("`scripts/slow.py` may take minutes.", "scripts/slow.py"),
]


@pytest.mark.parametrize(("body", "path"), HINTED, ids=range(len(HINTED)))
@pytest.mark.parametrize("there", [False, True])
async def test_words_around_a_path_say_whose_it_is(
    host: Host, tmp_path: Path, body: str, path: str | None, there: bool
) -> None:
    """What is an example, to be made, perhaps there, or of others is not told, whether the skill has such folders or not."""
    folders = {f"skills/a/{name}/there.md": "" for name in ("scripts", "references", "assets")} if there else {}
    if "repository root" in body and there:
        return  # a skill with scripts of its own may run them from anywhere
    write(tmp_path, {SKILL: skill(body=body), **folders})
    told = [each for each in await findings(host, tmp_path) if each.code == "file_not_there"]
    assert [each.ref for each in told] == ([path] if path else [])
    assert all(each.severity == ("warning" if there else "info") for each in told)


async def test_files_of_the_project_around_a_bundle_are_there(host: Host, tmp_path: Path) -> None:
    """A path of a code span or command that lies in a folder above is the project's; nothing is looked for above a checkout."""
    body = "Run `scripts/build.py`, then `$SKILL_DIR/scripts/build.py`."
    bundle = tmp_path / "checkout" / "agents"
    write(bundle, {SKILL: skill(body=body)})
    (bundle.parent / "scripts").mkdir()
    (bundle.parent / "scripts" / "build.py").write_text("")
    told = [each.column for each in await findings(host, bundle) if each.ref]
    assert told == [42]
    (bundle.parent / "scripts").rename(tmp_path / "scripts")
    assert [each.column for each in await findings(host, bundle) if each.ref] == [42]
    (bundle.parent / ".git").mkdir()
    assert [each.column for each in await findings(host, bundle) if each.ref] == [6]


async def test_circles_are_told_at_an_import(host: Host, tmp_path: Path) -> None:
    """A circle of imports is told once, at the import that leads back."""
    for name, ref in (("a", "b"), ("b", "c"), ("c", "a")):
        write(tmp_path, {f"skills/{name}/SKILL.md": GOOD.format(name, f"import: [{ref}]\n", f"Text of {name}.")})
    write(tmp_path, {SKILL: skill("import: [b]\n")})
    told = [each for each in await findings(host, tmp_path) if each.code == "import_cycle"]
    assert [(each.path, each.line) for each in told] == [("c/SKILL.md", 4)]


@pytest.mark.parametrize("circle", ["a", "ab", "abc", "abcdef"])
async def test_circles_of_any_length_are_told_once(host: Host, tmp_path: Path, circle: str) -> None:
    """A skill that imports itself, two that import each other, and longer circles are one finding each."""
    for name, ref in zip(circle, circle[1:] + circle[0], strict=True):
        write(tmp_path, {f"skills/{name}/SKILL.md": GOOD.format(name, f"import: [{ref}]\n", f"Text of {name}.")})
    write(tmp_path, {SKILL: skill(f"import: [{(circle[1:] + circle[0])[0]}]\n")})
    told = [each for each in await findings(host, tmp_path) if each.code == "import_cycle"]
    assert len(told) == 1
    assert (told[0].line, bool(told[0].fix)) == (4, True)


@pytest.mark.parametrize("name", ["README.md", ".hidden/SKILL.md", "x/notes.md", "x/y/"])
async def test_a_root_with_anything_but_skills_is_empty(host: Host, tmp_path: Path, name: str) -> None:
    """Other files, hidden folders and empty ones are no skills."""
    path = tmp_path / "skills" / name
    (path if name.endswith("/") else path.parent).mkdir(parents=True)
    if not name.endswith("/"):
        path.write_text(GOOD.format("a", "", "Do it."))
    (tmp_path / RULES).write_text("agents_config: {}\n")
    assert [each.code for each in await findings(host, tmp_path)] == ["bundle_without_skills"]


async def test_a_bundle_without_skills_is_told(host: Host, tmp_path: Path) -> None:
    """An empty folder of skills is a warning at the descriptor."""
    (tmp_path / "skills").mkdir()
    (tmp_path / RULES).write_text("agents_config: {}\n")
    assert [(each.code, each.path) for each in await findings(host, tmp_path)] == [("bundle_without_skills", RULES)]


async def test_nothing_of_what_is_checked_runs(host: Host, tmp_path: Path) -> None:
    """Tools of a bundle are read as text, even where skills name tools."""
    write(tmp_path, {"tools.py": f"open({str(tmp_path / 'ran')!r}, 'w')\n", "skills/a/tools.yaml": "- x.y\n"})
    assert [each.code for each in await findings(host, tmp_path)] == ["tool_not_known"]
    assert not (tmp_path / "ran").exists()


async def test_no_python_of_a_foreign_bundle_runs(host: Host, tmp_path: Path) -> None:
    """Neither a descriptor in Python, nor tools, scripts, or what Python and its tools load by themselves."""
    effect = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    names = (
        "skills_descriptor.py",
        "tools.py",
        "conftest.py",
        "sitecustomize.py",
        "usercustomize.py",
        "__init__.py",
        "yaml.py",
    )
    bundle = tmp_path / "bundle"
    write(bundle, dict.fromkeys(names, effect) | {"run.pth": f"import os; {effect}"})
    (bundle / RULES).unlink()
    write_more = {
        "skills/a/scripts/go.py": effect,
        "skills/a/scripts/__init__.py": effect,
        "skills/a/tools.yaml": "- x.y\n",
    }
    for path, text in write_more.items():
        (bundle / path).parent.mkdir(exist_ok=True)
        (bundle / path).write_text(text)
    command = [str(Path(sys.executable).parent / "kdskills"), "check", ".", "--format", "json"]
    done = await asyncio.to_thread(subprocess.run, command, cwd=bundle, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr
    assert '"bundle_untrusted"' in done.stdout
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "body",
    ["`" * 1_000_000, "`a``b" * 200_000, "](a " * 250_000, "`scripts/a" * 100_000, "[[S:1" * 200_000, "](b.md) " * 120_000,
     "\x01\x1b[31m](a\x1b.md)\x7f" * 50_000, "".join("`" * n + "a" for n in range(1, 1_400))],
    ids=range(8),
)  # fmt: skip
async def test_hostile_bodies_are_read_in_time(host: Host, tmp_path: Path, body: str) -> None:
    """A megabyte of anything costs seconds at most, and raises nothing."""
    write(tmp_path, {SKILL: skill(body=body)})
    begun = time.process_time()
    list(named_files(body))
    assert time.process_time() - begun < 5
    assert len(await findings(host, tmp_path)) < 200


@pytest.mark.parametrize(
    "text", ["[" * 500_000, "- " * 300_000, "a: &a [*a]\n", "\x00", "a: !!python/name:os.system\n", "\ud7ff"]
)
async def test_hostile_companions_are_told(host: Host, tmp_path: Path, text: str) -> None:
    """Files that are no YAML, or too deep, are findings of their own file."""
    write(tmp_path, {f"skills/a/{name}": text for name in ("sources.yaml",)} | {DEMO: text})
    paths = {each.path for each in await findings(host, tmp_path)}
    assert paths == {"demo.yaml", "a/sources.yaml"}


async def test_a_thousand_skills_in_a_circle(host: Host, tmp_path: Path) -> None:
    """A circle of a thousand skills is one finding, and cut short for people."""
    for number in range(1_000):
        folder = tmp_path / "skills" / f"s{number}"
        folder.mkdir(parents=True)
        words = f"import: [s{(number + 1) % 1_000}]\ndisable-model-invocation: true\n"
        (folder / "SKILL.md").write_text(GOOD.format(f"s{number}", words, "Text."))
    told = [each for each in await findings(host, tmp_path) if each.code == "import_cycle"]
    assert len(told) == 1
    assert len(told[0].message) < 1_000

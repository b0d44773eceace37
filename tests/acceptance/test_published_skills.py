"""Skills as people publish them, followed to the end through `exec.shell` and the file tools, behind a real wall.

Each is written as its kind is: instructions that assume bash, git and Python, scripts and references beside them, tools by their
published names. A scripted model does what the instructions say. The turn leaves what the skill promises and nothing more,
and the machine is as before.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent

import pytest

from kdskills.app import Host, Settings
from kdskills.bundle import load_bundle
from kdskills.execution.rootfs import image_programs
from kdskills.solver import ReactSolver, SolverSettings, SolverSystem
from kdskills.testing.models import ScriptedModel, call, say

pytestmark = pytest.mark.needs("bubblewrap")
HOSTILE = (
    "touch $SKILL_DIR/x /skills/y /usr/z ../outside 2>/dev/null; find /root /home -mindepth 1 2>/dev/null | wc -l; id -u;"
    " python3 -c 'import socket; socket.create_connection((\"203.0.113.1\", 80), 2)' 2>/dev/null || echo walled"
)
"""What no skill of these should do: the end of each turn, which reaches nothing."""


def sh(command: str, **arguments: object):
    """Return the reply that runs *command*."""
    return call("exec_shell", command=dedent(command).strip(), **arguments)


@dataclass(frozen=True)
class Published:
    """A skill, the data a turn has, what the model does, and what the turn's files then hold; a test of bytes, or their text."""

    name: str
    front: str
    body: str
    steps: tuple[object, ...]
    outputs: Mapping[str, str | Callable[[bytes], bool]]
    scripts: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str | bytes] = field(default_factory=dict)
    programs: frozenset[str] = frozenset()


def docx() -> bytes:
    """Return a document as small as Word takes it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        archive.writestr("word/document.xml", "<w:document xmlns:w='w'><w:t>Dear CUSTOMER,</w:t></w:document>")
    return out.getvalue()


def is_letter(data: bytes) -> bool:
    """Whether *data* is the document with the name in place."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return b"Dear Ms Okafor," in archive.read("word/document.xml") and len(archive.namelist()) == 2


GIT = "git -c user.name=a -c user.email=a@example.net -c init.defaultBranch=main"
SKILLS = (
    Published(
        "invoice-pdf",
        "allowed-tools: Bash(python3:*) Read",
        "Run `python3 $SKILL_DIR/scripts/invoice.py data/items.csv invoice.pdf`, then check the page count.",
        (
            call("files_read", path="data/items.csv"),
            sh("python3 $SKILL_DIR/scripts/invoice.py data/items.csv invoice.pdf && head -c 5 invoice.pdf"),
        ),
        {"invoice.pdf": lambda data: data.startswith(b"%PDF-") and b"%%EOF" in data},
        {
            "invoice.py": """
            import csv, sys
            from fpdf import FPDF
            pdf = FPDF()
            pdf.add_page()
            pdf.set_font("Helvetica", size=12)
            with open(sys.argv[1], newline="") as rows:
                for row in csv.DictReader(rows):
                    pdf.cell(0, 8, f"{row['item']}: {row['price']}", new_x="LMARGIN", new_y="NEXT")
            pdf.output(sys.argv[2])
            """
        },
        {"data/items.csv": "item,price\nPaper,4.20\nInk,12.00\n"},
    ),
    Published(
        "letter-template",
        "allowed-tools: Bash, Read, Edit",
        "1. Unpack with `unpack.py`. 2. Edit `word/document.xml`. 3. Pack with `pack.py`. Remove the folder.",
        (
            sh("python3 $SKILL_DIR/scripts/unpack.py data/letter.docx unpacked/"),
            call("files_grep", pattern="CUSTOMER", path="unpacked"),
            call("files_edit", path="unpacked/word/document.xml", old="CUSTOMER", new="Ms Okafor"),
            sh("python3 $SKILL_DIR/scripts/pack.py unpacked/ letter.docx && rm -r unpacked"),
        ),
        {"letter.docx": is_letter},
        {
            "unpack.py": """
            import sys, zipfile
            import defusedxml.minidom
            with zipfile.ZipFile(sys.argv[1]) as archive:
                archive.extractall(sys.argv[2])
                defusedxml.minidom.parseString(archive.read("word/document.xml"))
            """,
            "pack.py": """
            import pathlib, sys, zipfile
            top = pathlib.Path(sys.argv[1])
            with zipfile.ZipFile(sys.argv[2], "w", zipfile.ZIP_DEFLATED) as archive:
                for path in sorted(top.rglob("*")):
                    if path.is_file():
                        archive.write(path, path.relative_to(top))
            """,
        },
        {"data/letter.docx": docx()},
    ),
    Published(
        "meeting-minutes",
        "allowed-tools: Read Write Grep Glob",
        "Find every line with ACTION in data/*.md and write `actions.md`, one bullet each.",
        (
            call("files_glob", pattern="data/*.md"),
            call("files_grep", pattern="^ACTION", path="data", glob="*.md"),
            call("react_write", path="actions.md", text="- Ada: order chairs\n- Ben: call the venue\n"),
            sh("test $(grep -c '^- ' actions.md) = $(cat data/*.md | grep -c ^ACTION) && echo complete"),
        ),
        {"actions.md": "- Ada: order chairs\n- Ben: call the venue\n"},
        data={"data/mon.md": "# Mon\nACTION Ada: order chairs\n", "data/tue.md": "ACTION Ben: call the venue\nbye\n"},
    ),
    Published(
        "csv-summary",
        "allowed-tools: Bash(awk:*), Bash(sort:*), Bash(join:*), Bash(python3:*)",
        "Total the sales by region with awk, sort them, and render the table with `table.py`.",
        (
            sh(
                "awk -F, 'NR > 1 { t[$1] += $2 } END { for (r in t) print r \",\" t[r] }' data/sales.csv | sort > totals.csv"
            ),
            sh("python3 $SKILL_DIR/scripts/table.py < totals.csv | tee table.md"),
        ),
        {"totals.csv": "east,7\nwest,5\n", "table.md": "| region | total |\n|---|---|\n| east | 7 |\n| west | 5 |\n"},
        {
            "table.py": """
            import csv, sys
            print("| region | total |\\n|---|---|")
            for region, total in csv.reader(sys.stdin):
                print(f"| {region} | {total} |")
            """
        },
        {"data/sales.csv": "region,sum\neast,3\nwest,5\neast,4\n"},
    ),
    Published(
        "sqlite-query",
        "allowed-tools: Bash",
        "Load the JSON into SQLite, answer with SQL, and leave only `answer.json`.",
        (
            sh(
                """
                python3 - <<'END'
                import json, sqlite3
                base = sqlite3.connect("people.db")
                base.execute("create table people (name text, city text)")
                base.executemany("insert into people values (:name, :city)", json.load(open("data/people.json")))
                base.commit()
                END
                """
            ),
            sh(
                """
                python3 -c 'import json, sqlite3; print(json.dumps(dict(sqlite3.connect("people.db").execute(
                    "select city, count(*) from people group by city order by city"))))' > answer.json
                rm people.db
                """
            ),
        ),
        {"answer.json": '{"Lagos": 2, "Oslo": 1}\n'},
        data={
            "data/people.json": json.dumps(
                [{"name": n, "city": c} for n, c in ("aL", "bO", "cL") for c in [{"L": "Lagos", "O": "Oslo"}[c]]]
            )
        },
    ),
    Published(
        "log-triage",
        "allowed-tools: Bash Read",
        "Watch the slow scan in the background, count errors by code meanwhile, then write `report.txt`.",
        (
            sh("sort data/app.log | uniq -d | wc -l > repeated.txt", background=True),
            sh("grep -o 'E[0-9]*' data/app.log | sort | uniq -c | sort -rn | awk '{ print $2, $1 }' > report.txt"),
            call("exec_shell_output", handle="sh1", wait_s=60),
            sh("cat repeated.txt >> report.txt; rm repeated.txt"),
        ),
        {"report.txt": "E7 2\nE1 1\n1\n"},
        data={"data/app.log": "x E7\ny E1\nx E7\nok\n"},
    ),
    Published(
        "release-notes",
        "allowed-tools: Bash(git:*) Write",
        "Collect the commits since the last tag with `git log` and write `NOTES.md`.",
        (
            sh(f"{GIT} init -q r && cd r && echo 1 > a && {GIT} add a && {GIT} commit -qm 'Add a' && {GIT} tag v1"),
            sh(f"echo 2 > a && {GIT} commit -qam 'Fix a'", workdir="/work/r"),
            sh("git log --format='- %s' v1..HEAD > ../NOTES.md; cd ..; rm -rf r", workdir="/work/r"),
        ),
        {"NOTES.md": "- Fix a\n"},
        programs=frozenset({"git"}),
    ),
    Published(
        "merge-helper",
        "allowed-tools: Bash(git:*) Edit Read",
        "Merge, resolve each conflict with Edit, commit, and export the result.",
        (
            sh(
                f"""
                {GIT} init -q r && cd r && echo base > f.txt && {GIT} add . && {GIT} commit -qm base
                {GIT} checkout -qb side && echo side > f.txt && {GIT} commit -qam side
                {GIT} checkout -q main && echo ours > f.txt && {GIT} commit -qam ours
                {GIT} merge side || cp f.txt ../conflict.txt
                """
            ),
            call("files_grep", pattern="^(<<<<<<<|>>>>>>>)", path="conflict.txt"),
            call("react_write", path="resolved.txt", text="ours and side\n"),
            sh(
                f"cp ../resolved.txt f.txt && {GIT} commit -qam merged && {GIT} log --oneline | wc -l",
                workdir="/work/r",
            ),
            sh("cp r/f.txt merged.txt && rm -rf r conflict.txt resolved.txt"),
        ),
        {"merged.txt": "ours and side\n"},
        programs=frozenset({"git"}),
    ),
    Published(
        "static-site",
        "allowed-tools: Bash Write",
        "Write pages as JSON, build them with `build.py`, and check every link with the local server.",
        (
            call("react_write", path="pages.json", text='{"index": "about", "about": "index"}'),
            sh("python3 $SKILL_DIR/scripts/build.py pages.json site && rm pages.json"),
            sh(
                """
                python3 -m http.server -d site 8000 >/dev/null 2>&1 & server=$!
                python3 - <<'END' > links.txt
                import time, urllib.request
                for _ in range(200):
                    try:
                        page = urllib.request.urlopen("http://127.0.0.1:8000/about.html").read().decode()
                        break
                    except OSError:
                        time.sleep(0.1)
                print("index.html" in page, urllib.request.urlopen("http://127.0.0.1:8000/index.html").status)
                END
                kill $server
                """
            ),
        ),
        {
            "site/index.html": '<h1>index</h1><a href="about.html">about</a>',
            "site/about.html": '<h1>about</h1><a href="index.html">index</a>',
            "links.txt": "True 200\n",
        },
        {
            "build.py": """
            import json, pathlib, sys
            import jinja2
            page = jinja2.Template('<h1>{{ name }}</h1><a href="{{ to }}.html">{{ to }}</a>')
            out = pathlib.Path(sys.argv[2])
            out.mkdir()
            for name, to in json.loads(pathlib.Path(sys.argv[1]).read_text()).items():
                (out / f"{name}.html").write_text(page.render(name=name, to=to))
            """
        },
    ),
    Published(
        "page-extractor",
        "allowed-tools: Bash(python3 *) Read Edit",
        "Copy the rules to the turn, adapt the tag in them, and run `extract.py page.html rules.json`.",
        (
            sh("cp $SKILL_DIR/scripts/rules.json . && cat rules.json"),
            call("files_edit", path="rules.json", old='"TAG"', new='"h2"'),
            sh("python3 $SKILL_DIR/scripts/extract.py data/page.html rules.json > headings.txt && rm rules.json"),
        ),
        {"headings.txt": "Prices\nHours\n"},
        {
            "rules.json": '{"tag": "TAG"}',
            "extract.py": """
            import json, sys
            from html.parser import HTMLParser
            tag = json.load(open(sys.argv[2]))["tag"]
            class Headings(HTMLParser):
                inside = False
                def handle_starttag(self, name, attrs): self.inside = name == tag
                def handle_endtag(self, name): self.inside = False
                def handle_data(self, text):
                    if self.inside: print(text)
            Headings().feed(open(sys.argv[1]).read())
            """,
        },
        {"data/page.html": "<h1>Shop</h1><h2>Prices</h2><p>1</p><h2>Hours</h2>"},
    ),
)


def state(folder: Path) -> dict[str, str]:
    """Return a digest of each file below *folder*."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def names(folder: Path) -> set[str]:
    """Return what lies in *folder*."""
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.name)
async def test_a_published_skill_keeps_its_promise(skill: Published, tmp_path: Path) -> None:
    """Its outputs are as promised, every step succeeds, and nothing outside of the turn's folder is touched."""
    if absent := skill.programs - image_programs(("web",)):
        pytest.skip(f"this machine has no {', '.join(absent)}")
    root = tmp_path / "bundle"
    home = root / "skills/acme" / skill.name
    (home / "scripts").mkdir(parents=True)
    (home / "SKILL.md").write_text(f"---\nname: {skill.name}\ndescription: d\n{skill.front}\n---\n{skill.body}\n")
    for name, text in skill.scripts.items():
        (home / "scripts" / name).write_text(dedent(text).lstrip())
    for name, content in skill.data.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (root / "skills_descriptor.yaml").write_text("custom_skills_root: skills\n")
    before = state(root)
    model = ScriptedModel([call("skills_load", names=[skill.name]), *skill.steps, sh(HOSTILE), say("done")])
    system = SolverSystem(
        bundle=load_bundle(root),
        model=model,
        executor="bubblewrap",
        settings=SolverSettings(work_dir=tmp_path / "turns"),
        wiring=Host(Settings(image_profiles=("web",)), entry_points=False).wiring,
    )
    async with system:
        result = await ReactSolver(system).run("Do it.")
    calls = [step.calls[0] for step in result.steps if step.calls]
    answers = [json.loads(each.result or "{}") for each in calls]
    assert [each.error for each in calls] == [None] * len(calls), answers
    assert all(answer.get("exit_code") in {0, None} for answer in answers[:-1]), answers
    assert answers[-1]["stdout"] == "0\n10001\nwalled\n"
    assert sorted(file.path for file in result.files) == sorted(skill.outputs)
    turn = tmp_path / "turns" / names(tmp_path / "turns").pop()
    for name, expected in skill.outputs.items():
        data = (turn / name).read_bytes()
        assert expected(data) if callable(expected) else data.decode() == expected, (name, data)
    assert state(root) == before
    assert names(tmp_path) == {"bundle", "turns"}

"""A bundle, a turn and a task whose every text is an attack on the page that shows it."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

from kdskills.app.settings import TurnsSettings
from kdskills.app.turns import TurnArchive, TurnRow, moment_of_id
from kdskills.jobs.attempts import AttemptOrder
from kdskills.jobs.client import JobsClient
from kdskills.jobs.model import Command, Placement, Scope, TaskSpec

MARK = "zq9"
"""Stands in every element and attribute that an attack would add, and nowhere else."""
SCRIPT = f'"><script class={MARK}>alert(1)</script><img src=x onerror=alert(1) class={MARK}><svg onload=alert(1) class={MARK}>'
HIDDEN = "\u202etxt.exe\u202c\u2066\u200b\U000e0041"
BODY = f"""\
# {SCRIPT}

{HIDDEN}

[a](javascript:alert(1)) [b](data:text/html,<script>alert(1)</script>) <javascript:alert(1)> [c](http://[)
![d](http://evil.example/{MARK}.png) [e](http://evil.example/ "\\" onmouseover=alert(1) {MARK}=\\"")

<iframe src=http://evil.example/ class={MARK}></iframe><style class={MARK}>body{{display:none}}</style>

| {SCRIPT} |
|-|
| <b class={MARK}> |

```{SCRIPT}
</code></pre>{SCRIPT}
```

"""


def write_hostile(folder: Path, files: int = 300) -> Path:
    """Write the bundle, with a skill of so many files, and return its folder."""
    skills = folder / "skills" / "bad"
    main = skills / "main"
    (main / "scripts").mkdir(parents=True)
    deep = "{a: " * 15 + "x" + "}" * 15
    quoted = json.dumps(SCRIPT + HIDDEN, ensure_ascii=False)
    (main / "SKILL.md").write_text(
        f"---\nname: main\ndescription: {quoted}\nlicense: {quoted}\nmetadata:\n  imports: bad.long, bad.main, bad.gone\n"
        f"  note: {quoted}\n---\n{BODY}{'x' * 1_000_000}\n"
    )
    (main / "compact.md").write_text(BODY)
    (main / "sources.yaml").write_text(
        "".join(
            f"- title: {quoted}\n  url: {json.dumps(url, ensure_ascii=False)}\n"
            for url in ("javascript:alert(1)", "http://[", f"http://evil.example/{SCRIPT}", HIDDEN)
        )
    )
    (main / "scripts" / "run.sh").write_text(f"echo '{SCRIPT}'\n")
    (main / "page.md").write_text(BODY)
    (main / "page.html").write_text(SCRIPT)
    (main / "line.txt").write_text("<" * 1_000_000)
    (main / "lines.md").write_text("> " * 18 + "a\n" * 30_000)
    (main / "brackets.md").write_text("[" * 60_000)
    (main / "bytes.bin").write_bytes(bytes(range(256)) * 100)
    (main / "picture.svg").write_text(
        f"<svg xmlns='http://www.w3.org/2000/svg' class='{MARK}'><script>alert(1)</script></svg>"
    )
    for name in (
        f"{MARK}'\"><b>.txt",
        "a\nb\r.txt",
        f"{HIDDEN}.txt",
        "back\\slash.txt",
        "#?&=%2e%2e.txt",
        "javascript:x",
    ):
        (main / name).write_text(SCRIPT)
    with open(os.fsencode(main) + b"/\xff\xfe.txt", "w") as stream:  # noqa: PTH123 - a name that is no text
        stream.write(SCRIPT)
    for number in range(files):
        (main / f"file-{number:05}-{'n' * 100}.txt").write_text("x")
    broken = skills / "broken"
    broken.mkdir()
    (broken / "SKILL.md").write_text(f"---\nname: {quoted}\ndescription: {deep}\n---\n{SCRIPT}\n")
    huge = skills / "huge"
    huge.mkdir()
    (huge / "SKILL.md").write_text(
        "---\nname: huge\ndescription: x\n" + "".join(f"k{n}: {quoted}\n" for n in range(400)) + "---\n"
    )
    long = skills / "long"
    long.mkdir()
    (long / "SKILL.md").write_text(
        f"---\nname: long\ndescription: {json.dumps('<' * 1000)}\nmetadata:\n  imports: bad.main\n---\n{'<' * 900_000}\n"
    )
    rules = {f"{SCRIPT}&a=b": {"enabled": ["bad.*"]}, HIDDEN: {"disabled": ["bad.main"]}}
    (folder / "skills_descriptor.json").write_text(json.dumps({"agents_config": rules}))
    return folder


def keep_turn(state: Path, events: int, *, one_step: bool = True) -> str:
    """Keep a turn with so many events, each of them hostile, and return its id."""
    archive, turn_id = TurnArchive(TurnsSettings(), state), str(uuid.uuid4())
    turn_id = f"019a2209-8c0c-7{turn_id[15:]}"
    usual = {"ts": "2026-01-01T00:00:00Z", "turn_id": turn_id, "session_id": SCRIPT}
    long = SCRIPT + HIDDEN + "\x00\x1b[31m" + "<" * 5000
    kinds = [
        {"type": "prompt.built", "role": SCRIPT, "digest": "d", "tokens": 7, "available": [SCRIPT], "text": long * 20},
        {"type": "model.replied", "role": SCRIPT, "model": SCRIPT, "text": long, "usage": {"input": 1}},
        {"type": "tool.called", "call_id": "c", "tool": SCRIPT, "arguments": long},
        {"type": "tool.finished", "call_id": "c", "tool": SCRIPT, "ok": False, "error": SCRIPT, "text": long},
        {"type": "skill.loaded", "skill": SCRIPT, "name": "n", "digest": SCRIPT, "by": SCRIPT},
        {"type": "skill.refused", "ref": SCRIPT, "code": SCRIPT, "reason": long},
        {"type": "model.retry", "role": SCRIPT, "attempt": 1, "code": SCRIPT, "message": long, "delay_s": 1},
    ]
    started = {"type": "turn.started", "request": long, "consumer": SCRIPT, "model": SCRIPT}
    rows = [started, *(kinds[number % len(kinds)] for number in range(events))]
    lines = ['{"schema": "kdskills.transcript/1"}']
    for number, row in enumerate(rows):
        step = 1 if one_step else number // 7
        lines.append(json.dumps({**usual, **row, "seq": number + 1, "step": step if number else 0}))
    folder = archive.folder("local")
    (folder / f"{turn_id}.jsonl").write_text("\n".join(lines) + "\n")
    facts = {
        "status": "failed",
        "agent": "local",
        "bundle": SCRIPT,
        "request": long,
        "consumer": SCRIPT,
        "model": SCRIPT,
    }
    facts |= {"skills": (SCRIPT,), "stop_reason": SCRIPT, "started_at": moment_of_id(turn_id)}
    archive.write("local", TurnRow.model_validate({"turn_id": turn_id, **facts}))
    return turn_id


async def keep_task(client: JobsClient, state: Path, log: bytes, *, argument: str = SCRIPT, size: int = 0) -> str:
    """Keep a task that is over, whose output is *log* behind *size* bytes of nothing, and return its id."""
    placement = Placement(engine="bubblewrap", skill_name="bad.main", version_hash="0")
    spec = TaskSpec(
        scope=Scope(), session_id=None, command=Command(argv=("/bin/echo", argument), timeout_s=60), placement=placement
    )
    head, work = await client.submit(spec), await client.work()
    order = AttemptOrder(task_id=head.id, attempt=1, spec=spec, log_limit=1 << 40)
    folder = state / "runs" / head.id / "1"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "order.json").write_text(json.dumps(order.to_json()))
    (folder / "exit.json").write_text("{}")
    with (folder / "stdout.log").open("wb") as stream:
        stream.truncate(size)
        stream.seek(size)
        stream.write(log)
    tasks = work.tables.tasks
    values = {"status": "running", "attempt": 1, "host": work.host, "executor": "x", "error_message": SCRIPT}
    await work.database.write(lambda link: link.execute(tasks.update().where(tasks.c.id == head.id).values(values)))
    return head.id

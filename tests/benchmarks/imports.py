"""What importing and the command line cost, as ratios, and what the entry of generated code adds to a bare interpreter.

    python tests/benchmarks/imports.py [rounds]

Ratios of imports are to importing pydantic, yaml and jinja2 alone; those of commands are to a bare interpreter, `python -c
pass`, and have no bound: they are printed to be looked at. The entry runs in the prepared tree of files through bubblewrap
where that works, else right here; the bundle `press` is put in force by digests of whole folders, as sandboxes do it.
What counts is processor time: waiting for a busy neighbour is no cost of ours.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kdskills import SkillsSubsystem, load_bundle
from kdskills.execution import ExecRequest
from kdskills.execution.payload import build_payload, entry_argv, host_entry
from kdskills.execution.request import SkillMount
from kdskills.execution.rootfs import build_rootfs

FLOOR = "import pydantic, yaml, jinja2; pydantic.BaseModel"
EVERY = "[getattr(room, name) for name in room.__all__]"
IMPORTS = {
    "import kdskills": ("import kdskills", 2.0),
    "import kdskills, every public name": (f"import kdskills as room; {EVERY}", 2.0),
    "import kdskills.turn, every name of it": (f"import kdskills.turn as room; {EVERY}", 1.0),
}
HELLO = Path(__file__).parents[2] / "bundles" / "hello"
COMMANDS = {
    "kdskills --help": ("--help",),
    "kdskills list, of the bundle hello": ("list", str(HELLO)),
    "kdskills why, of the bundle hello": ("why", "hello", "--bundle", str(HELLO)),
}
COMMAND = "from kdskills.doors.cli import main; main()"
ENTRY = {"entry without skills": 15.0, "entry with the skills of press": 120.0}
CONSUMER = "solver.react.decision"
ROUNDS = 21


@dataclass
class Row:
    """One thing run: its command, what it reads, and the milliseconds each run took."""

    argv: Sequence[str]
    stdin: Path | None = None
    taken: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Run once in a fresh process."""
        with (self.stdin or Path(os.devnull)).open("rb") as words, tempfile.TemporaryFile() as report:
            argv = [word.format(report=report.fileno()) for word in self.argv]
            process = subprocess.Popen(argv, stdin=words, stdout=subprocess.DEVNULL, pass_fds=(report.fileno(),))
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                report.seek(0)
                raise SystemExit(f"{' '.join(argv)}: {process.returncode}: {report.read().decode()}")
        self.taken.append((used.ru_utime + used.ru_stime) * 1000)

    @property
    def median(self) -> float:
        """The median, in milliseconds."""
        return statistics.median(self.taken)


def import_rows() -> dict[str, Row]:
    """Return what is imported here, a bare interpreter and the floor among it."""
    code = {"bare": "pass", "floor": FLOOR} | {name: statement for name, (statement, _) in IMPORTS.items()}
    return {name: Row([sys.executable, "-I", "-c", statement]) for name, statement in code.items()}


def command_rows() -> dict[str, Row]:
    """Return commands as they are run, after the bare interpreter they are compared with."""
    python = (sys.executable, "-c")  # without -I, as the installed command is started
    rows = {name: Row([*python, COMMAND, *words]) for name, words in COMMANDS.items()}
    return {"bare": Row([*python, "pass"])} | rows


def entry_rows(folder: Path) -> tuple[str, dict[str, Row]]:
    """Return where the entry runs, and its rows after that of a bare interpreter.

    Args:
        folder: Where the program and the payloads are written; the sandbox sees it as `/work`.
    """
    top = Path(__file__).parents[2] / "bundles" / "press"
    subsystem = SkillsSubsystem(load_bundle(top).descriptor, bundle_root=top, roots=(), index_dir=None)
    view = subsystem.view(CONSUMER)
    mounts = tuple(SkillMount(skill.full_id, skill.folder or top, "") for skill in view.closure(view.skills).order)
    (folder / "main.py").write_text("pass\n")
    bwrap = shutil.which("bwrap")
    tree = build_rootfs() if bwrap else None
    if bwrap and tree:
        wall = [bwrap, "--ro-bind", str(tree.path), "/", "--proc", "/proc", "--dev", "/dev", "--clearenv"]
        wall += ["--tmpfs", "/skills", "--ro-bind", str(folder), "/work"]
        skill_folders, work = {mount.id: f"/skills/{mount.id}" for mount in mounts}, "/work"
        for mount in mounts:
            wall += ["--ro-bind", str(mount.root), skill_folders[mount.id]]
        python, entry = tree.python, tree.entry
    else:
        wall, python, entry = [], sys.executable, str(host_entry())
        skill_folders, work = {mount.id: str(mount.root) for mount in mounts}, str(folder)
    rows = {"bare": Row([*wall, python, "-I", "-c", "pass"])}
    for name, globals_ in zip(ENTRY, ({}, view.export_runtime_globals()), strict=True):
        request = ExecRequest(code="pass", skills=mounts, globals=globals_)
        payload = folder / f"payload-{len(rows)}"
        payload.write_bytes(
            build_payload(
                request, program_path=f"{work}/main.py", with_source=False, skill_folders=skill_folders, work_dir=work
            )
        )
        argv = entry_argv(python, entry, payload_fd=0, report_fd=0)
        rows[name] = Row([*wall, *argv[:-1], "{report}"], payload)
    return "the prepared tree" if wall else "this interpreter", rows


def main(argv: list[str]) -> int:
    """Print the table; 1 when a bound is not held."""
    with tempfile.TemporaryDirectory() as folder:
        imports, commands = import_rows(), command_rows()
        where, entries = entry_rows(Path(folder))
        for _ in range(int(argv[0]) if argv else ROUNDS):  # interleaved, so that a busy moment hits all alike
            for row in (*imports.values(), *commands.values(), *entries.values()):
                row.run()
    bare = imports["bare"].median
    floor = imports["floor"].median - bare
    print(f"bare interpreter: {bare:.0f} ms; floor (pydantic, yaml, jinja2): {floor:.0f} ms more")
    held = True
    for name, (_, bound) in IMPORTS.items():
        ratio = (imports[name].median - bare) / floor
        held &= ratio <= bound
        print(f"{name:40} {ratio:6.2f} x   at most {bound:g}: {'held' if ratio <= bound else 'MISSED'}")
    for name in COMMANDS:
        ratio = commands[name].median / commands["bare"].median
        print(f"{name:40} {ratio:6.1f} x   of a bare interpreter, {commands[name].median:.0f} ms")
    print(f"in {where}, over `python3 -I -c pass` ({entries['bare'].median:.0f} ms):")
    for name, bound in ENTRY.items():
        more = entries[name].median - entries["bare"].median
        held &= more <= bound
        print(f"{name:40} {more:6.1f} ms  at most {bound:g}: {'held' if more <= bound else 'MISSED'}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

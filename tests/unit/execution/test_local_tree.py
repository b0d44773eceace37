"""Folders of runs without a pid namespace: found again by whoever cleans up, never taken while in use."""

import subprocess
import sys
import threading

from kdskills.execution.dirs import write_note
from kdskills.execution.landlock import Uids
from kdskills.execution.local_tree import RunFolder, leftovers
from kdskills.execution.request import ExecRequest


def test_looking_for_leftovers_never_meets_half_a_note(tmp_path):
    """Folders that are made and removed beside it are neither ended nor reported as broken."""
    top, uids = tmp_path / "runs", Uids(20_000, tmp_path / "uids")
    top.mkdir()
    over, told = threading.Event(), []

    def look():
        while not over.is_set():
            for report in (leftovers(top), leftovers(top, uids.end_run)):
                told.extend((*report.ended, *report.failed))

    def work():
        for _ in range(40):
            folder = RunFolder.make(top, ExecRequest(argv=("x",), request_id="r" * 200))
            write_note(folder.path / "uid", "21000")
            folder.remove()

    lookers = [threading.Thread(target=look) for _ in range(2)]
    workers = [threading.Thread(target=work) for _ in range(2)]
    for thread in (*lookers, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    over.set()
    for thread in lookers:
        thread.join()
    assert told == []
    assert list(top.iterdir()) == []


def test_notes_are_for_us_alone(tmp_path):
    """Neither the owner's note nor the uid's can be read by a program with a uid of its own."""
    folder = RunFolder.make(tmp_path, ExecRequest(argv=("x",)))
    write_note(folder.path / "uid", "21000")
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in folder.path.iterdir() if path.is_file()}
    assert modes == {"owner.json": "0o600", "uid": "0o600"}
    assert list(folder.work.iterdir()) == []


def test_the_usual_folder_is_removed_without_a_program(tmp_path, monkeypatch):
    """Removing what a run leaves starts no process: it is done after each run."""
    folder = RunFolder.make(tmp_path, ExecRequest(argv=("x",)))
    folder.write_inputs([("deep/er/file", b"x")], "/work/here")
    (folder.work / "link").symlink_to(tmp_path)
    monkeypatch.setenv("PATH", "")
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_deeper_than_any_walk_is_removed(tmp_path):
    """What a program nested without end is removed too."""
    folder = RunFolder.make(tmp_path, ExecRequest(argv=("x",)))
    subprocess.run(
        [sys.executable, "-c", "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')"],
        cwd=folder.work,
        check=True,
    )
    folder.remove()
    assert list(tmp_path.iterdir()) == []

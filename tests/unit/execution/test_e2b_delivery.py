"""What is brought into a sandbox, and what a template must answer before anything is run in it."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile

import pytest

from kdskills.builtin.executors.e2b.sandboxes import (
    Archive,
    PreparedSandbox,
    SandboxFacts,
    Trouble,
    code_archive,
    prepare,
    tree_archive,
)
from kdskills.errors import ExecRefused

GOOD = {
    "python": "/usr/bin/python3", "version": [3, 12], "machine": "x86_64", "packages": [], "limits": ["wall", "odd"],
    "problem": None, "trees": ["skills/aa"],
}  # fmt: skip


class Machine:
    """A machine that says what it is told to say, and keeps what it is given."""

    def __init__(self, said: str = "", unpacked: int = 0) -> None:
        self.said, self.unpacked = said, unpacked
        self.files: dict[str, bytes] = {}
        self.commands: list[str] = []

    def write(self, path, data):
        """Keep a file."""
        self.files[path] = data

    def run(self, command, timeout_s=0):
        """Answer a command."""
        self.commands.append(command)
        return (self.unpacked, "", "not now") if "unpack.py" in command else (0, self.said, "")


def facts(**changes) -> str:
    """Return what a machine says, after the greeting of its login shell."""
    return "Welcome!\n" + json.dumps({**GOOD, **changes}) + "\n"


@pytest.fixture
def folder(tmp_path):
    """Return a folder of every kind an archive holds."""
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "run").write_text("x")
    (tmp_path / "b" / "run").chmod(0o775)
    (tmp_path / "a.txt").write_text("y")
    (tmp_path / "a.txt").chmod(0o600)
    (tmp_path / "link").symlink_to("a.txt")
    return tmp_path


def test_an_archive_is_its_files_and_nothing_of_this_host(folder):
    """Names, kinds, executable bits and contents; no owner, no time; the same files give the same bytes."""
    archive = tree_archive(folder)
    with tarfile.open(fileobj=io.BytesIO(archive.data)) as tar:
        members = {item.name: (item.type, item.mode, item.uid, item.mtime, item.uname) for item in tar}
    assert members == {
        "a.txt": (tarfile.REGTYPE, 0o644, 0, 0, ""),
        "b": (tarfile.DIRTYPE, 0o755, 0, 0, ""),
        "b/c": (tarfile.DIRTYPE, 0o755, 0, 0, ""),
        "b/run": (tarfile.REGTYPE, 0o755, 0, 0, ""),
        "link": (tarfile.SYMTYPE, 0o755, 0, 0, ""),
    }
    assert archive.digest == hashlib.sha256(archive.data).hexdigest()
    (folder / "a.txt").touch()
    assert tree_archive(folder) == archive


def test_files_with_two_names_travel_twice(tmp_path):
    """Packages share files by hard links; every name arrives as a file of its own."""
    (tmp_path / "a").write_text("shared")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    with tarfile.open(fileobj=io.BytesIO(tree_archive(tmp_path).data)) as tar:
        assert [(item.name, item.type, tar.extractfile(item).read()) for item in tar] == [
            ("a", tarfile.REGTYPE, b"shared"),
            ("b", tarfile.REGTYPE, b"shared"),
        ]


def test_our_code_travels_whole():
    """The ground floor and what runs it are in the archive; nothing above the ground floor is."""
    with tarfile.open(fileobj=io.BytesIO(code_archive().data)) as tar:
        names = tar.getnames()
    wanted = {"kdskills/turn/__init__.py", "kdskills_runtime/remote_init.py", "kdskills_runtime/remote_unpack.py"}
    assert wanted <= set(names)
    assert [name for name in names if name.split("/")[1] in {"execution", "session", "app", "builtin"}] == []


def test_a_machine_is_asked_before_it_is_used():
    """What it can hold is what it said, less names nobody knows; our code has its place by digest."""
    machine = Machine(facts())
    box = prepare(machine, Archive(b"tar", "d" * 64))
    assert (box.facts, box.trees) == (
        SandboxFacts("/usr/bin/python3", "x86_64", frozenset({"wall"}), ()),
        {"skills/aa"},
    )
    assert box.entry == f"/opt/kdskills/code/{'d' * 64}/kdskills_runtime/py_code_exec_entry.py"
    assert box.command("run", "x y").startswith("exec /usr/bin/python3 -I /opt/kdskills/code/")
    assert box.command("run", "x y").endswith(" run 'x y'")
    assert [path for path in machine.files if path.endswith("/unpack.py")] == ["/opt/kdskills/unpack.py"]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("", "python3 does not answer"),
        ("no such command\n", "python3 does not answer"),
        ("{}\n", "python3 does not answer"),
        ("[1]\n", "python3 does not answer"),
        (facts(version=[3, 9]), "its Python is 3.9; 3.11 is needed"),
        (facts(problem="commands do not run as root"), "commands do not run as root"),
        (facts(machine="riscv64"), "its machine is riscv64"),
    ],
    ids=range(7),
)
def test_a_template_that_cannot_be_used_is_refused(said, why):
    """Each reason is said in words an operator can act on."""
    with pytest.raises(ExecRefused, match=why):
        prepare(Machine(said), Archive(b"tar", "d" * 64))


def test_an_archive_that_is_not_unpacked_is_trouble():
    """A failed unpacking stops everything, with the machine's own words."""
    with pytest.raises(Trouble, match="exit code 1: not now"):
        prepare(Machine(facts(), unpacked=1), Archive(b"tar", "d" * 64))


def test_a_skill_is_delivered_once(folder):
    """A tree that is there already is not sent again."""
    machine = Machine()
    box = PreparedSandbox(machine, "/code", SandboxFacts("python3", "x86_64", frozenset(), ()))
    places = {box.deliver("skills/" + "e" * 64, folder) for _ in range(2)}
    assert places == {f"/opt/kdskills/skills/{'e' * 64}"}
    assert (len(machine.files), len(machine.commands)) == (1, 1)

"""The sandbox's argument list: what the wall is made of, and in which order."""

from pathlib import Path

import pytest

from kdskills.execution.bwrap import SandboxSetup, command_line, run_arguments
from kdskills.execution.check import check_request
from kdskills.execution.payload import BASE_ENV, program_variables
from kdskills.execution.processes import rlimits
from kdskills.execution.request import ExecRequest, Limits
from kdskills.execution.rootfs import Rootfs

FDS = {"args": 11, "status": 12, "block": 13, "seccomp": 14}
ROOT = Path("/cache/rootfs/abc")
PROGRAMS = {name: f"/usr/bin/{name}" for name in ("bwrap", "prlimit", "setpriv")}


def line(drop_to=10001, *, memory_by_rlimit=False, **fields) -> list[str]:
    """Return the command line of a request."""
    plan = check_request(ExecRequest(**({"argv": ("prog", "--opt")} | fields)))
    setup = SandboxSetup(PROGRAMS, drop_to, Rootfs(ROOT, "abc", "/entry.py"), b"", None, None, False, None)
    limits = plan.request.limits
    bounds = rlimits(limits, memory=memory_by_rlimit)
    return command_line(setup, limits, plan.cwd, plan.argv, FDS, bounds)


def test_root_drops_its_uid_before_bwrap_starts():
    """As root setpriv comes before bwrap; an ordinary user needs none."""
    words = line()
    assert words.index("/usr/bin/setpriv") < words.index("/usr/bin/bwrap")
    assert words[words.index("--reuid") + 1] == "10001"
    assert "--clear-groups" in words
    assert "/usr/bin/setpriv" not in line(None)


def test_the_wall():
    """Every namespace, no capability, no further user namespaces, no inherited environment, our filter."""
    words = line()
    for option in ("user", "pid", "net", "ipc", "uts", "cgroup-try"):
        assert f"--unshare-{option}" in words
    for option in ("--disable-userns", "--new-session", "--die-with-parent", "--clearenv", "--seccomp"):
        assert option in words
    assert words[words.index("--cap-drop") + 1] == "ALL"
    assert words[words.index("--uid") + 1] == words[words.index("--gid") + 1] == "10001"


def test_the_hosts_root_is_never_mounted():
    """The only host trees are the prepared root and /proc/sys, both read-only."""
    words = line()
    binds = [tuple(words[place + 1 : place + 3]) for place, word in enumerate(words) if word.endswith("bind")]
    assert binds == [(str(ROOT), "/"), ("/proc/sys", "/proc/sys")]
    assert {word for word in words if word.endswith("bind")} == {"--ro-bind"}


def test_remounts_come_last():
    """What is made read-only is so after everything was put there."""
    words = line()
    last_mount = max(place for place, word in enumerate(words) if word in {"--tmpfs", "--args", "--dev", "--proc"})
    remounts = {words[place + 1]: place for place, word in enumerate(words) if word == "--remount-ro"}
    assert set(remounts) == {"/", "/dev", "/run", "/skills", "/env"}
    assert min(remounts.values()) > last_mount
    assert max(remounts.values()) == remounts["/"]
    assert words.index("--chmod") > words.index("--args")


def test_every_writable_place_has_a_size():
    """No tmpfs without a bound."""
    words = line(limits=Limits(work_size=111, tmp_size=222))
    sizes = {words[place + 1]: words[place - 1] for place, word in enumerate(words) if word == "--tmpfs"}
    assert {key: sizes[key] for key in ("/work", "/tmp", "/dev/shm")} == {
        "/work": "111",
        "/tmp": "222",
        "/dev/shm": "222",
    }
    assert all(words[place - 2] == "--size" for place, word in enumerate(words) if word == "--tmpfs")


def test_limits_of_a_process():
    """CPU warns before it kills; address space is bounded only where no cgroup counts memory."""
    words = line(limits=Limits(wall_s=2.5, nofile=99, fsize=7, memory=5))
    assert words[1:5] == ["--core=0:0", "--nofile=99:99", "--fsize=7:7", "--cpu=3:4"]
    assert "--as=5:5" in line(limits=Limits(memory=5), memory_by_rlimit=True)


def test_the_program_comes_after_the_options():
    """Whatever the program's words look like, they are its own."""
    words = line(argv=("--bind", "/", "/x"))
    assert words[words.index("--") :] == ["--", "--bind", "/", "/x"]


def parts(data: bytes) -> list[bytes]:
    """Return the words of a NUL-ended list."""
    assert data.endswith(b"\0")
    return data[:-1].split(b"\0")


def test_what_travels_by_descriptor():
    """Skills, folders, inputs and variables, then the marker."""
    plan = check_request(ExecRequest(argv=("x",), workdir="deep/er", env={"A": "1"}))
    mounts = [("/skills/a.x", Path("/stage/1"))]
    words = parts(run_arguments(plan.cwd, mounts, [("in/b/c", 20)], program_variables(plan.request)))
    assert words[:3] == [b"--ro-bind", b"/stage/1", b"/skills/a.x"]
    folders = [words[place + 1] for place, word in enumerate(words) if word == b"--dir"]
    assert folders == [b"/work/deep", b"/work/deep/er", b"/work/in", b"/work/in/b", b"/run/complete"]
    assert words[words.index(b"--file") : words.index(b"--file") + 3] == [b"--file", b"20", b"/work/in/b/c"]
    assert words[-2:] == [b"--dir", b"/run/complete"]


@pytest.mark.parametrize("value", ["", "--bind", "a\nb", "\udcff", "=", "x" * 1000])
def test_variables_are_single_words(value):
    """A value cannot become an option, whatever it holds."""
    plan = check_request(ExecRequest(argv=("x",), env={"V": value, "PATH": "/mine"}))
    words = parts(run_arguments(plan.cwd, [], [], program_variables(plan.request)))
    pairs = {words[place + 1]: words[place + 2] for place in range(0, len(words) - 2, 3)}
    assert {words[place] for place in range(0, len(words) - 2, 3)} == {b"--setenv"}
    assert pairs == {
        **{key.encode(): text.encode() for key, text in BASE_ENV.items()},
        b"PATH": b"/mine",
        b"V": value.encode("utf-8", "surrogateescape"),
    }

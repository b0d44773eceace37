"""Every refused system call is refused inside, and namespaces cannot be made."""

import json
import platform

import pytest

from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor
from kdskills.execution import ExecRequest
from kdskills.execution.protocol import ExecutionOptions
from kdskills.execution.seccomp import CLONE_NEW, RULES

pytestmark = pytest.mark.needs("bubblewrap")

ARCH = {"x86_64": "x86_64", "aarch64": "aarch64"}[platform.machine()]

CALLER = """
import ctypes, json, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    answer = libc.syscall(number, *(ctypes.c_ulong(word) for word in args))
    return [answer, ctypes.get_errno()]
print(json.dumps([call(*row) for row in json.loads(sys.argv[1])]))
"""


@pytest.fixture
def calls():
    """Make system calls inside and return [answer, errno] of each."""

    async def go(rows):
        engine = BubblewrapExecutor(ExecutionOptions())
        result = await engine.run(ExecRequest(argv=("python3", "-I", "-c", CALLER, json.dumps(rows))))
        assert (result.status, result.stderr.text) == ("ok", "")
        return json.loads(result.stdout.text)

    return go


async def test_each_refused_call_is_refused(calls):
    """The filter's answer, and no other, comes back for each rule."""
    rules = [rule for rule in RULES if rule.only is None and rule.number(ARCH) is not None]
    answers = await calls([[rule.number(ARCH), 0, 0, 0, 0, 0] for rule in rules])
    found = {rule.name: answer for rule, answer in zip(rules, answers, strict=True)}
    assert found == {rule.name: [-1, rule.error] for rule in rules}


async def test_conditional_rules(calls):
    """Namespaces by clone, foreign socket families, personality and terminal injection are refused; plain use works."""
    number = {rule.name: rule.number(ARCH) for rule in RULES}
    flags = list(CLONE_NEW.values())
    rows = [[number["clone"], flag | 17, 0, 0, 0, 0] for flag in flags]
    rows += [[number["socket"], family, 3, 0] for family in (16, 17, 38, 40)]
    rows += [[number["personality"], 0x0040000], [number["ioctl"], 0, 0x5412, 0], [number["personality"], 0]]
    rows += [[number["socket"], family, 1, 0] for family in (1, 2, 10)]
    answers = await calls(rows)
    assert [answer[1] for answer in answers[: len(flags)]] == [1] * len(flags)
    assert [answer[1] for answer in answers[len(flags) : len(flags) + 4]] == [97] * 4
    assert [answer[1] for answer in answers[len(flags) + 4 : len(flags) + 6]] == [1, 1]
    assert [answer[0] >= 0 for answer in answers[len(flags) + 6 :]] == [True] * 4


@pytest.mark.parametrize(
    "path",
    ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches", "/proc/sys/user/max_user_namespaces",
     "/proc/1/mem", "/proc/kmsg", "/dev/kmsg", "/dev/mem", "/sys/fs/cgroup/cgroup.procs", "/proc/self/uid_map"],
)  # fmt: skip
async def test_kernel_files_cannot_be_written(path):
    """Nothing of the kernel's own is writable, whatever it is called."""
    engine = BubblewrapExecutor(ExecutionOptions())
    program = "import sys,os\ntry:\n fd=os.open(sys.argv[1],os.O_WRONLY); os.write(fd,b'|/bin/x'); print('WROTE')\nexcept OSError: print('no')"
    result = await engine.run(ExecRequest(argv=("python3", "-I", "-c", program, path)))
    assert result.stdout.text == "no\n"


async def test_identity_inside():
    """No capability, no new privileges, a filter, and no way to become another uid."""
    engine = BubblewrapExecutor(ExecutionOptions())
    program = (
        "import os\nlines=dict(l.split(':\\t',1) for l in open('/proc/self/status') if ':\\t' in l)\n"
        "print([lines[k].split()[0] for k in ('Uid','Gid','CapPrm','CapEff','CapBnd','CapAmb','NoNewPrivs','Seccomp')], os.getgroups())\n"
        "for f in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.chroot('/work'), lambda: os.mknod('/work/d', 0o20666, os.makedev(1,3)),\n"
        "          lambda: os.chown('/work', 0, 0)):\n"
        " try: f(); print('DID')\n except OSError: print('no')\n"
        "os.chmod('/work', 0o4755); print(oct(os.stat('/work').st_mode & 0o7000))"
    )
    result = await engine.run(ExecRequest(argv=("python3", "-I", "-c", program)))
    zero = "0000000000000000"
    first, *rest = result.stdout.text.splitlines()
    groups = first.rpartition("[")[2].rstrip("]")
    assert first.startswith(str(["10001", "10001", zero, zero, zero, zero, "1", "2"]))
    assert set(groups.split(", ")) <= {"", "10001", "65534"}
    assert rest[:5] == ["no"] * 5


async def test_writable_places_honour_no_setuid():
    """What a program plants there never runs with more rights."""
    engine = BubblewrapExecutor(ExecutionOptions())
    result = await engine.run(ExecRequest(argv=("sh", "-c", "cat /proc/self/mountinfo")))
    options = {line.split()[4]: line.split()[5] for line in result.stdout.text.splitlines()}
    for place in ("/work", "/tmp", "/dev/shm", "/run", "/skills"):
        assert {"nosuid", "nodev"} <= set(options[place].split(","))
    for place in ("/", "/dev", "/run", "/skills", "/proc/sys"):
        assert "ro" in options[place].split(",")

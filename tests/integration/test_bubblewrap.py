"""The bubblewrap engine, for real: contract, endings, and what hostile programs get."""

import asyncio
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest

from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor
from kdskills.errors import ExecRefused
from kdskills.execution import ExecRequest, Handle, InputFile, Limits, ScriptCall, SkillMount
from kdskills.execution.protocol import ExecutionOptions
from kdskills.skills.safe_open import tree_digest

pytestmark = pytest.mark.needs("bubblewrap")

LONG = 60
"""Seconds after which something hangs; a busy machine is no defect."""


@pytest.fixture
def engine():
    """The engine with its defaults."""
    return BubblewrapExecutor(ExecutionOptions())


@pytest.fixture
def run(engine):
    """Run argv with request fields and return the result."""

    async def go(*argv, **fields):
        return await engine.run(ExecRequest(argv=argv, **fields))

    return go


@pytest.fixture
def python(run):
    """Run a Python program inside."""

    async def go(source, *args, **fields):
        return await run("python3", "-I", "-c", source, *args, **fields)

    return go


async def test_the_probe_passes_and_is_cached(engine):
    """Every promise of the probe holds here, and is asked once."""
    report = await engine.probe()
    assert [check for check in report.checks if not check.ok] == []
    assert report.ok
    assert {check.name for check in report.checks} >= {
        "host_files",
        "core_pattern",
        "uid",
        "host_uid",
        "seccomp",
        "limits",
    }
    assert await engine.probe() is report


@pytest.mark.parametrize("code", [0, 1, 2, 125, 126, 127, 128])
async def test_exit_codes_are_the_programs(run, code):
    """Also codes launchers use for their own faults arrive as the program's."""
    result = await run("sh", "-c", f"exit {code}")
    assert (result.status, result.exit_code, result.signal) == ("ok" if code == 0 else "nonzero", code, None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGABRT])
async def test_signals(run, number):
    """Death by signal n is 128 + n and `signal`."""
    result = await run("sh", "-c", f"kill -{int(number)} $$")
    assert (result.status, result.exit_code, result.signal) == ("nonzero", 128 + number, number)


async def test_a_missing_program_is_no_program_result(run):
    """What cannot be executed has no exit code."""
    result = await run("no-such-program")
    assert (result.status, result.exit_code, result.error.code) == ("infra_error", None, "program_missing")


async def test_a_program_cannot_fake_a_launchers_fault(run):
    """A program that prints bwrap's words and exits 1 is a program that exited 1."""
    result = await run("sh", "-c", "echo 'bwrap: execvp nope: No such file' >&2; exit 1")
    assert (result.status, result.exit_code, result.error) == ("nonzero", 1, None)


async def test_output_is_bytes(python):
    """Binary output and input arrive as they are."""
    data = bytes(range(256)) * 10
    result = await python("import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())", stdin=data)
    assert result.stdout.data == data


async def test_values_of_variables_arrive_byte_exact(run):
    """Quotes, newlines, bad UTF-8 and dollar signs are only bytes."""
    value = b"a'b\"c $(id) \n\t\xff\xfe -- --bind / /".decode("utf-8", "surrogateescape")
    result = await run("sh", "-c", 'printf %s "$V"', env={"V": value})
    assert result.stdout.data == value.encode("utf-8", "surrogateescape")


async def test_no_host_variable_leaks(run, monkeypatch):
    """The environment inside is the defaults and the caller's own, nothing else."""
    monkeypatch.setenv("KDSKILLS_CANARY", "secret")
    result = await run("env", env={"MINE": "1"})
    names = {line.split("=")[0] for line in result.stdout.text.splitlines()}
    assert names - {"PWD"} == {"PATH", "HOME", "LANG", "TMPDIR", "MINE"}


@pytest.mark.parametrize("name", ["LD_PRELOAD", "BASH_ENV", "PYTHONSTARTUP", "NODE_OPTIONS"])
async def test_hooks_are_refused(run, name):
    """Interpreter hooks never reach the launcher or the program."""
    with pytest.raises(ExecRefused) as caught:
        await run("true", env={name: "/work/evil.so"})
    assert caught.value.code == "bad_request"


async def test_arguments_are_not_interpreted(run):
    """Arguments that look like options of the launcher, or like shell, are only arguments."""
    words = ("--ro-bind", "/", "/host", "$(id)", "`id`", "; id", "", "--", "\n")
    result = await run("python3", "-I", "-c", "import sys; print(sys.argv[1:])", *words)
    assert result.stdout.text == f"{list(words)}\n"
    result = await run("--version")
    assert result.status == "infra_error"


async def test_only_three_descriptors_are_open(run):
    """No descriptor of the launcher or the host reaches the program."""
    result = await run("ls", "/proc/self/fd")
    assert result.stdout.text.split() == ["0", "1", "2", "3"]


async def test_inputs_in_and_outputs_out(run, tmp_path):
    """Inputs are copied into the workdir, declared outputs come back."""
    (tmp_path / "host.txt").write_bytes(b"from the host")
    result = await run(
        "sh", "-c", "cat in/a host.txt > out/all.txt; echo x > ignored; chmod 777 out/all.txt",
        inputs=(InputFile("in/a", b"bytes, "), InputFile("host.txt", tmp_path / "host.txt"), InputFile("out/.keep", b"")),
        outputs=("out/*.txt",),
    )  # fmt: skip
    assert [(item.path, item.content, oct(item.mode)) for item in result.artifacts] == [
        ("out/all.txt", b"bytes, from the host", "0o755")
    ]
    assert (tmp_path / "host.txt").read_bytes() == b"from the host"


async def test_hostile_outputs(run):
    """Links, FIFOs and what is missing are named, not followed and not waited for."""
    result = await run(
        "sh", "-c", "ln -s /etc/passwd link; mkfifo pipe; mkdir d; ln -s /etc d/etc; echo ok > fine",
        outputs=("link", "pipe", "d/etc/passwd", "gone", "fine"),
    )  # fmt: skip
    assert [item.path for item in result.artifacts] == ["fine"]
    errors = {error.path: error.code for error in result.artifact_errors}
    assert errors == {"link": "link", "pipe": "not_regular", "d/etc/passwd": "link", "gone": "missing"}


async def test_outputs_survive_a_timeout(run):
    """What was written before the clock ran out is collected."""
    result = await run("sh", "-c", "echo part > out; sleep 600", outputs=("out",), limits=Limits(wall_s=5))
    assert (result.status, result.artifacts[0].content) == ("timeout", b"part\n")


async def test_a_hang_ends_in_time(run):
    """A result comes when the limit is over, not when the program is."""
    began = time.monotonic()
    result = await run("sleep", "600", limits=Limits(wall_s=1))
    assert (result.status, result.exit_code) == ("timeout", None)
    assert time.monotonic() - began < LONG


async def test_ignoring_term_is_answered_by_kill(python):
    """TERM is a request, KILL is not."""
    began = time.monotonic()
    result = await python(
        "import signal,time; signal.signal(15, signal.SIG_IGN); time.sleep(600)", limits=Limits(wall_s=1)
    )
    assert result.status == "timeout"
    assert time.monotonic() - began < LONG


async def test_term_gives_time_to_clean_up(engine, monkeypatch):
    """A program that handles TERM may finish its work within the grace."""
    monkeypatch.setattr("kdskills.execution.streams.GRACE_S", LONG)
    program = (
        "import signal,sys,time\ndef end(*a): print('cleaned'); sys.exit(0)\n"
        "signal.signal(15, end); print('up', flush=True); time.sleep(600)"
    )
    handle = await engine.start(ExecRequest(argv=("python3", "-I", "-c", program)))
    await until(lambda: handle.tail()[0] == b"up\n")
    await handle.cancel()
    result = await handle.wait()
    assert (result.status, result.stdout.text) == ("cancelled", "up\ncleaned\n")


async def test_a_flood_is_counted_and_its_tail_kept(python):
    """A hundred megabytes of output cost one megabyte of memory."""
    program = "import sys\nfor n in range(100): sys.stdout.buffer.write(b'x' * 1048576)\nsys.stdout.write('END')"
    result = await python(program)
    assert (result.status, result.stdout.total, result.stdout.truncated) == ("ok", 100 * 1048576 + 3, True)
    assert len(result.stdout.data) == 1048576
    assert result.stdout.data.endswith(b"xEND")


async def test_a_daemon_holding_the_pipes_does_not_hold_us(python, host_processes):
    """A double-forked daemon dies with the run, whatever it holds."""
    mark = unique_seconds()
    program = f"import os,time\nif os.fork()==0:\n os.setsid()\n if os.fork()==0:\n  time.sleep({mark})\n os._exit(0)\nprint('parent')"
    began = time.monotonic()
    result = await python(program, limits=Limits(wall_s=600))
    assert (result.status, result.stdout.text) == ("ok", "parent\n")
    assert time.monotonic() - began < LONG
    assert host_processes(mark) == []


async def until(true):
    """Wait until something is so."""
    end = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < end, "it never came to be so"
        await asyncio.sleep(0.02)


def unique_seconds():
    """Return a long time to sleep, which tells this run's processes from those of the same test elsewhere."""
    return str(10**6 + secrets.randbelow(10**9))


@pytest.fixture
def descriptors():
    """Count this process's open descriptors."""
    return lambda: len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def host_secret():
    """A world-readable file of the host."""
    path = Path(tempfile.mkdtemp(dir="/var/tmp")) / "secret"
    path.write_text("s")
    path.parent.chmod(0o755)
    yield str(path)
    shutil.rmtree(path.parent)


@pytest.fixture
def host_processes():
    """Return host processes whose command line holds a word."""

    def find(word):
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    line = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if word.encode() in line and b"sleep" in line:
                    found.append(entry.name)
        return found

    return find


async def test_a_fork_bomb_is_bounded(python):
    """Processes are counted over the whole tree, and the host goes on."""
    program = (
        "import os,time\nn=0\n"
        "try:\n while n < 500:\n  if os.fork()==0: time.sleep(600)\n  n+=1\n"
        "except OSError as e: print(n, e.errno)\n"
    )
    result = await python(program, limits=Limits(pids=16, wall_s=300))
    count, error = result.stdout.text.split()
    assert (int(count) <= 16, error) == (True, "11")


async def test_a_shell_bomb_ends(run):
    """The classic bomb ends by the clock at the latest."""
    began = time.monotonic()
    await run("bash", "-c", ":(){ :|:& };:; sleep 600", limits=Limits(pids=20, wall_s=2))
    assert time.monotonic() - began < LONG


async def test_a_memory_bomb_is_killed(python, engine):
    """Too much memory ends the program, with `oom` where the kernel counts the whole tree."""
    result = await python("x = bytearray(900 << 20); print(len(x))", limits=Limits(memory=128 << 20))
    assert result.stdout.total == 0
    assert result.status == ("oom" if "memory" in result.limits_enforced else "nonzero")


async def test_many_small_processes_share_one_bound(python):
    """Four processes of 60 MiB do not fit 128 MiB, nor does a memfd."""
    program = (
        "import os,time\nfor _ in range(4):\n"
        " if os.fork()==0:\n  x=bytearray(60<<20)\n  for i in range(0,len(x),4096): x[i]=1\n  time.sleep(600); os._exit(0)\n"
        "raise SystemExit(os.wait()[1] != 0)"  # all hold on to theirs until one of them is killed
    )
    result = await python(program, limits=Limits(memory=128 << 20, wall_s=120))
    if "memory" not in result.limits_enforced:
        pytest.skip("no cgroup is writable here: memory is bounded per process")
    assert result.status == "oom"


async def test_cpu_time_is_bounded(python):
    """A busy loop ends with `limit` when its CPU time is over."""
    result = await python("while True: pass", limits=Limits(cpu_s=1, wall_s=300))
    assert (result.status, result.signal, result.error.code) == ("limit", signal.SIGXCPU, "cpu")


@pytest.mark.parametrize("place", ["/work", "/tmp", "/dev/shm"])
async def test_quotas(run, place):
    """Every writable place has its size."""
    result = await run(
        "sh", "-c", f"head -c 3000000 /dev/zero > {place}/big", limits=Limits(work_size=1 << 20, tmp_size=1 << 20)
    )
    assert (result.exit_code, "No space left" in result.stderr.text) == (1, True)


@pytest.mark.parametrize(
    "place", ["/", "/etc", "/dev", "/run", "/skills", "/usr/bin", "/proc/sys/kernel", "/var/tmp", "/home"]
)
async def test_everything_else_is_read_only(run, place):
    """Nothing can be written outside the workdir and the temporary places."""
    assert (await run("sh", "-c", f"echo x > {place}/planted")).exit_code != 0


async def test_one_file_is_bounded(python):
    """The size of one file is bounded too."""
    result = await python("open('big','wb').write(b'x' * 2000000)", limits=Limits(fsize=1 << 20))
    assert "File too large" in result.stderr.text


async def test_host_files_and_processes_are_out_of_sight(python, host_secret):
    """A world-readable host file does not exist inside; neither do host processes."""
    result = await python(
        "import os,sys; print(os.path.exists(sys.argv[1]), os.path.exists('/root/.ssh'),"
        " len([p for p in os.listdir('/proc') if p.isdigit()]), open('/etc/passwd').read().count('\\n'))",
        host_secret,
    )
    assert result.stdout.text.split() == ["False", "False", "2", "2"]


async def test_the_network_is_lo_alone(python):
    """No interface but loopback, no way out, no DNS."""
    program = (
        "import socket\nprint([l.split(':')[0].strip() for l in open('/proc/net/dev').readlines()[2:]])\n"
        "for f in (lambda: socket.create_connection(('1.1.1.1',53),2), lambda: socket.getaddrinfo('example.org',80),"
        " lambda: socket.create_connection(('169.254.169.254',80),2), lambda: socket.socket(socket.AF_NETLINK, 3),"
        " lambda: socket.socket(40, 1), lambda: socket.socket(socket.AF_PACKET, 3)):\n"
        " try: f(); print('OPEN')\n except OSError: print('closed')\n"
    )
    assert (await python(program)).stdout.text.split() == ["['lo']"] + ["closed"] * 6


async def test_abstract_sockets_of_the_host_are_out_of_reach(python):
    """The host's abstract sockets are in another network namespace."""
    import socket

    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0kdskills-host-abstract")
        server.listen()
        result = await python(
            "import socket\ntry: socket.socket(socket.AF_UNIX).connect('\\0kdskills-host-abstract'); print('IN')\n"
            "except OSError: print('out')"
        )
    assert result.stdout.text == "out\n"


async def test_runs_leave_nothing_to_each_other(run):
    """Files, shared memory and System V objects of one run do not exist in the next."""
    await run("sh", "-c", "echo 1 > /work/a; echo 1 > /tmp/a; echo 1 > /dev/shm/a")
    result = await run("sh", "-c", "ls -A /work /tmp /dev/shm")
    assert result.stdout.text.split() == ["/dev/shm:", "/tmp:", "/work:"]


async def test_cancelling_ends_the_tree(engine, host_processes):
    """A cancelled run leaves no process, and the caller sees the cancellation."""
    mark = unique_seconds()
    request = ExecRequest(argv=("sh", "-c", f"sleep {mark} & sleep {mark}"), limits=Limits(wall_s=600))
    task = asyncio.create_task(engine.run(request))
    await until(lambda: host_processes(mark) != [])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, LONG)
    assert host_processes(mark) == []


async def test_a_handle_tails_signals_and_cancels(engine):
    """A started run can be listened to, signalled, and cancelled."""
    trap = "trap 'echo heard' USR1; echo up; while :; do sleep 0.05; done"
    handle = await engine.start(ExecRequest(argv=("bash", "-c", trap), limits=Limits(wall_s=600)))
    await until(lambda: handle.tail()[0] == b"up\n")
    handle.signal(signal.SIGUSR1)
    await until(lambda: b"heard" in handle.tail()[0])
    await handle.cancel()
    result = await handle.wait()
    assert (result.status, result.exit_code, b"heard" in result.stdout.data) == ("cancelled", None, True)


async def test_many_runs_at_once(engine):
    """Concurrent runs do not mix."""
    requests = [ExecRequest(argv=("sh", "-c", f"echo {n} > f; sleep 0.1; cat f"), outputs=("f",)) for n in range(12)]
    results = await asyncio.gather(*(engine.run(request) for request in requests))
    assert [result.stdout.text for result in results] == [f"{n}\n" for n in range(12)]
    assert [result.artifacts[0].content for result in results] == [f"{n}\n".encode() for n in range(12)]


async def test_no_descriptor_is_left_behind(run, descriptors):
    """Runs of every kind of ending cost no descriptor."""
    await run("true")
    before = descriptors()
    await run("true", outputs=("x",), inputs=(InputFile("a", b"1"),))
    await run("nope")
    await run("sleep", "600", limits=Limits(wall_s=0.2))
    await until(lambda: descriptors() == before)


@pytest.fixture
def skill(tmp_path):
    """A skill with a script and data."""
    root = tmp_path / "skill"
    (root / "scripts").mkdir(parents=True)
    (root / "SKILL.md").write_text("---\nname: x\n---\n")
    (root / "data.txt").write_text("skill data")
    (root / "scripts/show.py").write_text("import sys; print(open('/skills/a.x/data.txt').read(), sys.argv[1:])")
    return SkillMount("a.x", root, tree_digest(root))


async def test_a_skills_script_runs_from_its_mount(engine, skill):
    """A script sees its skill read-only and gets its arguments."""
    result = await engine.run(ExecRequest(script=ScriptCall("a.x", "scripts/show.py", ("1", "two")), skills=(skill,)))
    assert result.stdout.text == "skill data ['1', 'two']\n"
    result = await engine.run(ExecRequest(argv=("sh", "-c", "echo x > /skills/a.x/data.txt"), skills=(skill,)))
    assert result.exit_code != 0
    assert (skill.root / "data.txt").read_text() == "skill data"


async def test_a_changed_skill_is_refused_before_anything_runs(engine, skill):
    """Another tree than the one that was checked is `skills_mismatch`."""
    (skill.root / "scripts/show.py").write_text("print('forged')")
    result = await engine.run(ExecRequest(script=ScriptCall("a.x", "scripts/show.py"), skills=(skill,)))
    assert (result.status, result.exit_code, result.error.code) == ("refused", None, "skills_mismatch")


async def test_generated_code_is_a_file_of_its_own(engine):
    """Errors name the real exception and the user's own lines."""
    result = await engine.run(ExecRequest(code="x = 1\n\nraise ValueError('boom')\n", globals={"y": 2}))
    assert (result.status, result.error.exception, result.error.message) == (
        "nonzero",
        "ValueError",
        "ValueError: boom",
    )
    assert "line 3" in result.error.traceback


async def test_generated_code_cannot_forge_its_report(engine):
    """A program that writes to every descriptor still did run, and its exit code stays."""
    code = 'import os\nfor fd in range(3, 64):\n    try: os.write(fd, b\'{"event": "refused"}\\n\')\n    except OSError: pass\nos._exit(3)'
    result = await engine.run(ExecRequest(code=code))
    assert (result.status, result.exit_code) == ("nonzero", 3)


@pytest.mark.parametrize("name", ["*", "localhost", "http://example.org", "10.1", "example.org:0"])
async def test_an_allow_list_holds_hosts_only(run, name):
    """Bare stars, single words, URLs and odd spellings of addresses and ports are refused before anything runs."""
    with pytest.raises(ExecRefused) as caught:
        await run("true", network=(name,))
    assert caught.value.code == "bad_request"


async def test_the_launcher_is_never_root(monkeypatch):
    """As root a dedicated uid is needed, else the run is refused."""
    if os.geteuid() != 0:
        pytest.skip("only root can be refused for being root")
    with pytest.raises(ExecRefused) as caught:
        await BubblewrapExecutor(ExecutionOptions(sandbox_uid=0)).run(ExecRequest(argv=("true",)))
    assert caught.value.code == "running_as_root"


@pytest.mark.parametrize("limits", [Limits(memory=1 << 20), Limits(nofile=8)])
async def test_limits_too_small_for_any_sandbox_are_refused(run, limits):
    """A limit the launcher itself could not live in is refused before anything runs."""
    with pytest.raises(ExecRefused) as caught:
        await run("true", limits=limits)
    assert caught.value.code == "limit_not_enforceable"


@pytest.mark.parametrize(
    "limits", [Limits(memory=16 << 20), Limits(nofile=16), Limits(pids=1), Limits(fsize=0), Limits(stdout=0)]
)
async def test_the_smallest_limits_work(run, limits):
    """The least that is accepted does run a program."""
    result = await run("sh", "-c", "echo ok", limits=limits)
    assert (result.status, result.stdout.total) == ("ok", 3)


@pytest.mark.parametrize("limits", [Limits(fsize=10), Limits(nofile=32)])
async def test_inputs_that_do_not_fit_the_limits_are_refused(run, limits):
    """An input larger than one file may be, or more inputs than open files, is the caller's mistake."""
    inputs = tuple(InputFile(f"{n}", b"x" * 20) for n in range(10))
    with pytest.raises(ExecRefused) as caught:
        await run("true", inputs=inputs, limits=limits)
    assert caught.value.code == "bad_request"


async def test_many_inputs(run):
    """Two hundred inputs arrive, each with its own bytes."""
    inputs = tuple(InputFile(f"d/{n}", str(n).encode()) for n in range(200))
    result = await run("sh", "-c", "cat d/*| wc -c; ls d | wc -l", inputs=inputs)
    assert result.stdout.text.split() == [str(10 + 180 + 300), "200"]


async def test_a_program_cannot_end_its_own_sandbox(run):
    """Signals to everybody and to the first process change nothing but the program's own tree."""
    result = await run("sh", "-c", "kill -9 -1; kill -9 1; echo still here; exit 5")
    assert (result.exit_code, result.stdout.text) == (5, "still here\n")


async def test_a_stopped_program_is_ended(run):
    """A program that stops itself is ended by the clock."""
    began = time.monotonic()
    result = await run("sh", "-c", "kill -STOP $$", limits=Limits(wall_s=0.5))
    assert result.status == "timeout"
    assert time.monotonic() - began < LONG


async def test_closed_streams_do_not_end_the_run(run):
    """Closing its output is not the end of a program."""
    result = await run("sh", "-c", "exec >&- 2>&-; sleep 0.3; exit 4")
    assert (result.status, result.exit_code) == ("nonzero", 4)


async def test_a_flood_of_files_is_looked_at_in_bounds(python):
    """Tens of thousands of files neither hang the collection nor pass it."""
    program = "import os\nfor n in range(30000): os.close(os.open('/work/%d' % n, 65))"
    result = await python(program, outputs=("*",))
    assert result.status == "ok"
    assert len(result.artifacts) <= 256
    assert {error.code for error in result.artifact_errors} == {"too_many"}


async def test_a_root_that_lost_its_cgroup_is_refused_not_degraded(engine):
    """Where memory cannot be counted, root's runs are refused unless the operator said best effort."""
    import dataclasses

    setup = engine.prepared()
    engine._setup = dataclasses.replace(setup, cgroups=None, nproc=False)
    engine.best_effort = frozenset()
    with pytest.raises(ExecRefused) as caught:
        await engine.run(ExecRequest(argv=("true",)))
    assert (caught.value.code, caught.value.details["limits"]) == ("limit_not_enforceable", ["memory", "pids"])
    assert (await engine.probe()).cure is not None
    engine.best_effort = frozenset({"memory", "pids"})
    result = await engine.run(ExecRequest(argv=("true",)))
    assert (result.status, {"memory", "pids"} & result.limits_enforced) == ("ok", set())


async def test_a_missing_bwrap_is_a_probe_that_failed(monkeypatch):
    """Without its programs the engine says what to install, and raises nothing."""
    monkeypatch.setenv("PATH", "/nonexistent")
    report = await BubblewrapExecutor(ExecutionOptions()).probe()
    assert not report.ok
    assert "install the packages bubblewrap" in report.cure


async def test_a_broken_launcher_is_no_program_result(engine):
    """A launcher that fails is `infra_error` with its words, never an exit code."""
    import dataclasses

    setup = engine.prepared()
    engine._setup = dataclasses.replace(setup, programs={**setup.programs, "bwrap": "/bin/false"})
    result = await engine.run(ExecRequest(argv=("true",)))
    assert (result.status, result.exit_code, result.error.stage) == ("infra_error", None, "setup")


async def test_cut_arguments_start_nothing(engine, monkeypatch):
    """When the launcher gets only part of its arguments, no program runs."""
    from kdskills.execution import bwrap as run_module

    whole = run_module.run_arguments
    monkeypatch.setattr(run_module, "run_arguments", lambda *args: whole(*args)[:60].rpartition(b"--")[0])
    result = await engine.run(ExecRequest(argv=("sh", "-c", "echo ran")))
    assert (result.status, result.stdout.total) == ("infra_error", 0)


async def test_a_tree_that_cannot_be_built_is_a_refusal(tmp_path):
    """Nothing ran, so it is said as a refusal and as a failed probe, not as a crash."""
    (tmp_path / "file").write_text("")
    engine = BubblewrapExecutor(ExecutionOptions(cache_dir=tmp_path / "file/cache"))
    with pytest.raises(ExecRefused) as caught:
        await engine.run(ExecRequest(argv=("true",)))
    assert caught.value.code == "engine_unavailable"
    assert not (await engine.probe()).ok
    short = BubblewrapExecutor(ExecutionOptions(image_packages=("no-such-package",)))
    with pytest.raises(ExecRefused, match="no-such-package"):
        await short.run(ExecRequest(argv=("true",)))


async def test_a_handle_is_the_protocols(engine):
    """What `start` returns is a `Handle`, for a run and for one that was over before it began."""
    handle = await engine.start(ExecRequest(argv=("true",)))
    assert isinstance(handle, Handle)
    assert (await handle.wait()).status == "ok"
    mount = SkillMount("a.x", Path("/nowhere"), "sha256:" + "0" * 64)
    refused = await engine.start(ExecRequest(argv=("true",), skills=(mount,)))
    assert isinstance(refused, Handle)
    await refused.cancel()
    refused.signal(signal.SIGTERM)
    assert ((await refused.wait()).error.code, refused.tail()) == ("skills_mismatch", (b"", b""))


async def test_swapped_inputs_never_leak(engine, tmp_path):
    """A file swapped for a link while runs begin is copied as itself or refused, never as what the link names."""
    secret, target = tmp_path / "secret", tmp_path / "data"
    secret.write_bytes(b"SECRET")
    target.write_bytes(b"honest")
    stop = threading.Event()

    def swap():
        while not stop.is_set():
            (tmp_path / "l").symlink_to(secret)
            (tmp_path / "l").rename(target)
            (tmp_path / "h").write_bytes(b"honest")
            (tmp_path / "h").rename(target)

    thread = threading.Thread(target=swap)
    thread.start()
    seen = set()
    try:
        for _ in range(40):
            try:
                result = await engine.run(ExecRequest(argv=("cat", "x"), inputs=(InputFile("x", target),)))
                seen.add(result.stdout.data)
            except ExecRefused:
                seen.add(b"refused")
    finally:
        stop.set()
        thread.join()
    assert seen <= {b"honest", b"refused"}

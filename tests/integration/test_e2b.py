"""What is E2B's own: its errors, reuse by owner, times, leases, deliveries, all through its SDK."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import re
import sys
import threading
import time
from pathlib import Path

import pytest
from pydantic import SecretStr

from kdskills.builtin.executors.e2b import E2bExecutor
from kdskills.errors import ExecRefused
from kdskills.execution import ExecRequest, InputFile, Limits, Owner, SkillMount
from kdskills.execution.protocol import ExecutionOptions
from kdskills.skills.safe_open import tree_digest
from kdskills.testing.e2b_server import E2bServer

pytestmark = pytest.mark.needs("e2b")


@pytest.fixture
def server():
    """Return a server of its own for each test that counts or breaks something."""
    with E2bServer() as server:
        yield server


@pytest.fixture
def make(server, tmp_path):
    """Return a maker of engines that share one state folder, as processes of one account do."""

    def make(best_effort=frozenset(), **changes):
        options = server.options(**changes)
        return E2bExecutor(ExecutionOptions(e2b=options, state_dir=tmp_path / "state", best_effort=best_effort))

    return make


def sh(script: str, **fields) -> ExecRequest:
    """Return a request for a line of shell."""
    return ExecRequest(argv=("sh", "-c", script), **fields)


def made(server) -> int:
    """Return how many sandboxes were asked for."""
    return sum(re.fullmatch(r"POST (/v2)?/sandboxes", line) is not None for line in server.requests)


def programs(server) -> list[str]:
    """Return the command lines running in the only machine."""
    (sandbox,) = server.sandboxes.values()
    script = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done"
    command = sandbox.vm.start(["/bin/sh", "-c", script], {}, "/")
    return b"".join(value for kind, value in command.events(60) if kind == "stdout").decode().splitlines()


async def until(true, seconds: float = 60) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come so far"
        await asyncio.sleep(0.02)


async def test_a_wrong_key_is_refused_and_never_shown(make, server, tmp_path):
    """401 is a refusal with a cure; the key is in no message, detail, representation or file."""
    secret = "e2b_" + "5ec2e7" * 7
    engine = make(api_key=SecretStr(secret))
    with pytest.raises(ExecRefused) as caught:
        await engine.run(sh("true"))
    report = await engine.probe()
    assert (caught.value.code, caught.value.details["reason"]) == ("engine_unavailable", "unauthorized")
    assert (report.ok, "API key" in report.cure) == (False, True)
    texts = [str(caught.value), json.dumps(caught.value.to_json()), repr(caught.value.__context__), repr(report)]
    texts += [repr(engine.options), *(path.read_text() for path in tmp_path.rglob("*") if path.is_file())]
    assert [text for text in texts if secret in text] == []
    assert server.sandboxes == {}


async def test_what_is_missing_is_said_in_one_sentence(make, monkeypatch):
    """Without a key, and without the SDK, nothing is asked of anybody."""
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(ExecRefused, match="set E2B_API_KEY"):
        await make(api_key=None).run(sh("true"))
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(ExecRefused, match=r"^the engine e2b needs the package e2b: pip install 'kdskills\[e2b\]'$"):
        await make().run(sh("true"))


async def test_the_key_may_come_from_its_variable(make, server, monkeypatch):
    """`E2B_API_KEY` is read when the settings have no key."""
    monkeypatch.setenv("E2B_API_KEY", server.key)
    assert (await make(api_key=None).run(sh("true"))).status == "ok"


async def test_a_rate_limit_is_said_and_passes(make, server):
    """429 beyond the SDK's patience is a refusal with its reason; the next call works."""
    engine = make()
    server.rate_limited = 50
    with pytest.raises(ExecRefused) as caught:
        await engine.run(sh("true"))
    assert caught.value.details["reason"] == "rate_limited"
    server.rate_limited = 0
    assert (await engine.run(sh("true"))).status == "ok"


async def test_a_server_nobody_runs_is_a_refusal(make):
    """No answer at all is a refusal, too, with its reason."""
    with pytest.raises(ExecRefused) as caught:
        await make(api_url="http://127.0.0.1:9").run(sh("true"))
    assert caught.value.details["reason"] == "unreachable"


async def test_one_sandbox_for_each_owner(make, server):
    """Runs of one owner share a sandbox, in this process and the next; other owners never do."""
    first = make()
    for _ in range(2):
        assert (await first.run(sh("true"))).status == "ok"
    assert (await make().run(sh("true"))).status == "ok"
    assert (made(server), sum("/connect" in line for line in server.requests)) == (1, 1)
    near = [Owner(agent="a_b", conversation="c"), Owner(agent="a", conversation="b_c"), Owner(tenant="other")]
    for owner in near:
        await first.run(sh("true", owner=owner))
    assert made(server) == 1 + len(near)
    labels = [sandbox.body["metadata"]["kdskills.agent"] for sandbox in server.sandboxes.values()]
    assert labels == ["local", "a_b", "a", "local"]
    assert [sandbox.body["allow_internet_access"] for sandbox in server.sandboxes.values()] == [False] * 4


async def test_a_sandbox_that_is_gone_is_replaced(make, server):
    """404 between two runs makes a new sandbox; the caller sees only the second result."""
    engine = make()
    await engine.run(sh("true"))
    server.end(next(iter(server.sandboxes)))
    result = await engine.run(sh("echo again"))
    assert (result.status, result.stdout.data, made(server)) == ("ok", b"again\n", 2)


async def test_a_sandbox_that_goes_away_below_a_run(make, server):
    """A sandbox whose time is over while a program runs is `sandbox_lost`, not the program's result; the next run works."""
    engine = make()
    handle = await engine.start(sh("echo begun; sleep 600"))
    await until(lambda: b"begun" in handle.tail()[0])
    next(iter(server.sandboxes.values())).ends = 0
    result = await asyncio.wait_for(handle.wait(), 60)
    assert (result.status, result.exit_code, result.error.code) == ("infra_error", None, "sandbox_lost")
    assert result.stdout.data == b"begun\n"
    assert (await engine.run(sh("true"))).status == "ok"


async def test_words_of_a_program_are_not_taken_for_e2bs(make, server):
    """`command not found` and `sandbox not found` on standard error are output of a program that failed."""
    engine = make()
    script = "echo out; echo 'sh: x: command not found'; echo '404: sandbox was not found' >&2; exit 127"
    result = await engine.run(sh(script))
    assert (result.status, result.exit_code, result.error) == ("nonzero", 127, None)
    assert (result.stdout.total, result.stderr.data) == (29, b"404: sandbox was not found\n")
    await engine.run(sh("true"))
    assert made(server) == 1


async def test_the_sandboxs_own_time_follows_the_ttl(make, server):
    """The timeout given to E2B is that of the sandbox, renewed by each run, and never below what the run needs."""
    engine = make(idle_ttl_s=100, hard_ttl_s=1000)
    for wall in (1, 30):
        before = time.time()
        await engine.run(sh("true", limits=Limits(wall_s=wall)))
        (sandbox,) = server.sandboxes.values()
        assert before <= sandbox.ends - (100 + wall + 180) <= time.time() + 1


async def test_idle_and_hard_times_replace_a_sandbox(make, server):
    """A sandbox unused for the idle time, or older than the hard time allows for a run, is ended and replaced."""
    idle = make(idle_ttl_s=0.3)
    await idle.run(sh("true"))
    (before,) = server.sandboxes
    await asyncio.sleep(0.4)  # longer than idle: a busy machine only makes it longer still
    await idle.run(sh("true"))
    assert (before in server.sandboxes, len(server.sandboxes)) == (False, 1)
    hard = make(hard_ttl_s=5)
    await hard.run(sh("true"))
    await hard.run(sh("true"))
    assert (made(server), len(server.sandboxes)) == (4, 1)


async def test_runs_of_one_owner_take_turns(make, server):
    """Two processes with one owner never use the sandbox at once."""
    script = "date +%s.%N; sleep 0.4; date +%s.%N"
    results = await asyncio.gather(*(make().run(sh(script)) for _ in range(3)))
    spans = sorted([float(word) for word in result.stdout.text.split()] for result in results)
    assert [later[0] >= earlier[1] for earlier, later in itertools.pairwise(spans)] == [True, True]
    assert made(server) == 1


async def test_a_stale_holder_is_fenced(make, server):
    """A holder whose token is not the highest is refused inside the sandbox, whatever it believes."""
    engine = make()
    await engine.run(sh("true"))

    stale = E2bExecutor(engine.options)
    acquire = stale.leases.acquire
    stale.leases.acquire = lambda *args: dataclasses.replace(acquire(*args), token=1)
    result = await stale.run(sh("touch /work/ran; echo ran"))
    assert (result.status, result.error.code, result.stdout.data) == ("infra_error", "lease_lost", b"")


async def test_a_takeover_ends_the_older_run(make, server, tmp_path):
    """When a lease is over, the next holder's run ends what the last one left running, and is not held up by it."""
    slow, next_ = make(), make()
    handle = await slow.start(sh("echo begun; sleep 600.25"))
    await until(lambda: b"begun" in handle.tail()[0])
    (record,) = (tmp_path / "state" / "e2b").glob("*.json")
    facts = json.loads(record.read_text())
    record.write_text(json.dumps({**facts, "until": 1.0}))
    assert (await next_.run(sh("echo mine"))).stdout.data == b"mine\n"
    result = await asyncio.wait_for(handle.wait(), 60)
    assert (result.status, result.error.code) == ("infra_error", "init_lost")
    assert [line for line in programs(server) if "sleep 600.25" in line] == []
    assert json.loads(record.read_text())["token"] == 2


async def test_cancelling_ends_the_whole_tree_by_its_process_id(make, server):
    """When the client goes, envd would let the command run on; cancelling ends it and all its children there."""
    engine = make()
    task = asyncio.create_task(
        engine.run(sh("sleep 631.5 & setsid sleep 632.5 & trap '' TERM; while :; do sleep 1; done"))
    )
    await until(lambda: len(server.sandboxes) == 1 and any("sleep 632.5" in line for line in programs(server)))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    assert [line for line in programs(server) if "sleep 63" in line or "remote_init" in line] == []


async def test_cancelling_while_waiting_for_the_lease(make, server):
    """A run that waits for its owner's turn leaves at once, and nothing of it ever runs."""
    engine = make()
    first = await engine.start(sh("echo begun; sleep 600", limits=Limits(wall_s=300)))
    await until(lambda: b"begun" in first.tail()[0])
    second = await engine.start(sh("echo never"))
    await asyncio.sleep(0.3)  # either way it has to leave: before it asked for the lease, or while it waits
    await asyncio.wait_for(second.cancel(), 60)
    assert (await second.wait()).status == "cancelled"
    await first.cancel()
    assert ((await first.wait()).status, (await second.wait()).stdout.data) == ("cancelled", b"")


async def test_a_broken_connection_does_not_lose_the_result(make, server):
    """A stream that breaks off leaves the program running; its answer is fetched when it is there."""
    engine = make()
    await engine.run(sh("true"))
    server.dropped_streams = 1
    result = await engine.run(sh("sleep 1; echo done; exit 7"))
    assert (result.status, result.exit_code, result.stdout.data) == ("nonzero", 7, b"done\n")


async def test_bytes_stay_bytes(make):
    """Binary standard output, inputs and outputs come and go unchanged, which the SDK's own text would not."""
    data = bytes(range(256)) * 64
    result = await make().run(
        sh("cat in.bin; cat in.bin >&2; cp in.bin out.bin", inputs=(InputFile("in.bin", data),), outputs=("*.bin",))
    )
    assert (result.stdout.data, result.stderr.data) == (data, data)
    assert {item.path: item.content for item in result.artifacts} == {"in.bin": data, "out.bin": data}


@pytest.fixture
def skill(tmp_path):
    """Return the mount of a skill with a script, a binary file and a link."""
    folder = tmp_path / "brief"
    (folder / "scripts").mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: brief\ndescription: A skill.\n---\nDo.\n")
    (folder / "scripts" / "say.sh").write_text("#!/bin/sh\necho said\n")
    (folder / "scripts" / "say.sh").chmod(0o755)
    (folder / "data.bin").write_bytes(bytes(range(256)))
    (folder / "link").symlink_to("data.bin")
    return SkillMount("press.brief", folder, tree_digest(folder))


async def test_skills_lie_where_they_lie_at_home(make, server, skill):
    """A skill is delivered once, lies at /skills/<full id> read-only, and is seen by runs that have it only."""
    engine = make()
    script = "scripts/say.sh; cat link; touch new 2>/dev/null || echo closed; ls /skills"
    result = await engine.run(sh(script, skills=(skill,), workdir="/skills/press.brief"))
    assert result.stdout.data == b"said\n" + bytes(range(256)) + b"closed\npress.brief\n"
    uploads = server.requests.count("POST /files")
    await engine.run(sh("true", skills=(skill,)))
    assert server.requests.count("POST /files") == uploads + 1
    other = await engine.run(sh("ls /skills; ls /opt/kdskills/skills /opt/kdskills/runs 2>&1 | grep -c denied"))
    assert other.stdout.data == b"2\n"


async def test_what_arrives_changed_is_not_unpacked(make, server, skill):
    """An archive whose bytes are not the ones that were sent is refused by its digest, and nothing runs."""
    engine = make()
    await engine.run(sh("true"))
    server.altered_uploads = 1
    with pytest.raises(ExecRefused, match="has digest"):
        await engine.run(sh("true", skills=(skill,)))
    assert (await engine.run(sh("cat SKILL.md", skills=(skill,), workdir="/skills/press.brief"))).status == "ok"


async def test_generated_code_uses_what_was_delivered(make):
    """The ground floor comes with us: a template's own kdskills, if there is one, is not what runs."""
    code = (
        "import kdskills, kdskills_runtime\nkdskills_runtime.report([kdskills.__file__, kdskills_runtime.__file__])\n"
    )
    result = await make().run(ExecRequest(code=code))
    assert [path.startswith("/opt/kdskills/code/") for path in result.value] == [True, True], result


async def test_limits_are_honest(tmp_path):
    """A machine that lets nobody make cgroups holds no memory limit: refused, or, as best effort, not claimed."""
    with E2bServer(memory=False) as server:
        options = ExecutionOptions(e2b=server.options(), state_dir=tmp_path)
        with pytest.raises(ExecRefused) as caught:
            await E2bExecutor(options).run(sh("true"))
        assert (caught.value.code, caught.value.details["limits"]) == ("limit_not_enforceable", ["memory"])
        lenient = E2bExecutor(dataclasses.replace(options, best_effort=frozenset({"memory"})))
        report, result = await lenient.probe(), await lenient.run(sh("true"))
        assert ("memory" in report.limits, "memory" in result.limits_enforced, result.status) == (False, False, "ok")


async def test_an_allow_list_is_refused(make, server):
    """Traffic to some hosts only cannot be held, so it is not pretended."""
    with pytest.raises(ExecRefused) as caught:
        await make().run(sh("true", network=("example.org",)))
    assert (caught.value.code, made(server)) == ("limit_not_enforceable", 0)


async def test_reap_ends_what_nobody_uses(make, server, tmp_path):
    """Sandboxes of dead holders and those over their time are ended and named; others stay."""
    engine = make()
    for agent in ("dead", "idle", "fresh"):
        await engine.run(sh("true", owner=Owner(agent=agent)))
    for path in (tmp_path / "state" / "e2b").glob("*.json"):
        facts = json.loads(path.read_text())
        agent = server.sandboxes[facts["sandbox"]].body["metadata"]["kdskills.agent"]
        holder = {"kdskills.run": "r", "kdskills.boot": "another"}
        changes = {"dead": {"holder": holder, "until": time.time() + 900}, "idle": {"used": 1.0}, "fresh": {}}[agent]
        path.write_text(json.dumps({**facts, **changes}))
    report = await make().reap()
    assert (len(report.ended), report.failed) == (2, ())
    left = [sandbox.body["metadata"]["kdskills.agent"] for sandbox in server.sandboxes.values()]
    assert left == ["fresh"]
    assert (await make().reap()).ended == ()
    assert (await engine.run(sh("true", owner=Owner(agent="dead")))).status == "ok"


async def test_threads_and_tasks_may_share_an_engine(make):
    """One engine serves several event loops at once."""
    engine = make()
    found = []

    def one(number: int) -> None:
        result = asyncio.run(engine.run(sh(f"echo {number}", owner=Owner(agent=str(number % 2)))))
        found.append(result.stdout.text.strip())

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert sorted(found) == ["0", "1", "2", "3"]


async def test_a_killed_owner_leaves_nothing_to_the_next(make, server, tmp_path):
    """When kdskills is killed while a program runs: the machine runs on, as E2B's would, until the next start reaps it."""
    program = Path(__file__).with_name("e2b_killed.py")
    words = [sys.executable, str(program), server.url, server.key, str(tmp_path / "state")]
    victim = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    try:
        assert await victim.stdout.readline() == b"begun\n"
    finally:
        victim.kill()
        await victim.wait()
        victim._transport.close()
    assert [line for line in programs(server) if "sleep 600.75" in line] != []
    (sandbox,) = server.sandboxes
    report = await make().reap()
    assert (report.ended, report.failed) == ((f"sandbox {sandbox}: its owner is dead",), ())
    assert server.sandboxes == {}
    assert (await make().run(sh("echo next"))).stdout.data == b"next\n"

"""Commands as operations, with a real worker and a real sandbox: what goes in, what comes out."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os

import pytest

from kdskills.errors import BadRequest, Conflict, NotFound

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.timeout(300), pytest.mark.xdist_group("operations")]


async def test_a_command_that_succeeds(local) -> None:
    """The result tells what was printed, how long it took, and which version of the skill ran; it names no task."""
    found = await local.cmd("echo out; echo err >&2", session_id="basic")
    assert (found.status, found.exit_code, found.stdout, found.stderr) == ("succeeded", 0, "out\n", "err\n")
    assert (found.stdout_truncated, found.stderr_truncated, found.workdir, found.session_id) == (
        False, False, "session", "basic",
    )  # fmt: skip
    assert found.timing.duration_ms >= 0
    assert found.version_hash.startswith("sha256:")
    assert "task_id" not in type(found).model_fields


async def test_a_command_that_fails_is_a_result(local) -> None:
    """A non-zero exit is a result with status failed; a signal is told, and no success is made of it."""
    found = await local.cmd("echo partly; exit 7")
    assert (found.status, found.exit_code, found.signal, found.stdout) == ("failed", 7, None, "partly\n")
    killed = await local.cmd(["python3", "-c", "import os; os.kill(os.getpid(), 15)"])
    assert (killed.status, killed.signal, killed.exit_code == 0) == ("failed", 15, False)


async def test_a_timeout_keeps_the_output(local) -> None:
    """What was printed before the time was over comes back, with status timeout."""
    found = await local.cmd("echo before; sleep 600", timeout_sec=1)
    assert (found.status, found.stdout, found.error_code) == ("timeout", "before\n", "timeout")


async def test_a_program_that_is_not_there(local) -> None:
    """A program that cannot be started is no success, and says so."""
    found = await local.cmd("no-such-program-anywhere")
    assert (found.status, found.exit_code) == ("failed", 127)


async def test_the_skills_script_runs(local) -> None:
    """A command starts in the skill's folder by default and finds its files there, read-only."""
    found = await local(
        "run_cmd", skill_name="tool", command="pwd; python3 scripts/hello.py a 'b c'; touch x || echo ro"
    )
    assert found.stdout == "/skills/public.tool\nhello a b c\nro\n"


async def test_variables_arrive_byte_exact(local) -> None:
    """Values with everything a shell would eat arrive as they were given, to text and list alike."""
    odd = "$HOME ${X} $(id) `id` \"quoted\" 'single' \\back\n newline\ttab ä€😀 *?[a] ~ ! & | ; < >"
    script = "import os, sys; sys.stdout.write(os.environ['ODD'])"
    assert (await local.cmd(["python3", "-c", script], env={"ODD": odd})).stdout == odd
    assert (await local.cmd('printf %s "$ODD"', env={"ODD": odd})).stdout == odd


async def test_files_stay_in_a_session(local) -> None:
    """What a command leaves in its session is there for the next one, and for no other session."""
    await local.cmd("mkdir -p d; echo one > d/f", session_id="keep")
    assert (await local.cmd("cat d/f", session_id="keep")).stdout == "one\n"
    assert (await local.cmd("cat f", session_id="keep", workdir="d")).stdout == "one\n"
    assert (await local.cmd("ls", session_id="other")).stdout == ""
    assert (await local.cmd("ls")).stdout == ""


async def test_inputs_and_outputs(local) -> None:
    """Inputs are there before the command, outputs become artifacts, missing ones are rows and no failure."""
    data = os.urandom(2000)
    found = await local.cmd(
        "cat in/a.bin > out.bin; cat note.txt",
        inputs=[
            {"path": "in/a.bin", "content_base64": base64.b64encode(data).decode()},
            {"path": "note.txt", "text": "grüße\n"},
        ],
        outputs=["out.bin", "never.txt", "*.pdf"],
    )
    assert (found.status, found.stdout) == ("succeeded", "grüße\n")
    (kept,) = found.created_artifacts
    assert (kept.path, kept.size, kept.sha256) == ("out.bin", 2000, hashlib.sha256(data).hexdigest())
    assert {(row.path, row.code) for row in found.output_errors} == {("*.pdf", "missing"), ("never.txt", "missing")}
    again = await local.cmd("cat copy.bin | sha256sum", inputs=[{"path": "copy.bin", "artifact_id": kept.artifact_id}])
    assert again.stdout.split()[0] == kept.sha256


async def test_an_artifact_is_read_back_by_id(local) -> None:
    """Name, type, provenance and bytes of an artifact come back by its id, piece by piece."""
    found = await local.cmd("printf 0123456789 > data.csv", outputs=["data.csv"])
    item = found.created_artifacts[0].artifact_id
    host = local.host
    whole = await host.call("artifacts.get", artifact_id=item, limit=100)
    assert (whole.path, whole.mime, whole.size, whole.skill_name, whole.version_hash) == (
        "data.csv", "text/csv", 10, "public.tool", found.version_hash,
    )  # fmt: skip
    assert (base64.b64decode(whole.data_base64), whole.url) == (b"0123456789", None)
    piece = await host.call("artifacts.get", artifact_id=item, offset=8, limit=100)
    assert (base64.b64decode(piece.data_base64), piece.offset, piece.next_offset) == (b"89", 8, 10)
    with pytest.raises(NotFound):
        await host.call("artifacts.get", artifact_id="art_nothing")


async def test_escaping_outputs_run_nothing(local) -> None:
    """An output that leads out of the session is refused before anything runs."""
    with pytest.raises(BadRequest):
        await local.cmd("touch ran", session_id="escape", outputs=["../../etc/passwd"])
    assert (await local.cmd("ls", session_id="escape")).stdout == ""


async def test_links_are_never_collected(local) -> None:
    """A link in place of an output is told and not followed."""
    found = await local.cmd("ln -s /etc/passwd out; echo x > real", outputs=["out", "real"])
    assert [item.path for item in found.created_artifacts] == ["real"]
    assert [row.path for row in found.output_errors] == ["out"]


async def test_an_input_artifact_that_is_not_there(local) -> None:
    """An artifact nobody has is an error of the command, not a command without its input."""
    with pytest.raises(Exception, match="artifact"):
        await local.cmd("echo ran", inputs=[{"path": "a", "artifact_id": "art_nothing"}])


async def test_long_output_keeps_its_end(local) -> None:
    """Of long output the last 200 KiB are kept, with flag and true total, and no character is split."""
    found = await local.cmd(["python3", "-c", "print('ä' * 300_000)\nprint('end')"])
    assert (found.stdout_truncated, found.stdout_total) == (True, 600_005)
    assert found.stdout.endswith("ä\nend\n")
    assert "\ufffd" not in found.stdout
    assert 200 * 1024 - 4 <= len(found.stdout.encode()) <= 200 * 1024


async def test_hostile_output_is_kept_as_it_is(local) -> None:
    """NUL bytes, bytes that are no text and a line of 300 KB break neither the record nor the answer."""
    script = "import sys; sys.stdout.buffer.write(b'a\\0b\\xff\\n' + b'x' * 300_000)"
    found = await local.cmd(["python3", "-c", script])
    assert (found.status, found.stdout_total) == ("succeeded", 300_005)
    short = await local.cmd(["python3", "-c", "import sys; sys.stdout.buffer.write(b'a\\0b\\xff\\n')"])
    assert short.stdout == "a\0b\ufffd\n"


async def test_a_repeated_call_is_the_first_one(local) -> None:
    """With a key, the same call runs once and answers the same; another body under it is a conflict."""
    arguments = {"session_id": "idem", "command": "echo $$ >> log; cat log"}
    first = await local.cmd(key="k-run", **arguments)
    assert await local.cmd(key="k-run", **arguments) == first
    assert (await local.cmd("wc -l < log", session_id="idem")).stdout.strip() == "1"
    with pytest.raises(Conflict) as refused:
        await local.cmd("echo other", key="k-run")
    assert (refused.value.code, refused.value.details) == ("conflict", {"reason": "idempotency_key"})
    tasks = await asyncio.gather(*(local.start("echo once", key="k-async") for _ in range(5)))
    assert len(set(tasks)) == 1


async def test_commands_of_a_session_never_overlap(local) -> None:
    """Five commands started at once in one session run one after another."""
    script = "mkdir lock && sleep 0.1 && rmdir lock && echo ok"
    found = await asyncio.gather(*(local.cmd(script, session_id="serial") for _ in range(5)))
    assert [item.stdout for item in found] == ["ok\n"] * 5


async def test_a_busy_session_may_refuse(local) -> None:
    """Who does not want to wait gets a conflict that names who holds the session."""
    holder = await local.start("sleep 600", session_id="busy")
    with pytest.raises(Conflict) as refused:
        await local.cmd("true", session_id="busy", on_busy="refuse")
    assert refused.value.details["holder"] == holder
    await local("task_cancel", task_id=holder)
    assert (await local.cmd("echo free", session_id="busy")).stdout == "free\n"


async def test_a_caller_who_goes_away_takes_the_command_along(local) -> None:
    """A call that is given up ends what it started; the session is free again."""
    calling = asyncio.create_task(local.cmd("echo began > f; sleep 600", session_id="gone", timeout_sec=100))
    deadline = asyncio.get_running_loop().time() + 60
    while True:
        found = await local.host.call("tasks.list", session_id="gone", status="running")
        if found.tasks:
            break
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)
    ended = await local.over(found.tasks[0].task_id)
    assert ended.status == "canceled"


async def test_activation_tells_where_files_are(local) -> None:
    """A local sandbox has the skill at a fixed place; nothing is run for it."""
    found = await local("activate", skill_name="tool", session_id="act")
    assert (found.mode, found.skill_name, found.active_path, found.session_id) == (
        "local", "public.tool", "/skills/public.tool", "act",
    )  # fmt: skip
    ran = await local("run_cmd", skill_name="tool", command="pwd", session_id="act")
    assert (ran.stdout.strip(), ran.version_hash) == (found.active_path, found.version_hash)


async def test_large_inputs_do_not_live_in_the_record(local) -> None:
    """An input of many MiB arrives whole, and the record that is read while one waits stays small."""
    data = os.urandom(6 * 1024 * 1024)
    given = {"path": "large", "content_base64": base64.b64encode(data).decode()}
    task = await local.start("sha256sum < large", inputs=[given, {"path": "small", "text": "x"}])
    ended = await local.over(task)
    assert ended.stdout_tail.split()[0] == hashlib.sha256(data).hexdigest()
    head = await local.host.work.task(local.identity, task)
    assert len(head.spec.model_dump_json()) < 100_000


async def test_a_job_may_refuse_a_busy_session(local) -> None:
    """A job that does not want to wait gets a conflict with the holder's id; the session is the job's while it runs."""
    steps = [{"name": "a", "command": "sleep 600"}]
    first = await local("start_job", skill_name="tool", session_id="jobs-busy", steps=steps)
    with pytest.raises(Conflict) as refused:
        await local("start_job", skill_name="tool", session_id="jobs-busy", steps=steps, on_busy="refuse")
    assert refused.value.details["holder"] == first.job_id
    with pytest.raises(Conflict):
        await local.cmd("true", session_id="jobs-busy", on_busy="refuse")
    assert (await local("job_cancel", job_id=first.job_id)).canceled is True

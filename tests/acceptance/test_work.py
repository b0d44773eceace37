"""Background work as its users meet it: one path through everything, with nothing mocked, over a killed worker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from typer.main import get_command

from kdskills.app import Host, Settings
from kdskills.app.operations import Context
from kdskills.doors.cli.main import build_cli
from kdskills.testing.work import end_attempts

ROOT = Path(__file__).parents[2]
KDSKILLS = str(Path(sys.executable).parent / "kdskills")
LONG = 100.0

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.timeout(400)]


class Desk:
    """A user's shell: a state folder, a bundle, and the `kdskills` command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workers: list[subprocess.Popen[bytes]] = []
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("KDSKILLS_")} | {
            "KDSKILLS_STATE_DIR": str(folder / "state"),
            "KDSKILLS_BUNDLE": str(ROOT / "bundles" / "hello"),
            "KDSKILLS_EXECUTOR": "bubblewrap",
            "KDSKILLS_JOBS__IDLE_S": "2",
        }
        self.host = Host(
            Settings(
                state_dir=folder / "state",
                bundle=ROOT / "bundles" / "hello",
                executor="bubblewrap",
                jobs={"idle_s": 2.0},
            )
        )

    def run(self, *words: object, code: int = 0) -> Result:
        """Run a command of the command line to its end, in this process: starting one costs seconds on a busy machine."""
        done = CliRunner().invoke(get_command(build_cli(self.host)), list(map(str, words)), obj=self.host)
        assert done.exit_code == code, (words, done.exit_code, done.stdout, done.stderr, done.exception)
        return done

    def shell(self, *words: object) -> subprocess.CompletedProcess[bytes]:
        """Run the installed command to its end."""
        command = [KDSKILLS, *map(str, words)]
        return subprocess.run(command, env=self.env, cwd=ROOT, capture_output=True, check=True, timeout=LONG)

    def tool(self, name: str, *, key: str | None = None, **arguments: Any) -> Any:
        """Run an operation from this process and return its answer as doors give it."""
        context = Context(idempotency_key=key)
        answer = asyncio.run(self.host.invoke(f"skills.{name}", arguments, context))
        return json.loads(answer.model_dump_json())

    def start_worker(self) -> subprocess.Popen[bytes]:
        """Start `kdskills worker`."""
        with (self.folder / "worker.log").open("ab") as log:
            self.workers.append(subprocess.Popen([KDSKILLS, "worker"], env=self.env, cwd=ROOT, stdout=log, stderr=log))
        return self.workers[-1]

    def kill_embedded_worker(self) -> None:
        """Kill the worker of this state folder as `kill -9` does."""

        async def pids() -> list[int]:
            work = await self.host.work.client.work()
            workers = work.tables.workers
            live = workers.select().with_only_columns(workers.c.pid).where(workers.c.state == "live")
            return await work.database.read(lambda link: list(link.execute(live).scalars()))

        (pid,) = asyncio.run(pids())
        os.kill(pid, signal.SIGKILL)

    def until(self, look: Callable[[], Any], truth: Callable[[Any], bool]) -> Any:
        """Look until something is so."""
        deadline = time.monotonic() + LONG
        while True:
            seen = look()
            if truth(seen):
                return seen
            assert time.monotonic() < deadline, (seen, (self.folder / "worker.log").read_text(errors="replace"))
            time.sleep(0.1)

    def end(self) -> None:
        """End what was started, and what the programs of a test left running."""
        asyncio.run(self.host.work.aclose())
        asyncio.run(self.host.storage.aclose())
        for worker in self.workers:
            if worker.poll() is None:
                worker.terminate()
                try:
                    worker.wait(30)
                except subprocess.TimeoutExpired:
                    worker.kill()
                    worker.wait()
        end_attempts(self.host.settings.state_dir)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """A desk of its own for each test."""
    tmp_path.chmod(0o755)
    made = Desk(tmp_path)
    yield made
    made.end()


def fetch(url: str) -> bytes:
    """Read a page."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        body: bytes = answer.read()
        return body


def test_the_whole_path_over_a_killed_worker(desk: Desk) -> None:
    """Skill, command, task, job, service, cancel; the worker dies by kill -9; afterwards everything is where it should be."""
    loaded = desk.tool("load", session_id="s", names=["hello"])
    assert [item["name"] for item in loaded["instructions"]] == ["hello"]
    activated = desk.tool("activate", skill_name="hello", session_id="s")
    assert activated["active_path"] == "/skills/public.hello"

    worker = desk.start_worker()
    ran = desk.tool(
        "run_cmd",
        skill_name="hello",
        session_id="s",
        command="ls /skills/public.hello; echo kept > f",
        workdir="session",
        outputs=["f"],
    )
    assert (ran["status"], "SKILL.md" in ran["stdout"], ran["created_artifacts"][0]["path"]) == ("succeeded", True, "f")
    assert ran["version_hash"] == activated["version_hash"]

    slow = "cat f; echo begun >> runs; echo up; while [ ! -e /work/never ]; do sleep 0.1; n=$((n+1)); [ $n -gt 80 ] && break; done; echo done"
    task = desk.tool("run_cmd_async", skill_name="hello", session_id="s", command=slow, workdir="session", key="once")
    same = desk.tool("run_cmd_async", skill_name="hello", session_id="s", command=slow, workdir="session", key="once")
    assert same == task
    job = desk.tool(
        "start_job",
        skill_name="hello",
        session_id="j",
        workdir="session",
        steps=[
            {"name": "one", "command": "echo one >> order; sleep 4"},
            {"name": "two", "command": "echo two >> order"},
            {"name": "three", "command": "cat order"},
        ],
    )
    doomed = desk.tool("run_cmd_async", skill_name="hello", session_id="d", command="echo up; sleep 600")
    service = desk.tool(
        "run_service",
        skill_name="hello",
        session_id="w",
        workdir="session",
        command="echo served > index.html; exec python3 -m http.server 8000",
        ready={"tcp_port": 8000},
        expose_ports=[8000],
    )

    def status(started: dict[str, Any]) -> Any:
        return desk.tool("task_status", task_id=started["task_id"])

    up = desk.until(lambda: status(service), lambda seen: seen["status"] == "running")
    url = up["exposed_endpoints"][0]["url"]
    desk.until(lambda: status(task), lambda seen: "up" in seen["stdout_tail"])
    desk.until(lambda: status(doomed), lambda seen: "up" in seen["stdout_tail"])

    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert fetch(url) == b"served\n"  # what ran goes on without a worker
    canceled = desk.tool("task_cancel", task_id=doomed["task_id"], reason="nobody is there")
    assert canceled["canceled"] is True

    desk.start_worker()
    ended = desk.tool("task_watch", task_id=task["task_id"])
    assert (ended["status"], ended["attempt"]) == ("succeeded", 1)
    assert ended["stdout_tail"].splitlines() == ["kept", "up", "done"]
    finished = desk.tool("job_watch", job_id=job["job_id"])
    assert (finished["status"], finished["steps"][2]["stdout_tail"]) == ("succeeded", "one\ntwo\n")
    assert [(step["status"], step["tries"]) for step in finished["steps"]] == [("succeeded", 1)] * 3
    assert desk.until(lambda: status(doomed), lambda seen: seen["finished_at"])["status"] == "canceled"
    after = status(service)
    assert (after["status"], after["attempt"], after["exposed_endpoints"][0]["url"]) == ("running", 1, url)
    assert fetch(url) == b"served\n"

    files = desk.tool("run_cmd", skill_name="hello", session_id="s", command="cat f runs", workdir="session")
    assert files["stdout"] == "kept\nbegun\n"
    logs = desk.tool("task_logs", task_id=task["task_id"], offset=-5)
    assert (logs["data"], logs["ended"]) == ("done\n", True)
    assert desk.tool("job_status", job_id=job["job_id"])["status"] == "succeeded"
    assert desk.tool("job_cancel", job_id=job["job_id"])["canceled"] is False
    assert desk.tool("task_cancel", task_id=service["task_id"])["canceled"] is True
    assert desk.until(lambda: status(service), lambda seen: seen["finished_at"])["exposed_endpoints_active"] is False


def test_work_needs_no_worker_to_be_started(desk: Desk) -> None:
    """With nothing running, the first command brings a worker up, which goes away by itself when it is idle."""
    found = desk.tool("run_cmd", skill_name="hello", command="echo alone")
    assert (found["status"], found["stdout"]) == ("succeeded", "alone\n")
    log = desk.folder / "state" / "worker.log"
    desk.until(log.read_text, lambda text: "it had no work for" in text)


def test_a_look_brings_back_a_worker_that_was_killed(desk: Desk) -> None:
    """The embedded worker dies in mid-task and nobody submits anything: looking at the list is enough to see it end."""
    started = desk.tool("run_cmd_async", skill_name="hello", command="echo up; sleep 10; echo over")
    item = {"task_id": started["task_id"]}
    desk.until(lambda: desk.tool("task_status", **item), lambda seen: "up" in seen["stdout_tail"])
    desk.kill_embedded_worker()
    del desk.host.work.__dict__["client"]  # as a process that has never seen a worker

    desk.until(lambda: desk.run("jobs", "list", "--json").stdout, lambda text: '"succeeded"' in text)


def test_a_user_sees_steps_and_output(desk: Desk) -> None:
    """`jobs watch` shows each step and its output, `jobs list`, `show` and `logs` find it again, exit codes tell how it went."""
    good = desk.tool(
        "start_job",
        skill_name="hello",
        session_id="g",
        steps=[
            {"name": "make", "command": "echo making; echo warned >&2"},
            {"name": "ship", "command": "echo shipped"},
        ],
    )["job_id"]
    bad = desk.tool("start_job", skill_name="hello", session_id="b", steps=[{"name": "break", "command": "exit 3"}])[
        "job_id"
    ]
    seen = desk.run("jobs", "watch", good).stdout
    for words in ("make: succeeded", "make | making", "make | warned", "ship | shipped", f"{good}: succeeded"):
        assert words in seen, seen
    broken = desk.run("jobs", "watch", bad, code=1).stdout
    assert ("break: failed" in broken, "step_failed" in broken) == (True, True)
    listed = "".join(desk.run("jobs", "list").stdout.split())  # a narrow table breaks words over lines
    assert "failed" in listed
    jobs = desk.run("jobs", "list", "--json").stdout
    assert (good in jobs, bad in jobs, "step_failed" in jobs) == (True, True, True)
    shown = desk.run("jobs", "show", good).stdout
    assert ("make" in shown, "shipped" in shown) == (True, True)
    assert desk.run("logs", good).stdout == "making\nshipped\n"
    assert desk.run("jobs", "logs", good, "--stderr").stdout == "warned\n"
    over = desk.run("jobs", "cancel", good, code=1)
    assert "was over already" in over.stdout
    answer = json.loads(desk.run("jobs", "show", bad, "--json").stdout)
    assert (answer["status"], answer["steps"][0]["exit_code"]) == ("failed", 3)
    assert desk.run("jobs", "show", "task_nothing", code=2).stderr.startswith("not_found:")


def test_a_service_prints_where_it_is(desk: Desk) -> None:
    """Watching a service prints the address of each port; the address works; its log is followed as it comes."""
    started = desk.tool(
        "run_service",
        skill_name="hello",
        session_id="w",
        workdir="session",
        command="echo hi > index.html; echo ready; exec python3 -m http.server 8000",
        ready={"pattern": "^ready"},
        expose_ports=[8000],
    )["task_id"]
    log = desk.folder / "watched"
    with log.open("wb") as sink:
        watching = subprocess.Popen([KDSKILLS, "jobs", "watch", started], env=desk.env, cwd=ROOT, stdout=sink)
    desk.workers.append(watching)
    text = desk.until(log.read_text, lambda seen: "port 8000 is at http://127.0.0.1:" in seen and "ready\n" in seen)
    url = text.partition("port 8000 is at ")[2].split()[0]
    assert desk.until(lambda: _try(url), bool) == b"hi\n"
    assert desk.run("jobs", "cancel", started).stdout.strip() == f"{started}: canceled"
    assert watching.wait(LONG) == 1
    assert f"{started}: canceled" in log.read_text()


def _try(url: str) -> bytes:
    """Read a page, or nothing while nobody answers: a pattern says ready before the port is open."""
    try:
        return fetch(url)
    except OSError:
        return b""


def test_hostile_output_does_not_reach_the_terminal(desk: Desk) -> None:
    """Escape sequences of a program are shown as text by watch, list and show; logs into a file are byte-exact."""
    command = ["printf", "\\033]0;owned\\007\\033[2J<<\\000\\377>>\\n"]
    task = desk.tool("run_cmd_async", skill_name="hello", command=command)["task_id"]
    seen = (
        desk.run("jobs", "watch", task).stdout + desk.run("jobs", "show", task).stdout + desk.run("jobs", "list").stdout
    )
    assert ("\x1b" in seen, "\x07" in seen, "<<" in seen) == (False, False, True)
    raw = subprocess.run(
        [KDSKILLS, "logs", task], env=desk.env, cwd=ROOT, capture_output=True, check=True, timeout=LONG
    )
    assert raw.stdout == b"\x1b]0;owned\x07\x1b[2J<<\x00\xff>>\n"


def test_a_query_runs_at_the_command_line(desk: Desk) -> None:
    """A user, who may run commands, asks by one how something stands."""
    query = {"provider": "cmd", "query_command": "echo asked", "skill_name": "hello"}
    answer = json.loads(desk.run("tool", "skills.task_status", "--json", json.dumps(query)).stdout)
    assert (answer["provider"], answer["task_id"], answer["query"]["stdout"]) == ("cmd", None, "asked\n")


def test_arguments_out_of_shape_exit_with_usage(desk: Desk) -> None:
    """What is no JSON, no object, no operation or no argument is one clear error in JSON, and exit code 2."""
    for words, code in (
        (("skills.run_cmd", "--json", "{"), "bad_request"),
        (("skills.run_cmd", "--json", "[]"), "bad_request"),
        (("skills.run_cmd", "--json", '{"skill_name": "hello"}'), "bad_request"),
        (("skills.nothing",), "unknown_operation"),
        (("skills.run_cmd", "--json", '{"skill_name": "nope", "command": "true"}'), "unknown_skill"),
        (("skills.task_status", "--json", '{"task_id": "task_nothing"}'), "not_found"),
    ):
        done = desk.run("tool", *words, code=2)
        assert json.loads(done.stdout)["error"]["code"] == code
    assert "skills.run_cmd" in desk.run("tool").stdout

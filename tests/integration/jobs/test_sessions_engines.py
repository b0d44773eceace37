"""Sessions on every engine: files, folders, programs and content come back as they were left."""

import os
import signal

import pytest

from kdskills.execution import Limits
from kdskills.jobs import shim
from kdskills.jobs.model import ServiceSpec

ENGINES = [
    pytest.param("bubblewrap", marks=pytest.mark.needs("bubblewrap")),
    pytest.param("docker", marks=pytest.mark.needs("docker")),
    pytest.param("landlock", marks=pytest.mark.needs("landlock")),
    pytest.param("srt", marks=pytest.mark.needs("srt")),
    "subprocess",
]
MAKE = r"""
printf '#!/bin/sh\necho ran "$@"\n' > run.sh; chmod +x run.sh
mkdir -p deep/er; printf 'a\0b\377' > deep/er/bytes; : > empty; printf 'x' > 'odd name $HOME'
ln -s /etc/passwd link; ln -s . loop; mkfifo pipe
"""
USE = r"""./run.sh again; od -An -c deep/er/bytes; ls -A; rm -r deep; echo more >> run.sh"""


@pytest.mark.parametrize("engine", ENGINES)
async def test_files_of_a_session_come_back(make_lab, generous, tmp_path, engine):
    """Programs stay executable, bytes stay bytes, what was removed is gone; links and pipes never come back."""
    lab = make_lab(engine, generous)
    more = {"session": "s", "unsafe": True}
    first, made = await lab.run(MAKE, task=f"make-{tmp_path.name}", **more)
    assert made.status == "ok", (made, first.logs("stderr").data, lab.log(first))
    assert {error.path: error.code for error in made.output_errors} == {
        "link": "link",
        "loop": "link",
        "pipe": "not_regular",
    }
    second, used = await lab.run(USE, task=f"use-{tmp_path.name}", **more)
    assert (used.status, used.output_errors) == ("ok", ()), (used, second.logs("stderr").data)
    words = second.logs("stdout").data.decode()
    assert words.splitlines()[0] == "ran again"
    assert words.split()[2:6] == ["a", "\\0", "b", "377"]
    assert sorted(words.splitlines()[2:]) == ["deep", "empty", "odd name $HOME", "run.sh"]
    third, _ = await lab.run("ls -A; tail -n 1 run.sh", task=f"look-{tmp_path.name}", **more)
    assert third.logs("stdout").data == b"empty\nodd name $HOME\nrun.sh\nmore\n"


@pytest.mark.needs("bubblewrap")
async def test_session_of_many_files_comes_back(lab):
    """Hundreds of files go in and out, whatever the program's own limit of open files is."""
    _, made = await lab.run("for i in $(seq 900); do echo $i > f$i; done", session="s", limits=Limits(nofile=64))
    assert (made.status, made.output_errors) == ("ok", ())
    attempt, _ = await lab.run("ls | wc -l; cat f900", session="s", limits=Limits(nofile=64))
    assert attempt.logs("stdout").data == b"900\n900\n"


@pytest.mark.needs("bubblewrap")
async def test_session_that_is_full_says_so(lab):
    """What a session cannot keep is named, and what it kept before stays."""
    await lab.run("echo old > a", session="s")
    order = lab.order("echo new > a; echo 1 > b; echo 2 > c", session="s").model_copy(update={"session_files": 2})
    verdict = await (await lab.attempts.start(order)).wait()
    assert [(error.path, error.code) for error in verdict.output_errors] == [("c", "session_full")]
    attempt, _ = await lab.run("cat a b; ls", session="s")
    assert attempt.logs("stdout").data == b"new\n1\na\nb\n"


@pytest.mark.needs("bubblewrap")
async def test_sparse_file_does_not_fill_the_host(lab):
    """A file of holes larger than a session may be is named, not copied out."""
    _, verdict = await lab.run(
        "truncate -s 60M one; truncate -s 60M two; echo x > small", session="s", limits=Limits(work_size=32 << 20)
    )
    assert {error.code for error in verdict.output_errors} <= {"too_large", "session_full"}
    assert len(verdict.output_errors) >= 1
    attempt, _ = await lab.run("cat small", session="s")
    assert attempt.logs("stdout").data == b"x\n"


@pytest.mark.needs("bubblewrap")
async def test_killed_command_leaves_the_session_as_it_was(lab):
    """What a command that died with its shim had changed is not half there: it is not there at all."""
    await lab.run("echo before > a", session="s")
    attempt = await lab.attempts.start(lab.order("echo half > a; echo done; sleep 600", session="s"))
    await lab.until(lambda: attempt.logs("stdout").total)
    facts, pid = await attempt.until_running(), shim.read_identity(attempt.folder)["pid"]
    for victim, number in ((pid, signal.SIGSTOP), (facts.runner.pid, signal.SIGKILL), (pid, signal.SIGKILL)):
        os.kill(victim, number)
    assert (await attempt.wait()).status == "lost"
    after, _ = await lab.run("cat a", session="s")
    assert after.logs("stdout").data == b"before\n"


@pytest.mark.needs("bubblewrap")
async def test_timeout_keeps_the_sessions_files(lab):
    """A command that ran out of time leaves what it had written."""
    _, verdict = await lab.run("echo partial > a; sleep 600", session="s", timeout_s=6.0)
    assert verdict.status == "timeout"
    attempt, _ = await lab.run("cat a", session="s")
    assert attempt.logs("stdout").data == b"partial\n"


@pytest.mark.needs("bubblewrap")
async def test_two_writers_on_one_session_lose_nothing(lab):
    """Commands that overlap all the same keep each other's files, whichever ends last."""
    await lab.run("echo 0 > shared", session="s")
    scripts = [f"echo {name} > {name}; sleep 0.{name}; echo {name} >> {name}" for name in "1234"]
    attempts = [await lab.attempts.start(lab.order(script, session="s")) for script in scripts]
    assert [(await attempt.wait()).status for attempt in attempts] == ["ok"] * 4
    after, _ = await lab.run("cat 1 2 3 4 shared", session="s")
    assert after.logs("stdout").data.split() == b"1 1 2 2 3 3 4 4 0".split()


@pytest.mark.needs("bubblewrap")
async def test_service_of_a_session_takes_nothing_back(lab):
    """A service that began before a command and ends after it does not undo what the command wrote."""
    await lab.run("echo old > a", session="s")
    service = await lab.attempts.start(
        lab.order("echo log > mine; echo up; sleep 600", session="s", service=ServiceSpec())
    )
    await lab.until(lambda: service.logs("stdout").total)
    await lab.run("echo new > a", session="s")
    service.cancel()
    assert (await service.wait()).status == "cancelled"
    after, _ = await lab.run("cat a mine", session="s")
    assert after.logs("stdout").data == b"new\nlog\n"

"""What children take over from this process: whether it hears of their end, and its limits."""

import resource
import signal

import pytest

from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor
from kdskills.builtin.executors.landlock import LandlockExecutor
from kdskills.builtin.executors.srt import SrtExecutor
from kdskills.builtin.executors.subprocess import SubprocessExecutor
from kdskills.errors import ExecRefused
from kdskills.execution.owner import process_start
from kdskills.execution.processes import require_endings, within_own_limits
from kdskills.execution.protocol import ExecutionOptions
from kdskills.execution.request import ExecRequest


@pytest.fixture
def ignoring(monkeypatch):
    """A process that ignores SIGCHLD, as far as it can tell; the real one goes on hearing of its children."""
    real = signal.getsignal
    seen = {signal.SIGCHLD: signal.SIG_IGN}
    monkeypatch.setattr(signal, "getsignal", lambda number: seen.get(number) or real(number))


def test_by_default_nothing_is_refused():
    """Only an ignored SIGCHLD matters."""
    assert signal.getsignal(signal.SIGCHLD) != signal.SIG_IGN
    require_endings("any")


@pytest.mark.parametrize(
    "engine",
    [BubblewrapExecutor, LandlockExecutor, SrtExecutor, SubprocessExecutor],
    ids=["bubblewrap", "landlock", "srt", "subprocess"],
)
async def test_every_engine_of_this_host_refuses(ignoring, tmp_path, engine):
    """A failed program would look like one that succeeded; the refusal says what to do."""
    made = engine(ExecutionOptions(state_dir=tmp_path, cache_dir=tmp_path, allow_unisolated=True))
    profile = "unsafe-local" if made.name == "subprocess" else "default"
    with pytest.raises(ExecRefused, match="SIGCHLD") as caught:
        await made.run(ExecRequest(argv=("true",), profile=profile))
    assert (caught.value.who, caught.value.details["engine"]) == ("operator", made.name)
    assert "env --default-signal=CHLD" in caught.value.message


@pytest.mark.parametrize(
    ("most", "asked", "kept"),
    [
        (resource.RLIM_INFINITY, (10, 11), (10, 11)),
        (100, (10, 11), (10, 11)),
        (11, (10, 11), (10, 11)),
        (10, (10, 11), (10, 10)),
        (5, (10, 11), (5, 5)),
        (0, (0, 0), (0, 0)),
    ],
)
@pytest.mark.parametrize("name", ["core", "nofile", "fsize", "cpu", "as", "nproc"])
def test_no_bound_is_wider_than_our_own(monkeypatch, name, most, asked, kept):
    """A child cannot have more than we may have; what it asked for below that it gets."""
    wanted = getattr(resource, f"RLIMIT_{name.upper()}")
    monkeypatch.setattr(resource, "getrlimit", lambda number: (0, most) if number == wanted else None)
    assert within_own_limits({name: asked}) == {name: kept}


async def test_a_program_that_cannot_be_bounded_does_not_go_on(monkeypatch, tmp_path):
    """Whatever fails between its start and its watching ends it, and leaves no folder."""
    engine = SubprocessExecutor(ExecutionOptions(state_dir=tmp_path, cache_dir=tmp_path, allow_unisolated=True))
    started = []

    def refuse(pid, *_):
        started.append(pid)
        raise PermissionError("no")

    monkeypatch.setattr(resource, "prlimit", refuse)
    for request in ({"argv": ("sleep", "600")}, {"code": "import time; time.sleep(600)"}):
        with pytest.raises(PermissionError):
            await engine.run(ExecRequest(profile="unsafe-local", **request))
    assert [process_start(pid) for pid in started] == [None, None]
    assert list((tmp_path / "local-runs").iterdir()) == []

"""Where the kernel throws away how programs end, none is run (spec execution §5)."""

import signal

import pytest

from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor
from kdskills.builtin.executors.landlock import LandlockExecutor
from kdskills.builtin.executors.srt import SrtExecutor
from kdskills.builtin.executors.subprocess import SubprocessExecutor
from kdskills.errors import ExecRefused
from kdskills.execution.children import require_endings
from kdskills.execution.options import ExecutionOptions
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

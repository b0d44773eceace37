"""Choosing an engine: refuse, never degrade."""

from dataclasses import dataclass, field

import pytest

from kdskills.errors import ExecRefused
from kdskills.execution.protocol import ProbeCheck, ProbeReport
from kdskills.execution.request import ExecRequest, IsolationLevel
from kdskills.execution.run import choose, require_consent


@dataclass
class Fake:
    """An engine that only answers its probe."""

    name: str
    level: IsolationLevel
    ok: bool = True
    probes: list[str] = field(default_factory=list)

    async def probe(self):
        """Answer as told."""
        self.probes.append(self.name)
        check = ProbeCheck("canary", self.ok, "as told")
        return ProbeReport(
            self.name, self.level, ok=self.ok, checks=(check,), cure=None if self.ok else f"mend {self.name}"
        )


BWRAP, DOCKER = ("bubblewrap", IsolationLevel.NAMESPACE), ("docker", IsolationLevel.CONTAINER)
LANDLOCK, BARE = ("landlock", IsolationLevel.LANDLOCK), ("subprocess", IsolationLevel.NONE)


async def test_auto_takes_the_first_that_works():
    """The order is bubblewrap, docker, landlock, whatever the order of registration."""
    engines = [Fake(*LANDLOCK), Fake(*DOCKER), Fake(*BWRAP)]
    assert (await choose(engines)).name == "bubblewrap"
    assert [engine.probes for engine in engines] == [[], [], ["bubblewrap"]]


async def test_auto_goes_on_when_a_probe_fails():
    """A failing probe is passed over, a working engine taken."""
    assert (await choose([Fake(*BWRAP, ok=False), Fake(*DOCKER)])).name == "docker"
    assert (await choose([Fake(*BWRAP, ok=False), Fake(*LANDLOCK)])).name == "landlock"


async def test_nothing_fits_lists_every_probe_and_its_cure():
    """The refusal tells the operator what would mend each engine."""
    with pytest.raises(ExecRefused) as caught:
        await choose([Fake(*BWRAP, ok=False), Fake(*DOCKER, ok=False), Fake(*BARE)], allow_unisolated=True)
    assert caught.value.code == "engine_unavailable"
    assert [probe["cure"] for probe in caught.value.details["probes"]] == ["mend bubblewrap", "mend docker"]
    assert "mend docker" in caught.value.message


async def test_auto_never_takes_the_bare_engine():
    """Falling back to no isolation does not happen."""
    bare = Fake(*BARE)
    with pytest.raises(ExecRefused):
        await choose([bare], allow_unisolated=True)
    assert bare.probes == []


async def test_the_least_level_counts():
    """An engine below the wanted level is not taken, by name neither."""
    assert (await choose([Fake(*BWRAP), Fake(*DOCKER)], min_isolation=IsolationLevel.CONTAINER)).name == "docker"
    with pytest.raises(ExecRefused) as caught:
        await choose([Fake(*BWRAP)], "bubblewrap", min_isolation=IsolationLevel.VM)
    assert caught.value.code == "isolation_too_weak"
    with pytest.raises(ExecRefused):
        await choose([Fake(*LANDLOCK)], min_isolation=IsolationLevel.CONTAINER)


async def test_names():
    """A named engine is probed too; an unknown name says which there are."""
    with pytest.raises(ExecRefused, match="there are: docker"):
        await choose([Fake(*DOCKER)], "dokcer")
    with pytest.raises(ExecRefused, match="mend docker"):
        await choose([Fake(*DOCKER, ok=False)], "docker")


async def test_the_bare_engine_needs_the_operator():
    """Without the operator's setting its name alone is refused."""
    with pytest.raises(ExecRefused) as caught:
        await choose([Fake(*BARE)], "subprocess")
    assert caught.value.code == "policy_denied"
    assert (await choose([Fake(*BARE)], "subprocess", allow_unisolated=True)).name == "subprocess"


@pytest.mark.parametrize(
    ("allowed", "profile", "good"), [(True, "unsafe-local", True), (True, None, False), (False, "unsafe-local", False)]
)
def test_consent_is_double(allowed, profile, good):
    """Operator and call must both say it."""
    request = ExecRequest(argv=("true",), profile=profile)
    if good:
        require_consent(Fake(*BARE), request, allow_unisolated=allowed)
        return
    with pytest.raises(ExecRefused) as caught:
        require_consent(Fake(*BARE), request, allow_unisolated=allowed)
    assert caught.value.code == "policy_denied"


def test_walled_engines_need_no_consent():
    """The double opt-in is about engines of level NONE only."""
    require_consent(Fake(*BWRAP), ExecRequest(argv=("true",)), allow_unisolated=False)

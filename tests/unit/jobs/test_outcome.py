"""What a verdict means for a head, whoever writes it."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.jobs.attempts import AttemptFacts, Verdict
from kdskills.jobs.model import TERMINAL, Command, Placement, Scope, ServiceSpec, TaskHead, TaskSpec
from kdskills.jobs.records import ending, observed

NOW = datetime.now(UTC)
STATUSES = ["ok", "nonzero", "timeout", "cancelled", "refused", "infra_error", "limit", "startup_timeout", "lost"]


def head(*, asked=False, restart=None, restarts=0, started_at=None):
    """Return the head of a task that runs."""
    spec = TaskSpec(
        scope=Scope(),
        session_id=None,
        command=Command(argv=("true",)),
        placement=Placement(engine="e", skill_name="x", version_hash="0"),
        mode="batch" if restart is None else "service",
        service=None if restart is None else ServiceSpec(restart=restart),
    )
    return TaskHead(
        id="t",
        spec=spec,
        status="running",
        mode=spec.mode,
        session_key="k",
        created_at=NOW,
        attempt=1,
        restarts=restarts,
        started_at=started_at,
        cancel_at=NOW if asked else None,
    )


@pytest.mark.parametrize("asked", [False, True], ids=["left-alone", "asked-to-end"])
@pytest.mark.parametrize("status", STATUSES)
def test_what_a_verdict_means(status, asked):
    """Code 0 succeeded; a cancel counts where it ended the program, or nothing else did; everything else failed."""
    by_itself = status in ("nonzero", "timeout", "limit", "startup_timeout")
    expected = (
        "succeeded"
        if status == "ok"
        else "canceled"
        if status == "cancelled" or (asked and not by_itself)
        else "failed"
    )
    assert ending(head(asked=asked), Verdict(status=status))[0] == expected


@pytest.mark.parametrize(("restarts", "end"), [(0, "canceled"), (1, "failed")])
def test_a_service_with_restarts_left_was_ended_by_its_cancel(restarts, end):
    """Without the cancel it would have gone on; with none left it failed by itself."""
    assert ending(head(asked=True, restart=1, restarts=restarts), Verdict(status="nonzero"))[0] == end


@given(
    status=st.sampled_from(STATUSES),
    code=st.none() | st.integers(0, 255),
    words=st.none() | st.text(max_size=3000),
    asked=st.booleans(),
    finished=st.just(0.0) | st.floats(1.0, 4e9),
)
def test_every_verdict_is_an_end(status, code, words, asked, finished):
    """Whatever a verdict says, the head is terminal, has an end in time, and words any database takes."""
    to, values = ending(
        head(asked=asked), Verdict(status=status, exit_code=code, error_message=words, finished_at=finished)
    )
    assert to in TERMINAL
    assert values["finished_at"] > 0
    assert values["exit_code"] == code
    assert "\0" not in (values["error_message"] or "")
    assert len(values["error_message"] or "") <= 2000
    assert to != "succeeded" or values["error_code"] is None
    assert to != "canceled" or values["error_code"] == "canceled"


def test_the_first_start_stays():
    """A head that has a start keeps it; one that has none takes what it hears of first."""
    facts = AttemptFacts(started_at=7.0, engine="e")
    assert observed(head(), facts) == {"started_at": 7_000_000}
    assert observed(head(started_at=NOW), facts) == observed(head(), None) == {}
    assert ending(head(), Verdict(status="ok", started_at=7.0))[1]["started_at"] == 7_000_000
    assert "started_at" not in ending(head(started_at=NOW), Verdict(status="ok", started_at=7.0))[1]


def test_what_was_never_ready_says_nothing():
    """No facts, or none of readiness, change no column; addresses come with readiness only."""
    endpoint = {"port": 1, "host_port": 2, "url": "u"}
    assert (
        observed(head(started_at=NOW), None)
        == observed(head(started_at=NOW), AttemptFacts(started_at=1.0, engine="e", endpoints=(endpoint,)))
        == {}
    )
    ready = observed(
        head(started_at=NOW), AttemptFacts(started_at=1.0, ready_at=2.0, engine="e", endpoints=(endpoint,))
    )
    assert ready["ready_at"] == 2_000_000
    assert '"host_port":2' in ready["endpoints"]
    assert observed(head(started_at=NOW), AttemptFacts(started_at=1.0, ready_at=2.0, engine="e")) == {
        "ready_at": 2_000_000
    }

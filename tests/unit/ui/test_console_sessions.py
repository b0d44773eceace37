"""Sessions of the console: as long as they say, as many as there may be, and proved by what only their forms know."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.doors.ui import sessions as module
from kdskills.doors.ui.sessions import LIFE_S, MAX_SESSIONS, ConsoleSessions


class Clock:
    """A clock that is set."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """A clock that stands."""
    return Clock()


def test_a_session_lasts_twelve_hours_however_much_it_is_used(clock):
    """It is there to the last second, and using it makes it no longer."""
    sessions = ConsoleSessions(clock)
    opened = sessions.open("kd1")
    assert LIFE_S == 12 * 3600
    for _ in range(11):
        clock.now += 3600
        assert sessions.get(opened.key) is opened
    clock.now = 1000 + LIFE_S - 0.001
    assert sessions.get(opened.key) is opened
    clock.now = 1000 + LIFE_S
    assert sessions.get(opened.key) is None


def test_ended_sessions_are_forgotten_when_another_one_is_opened(clock):
    """What is over takes no memory for ever, and what is not over stays."""
    sessions = ConsoleSessions(clock)
    for _ in range(100):
        sessions.open(None)
    clock.now += LIFE_S / 2
    half = sessions.open(None)
    clock.now += LIFE_S / 2
    last = sessions.open(None)
    assert list(sessions._sessions) == [half.key, last.key]


def test_sessions_are_bounded_and_the_oldest_goes(clock):
    """Whoever asks again and again without a cookie takes the memory of so many sessions, and no more."""
    sessions = ConsoleSessions(clock)
    first, second = sessions.open(None), sessions.open(None)
    for _ in range(MAX_SESSIONS - 1):
        sessions.open(None)
    assert len(sessions._sessions) == MAX_SESSIONS
    assert sessions.get(first.key) is None
    assert sessions.get(second.key) is second


def test_closing_ends_a_session_at_once_and_twice_is_fine(clock):
    """A cookie that somebody kept opens nothing after the sign-out; others are not touched."""
    sessions = ConsoleSessions(clock)
    gone, other = sessions.open("a"), sessions.open("b")
    sessions.close(gone)
    sessions.close(gone)
    assert sessions.get(gone.key) is None
    assert sessions.get(other.key) is other


def test_keys_and_proofs_are_long_and_never_alike(clock):
    """Nobody guesses a cookie or what a form sends, and neither tells the other or the token."""
    sessions = ConsoleSessions(clock)
    opened = [sessions.open("the-token") for _ in range(200)]
    words = {each.key for each in opened} | {each.csrf for each in opened}
    assert len(words) == 400
    assert all(len(each.key) >= 43 and len(each.csrf) >= 32 for each in opened)
    assert not any("the-token" in word for word in words)


@given(st.one_of(st.none(), st.text(), st.binary(), st.integers()))
def test_nothing_else_proves(text):
    """Whatever is sent instead, halves of pairs and values of other kinds among it, proves nothing and breaks nothing."""
    session = ConsoleSessions(Clock()).open(None)
    assert not session.proves(text)
    assert session.proves(session.csrf)


def test_halves_of_pairs_prove_nothing():
    """A codec that makes halves of pairs makes no error here."""
    session = ConsoleSessions(Clock()).open(None)
    assert not session.proves("\ud800" + session.csrf)


def test_proofs_are_compared_in_constant_time(monkeypatch):
    """The comparison that tells no length of what was right is the one that decides."""
    asked = []

    real = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        asked.append((one, other))
        return real(one, other)

    session = ConsoleSessions(Clock()).open(None)
    monkeypatch.setattr(module.hmac, "compare_digest", compare)
    session.proves("x")
    assert asked == [(b"x", session.csrf.encode())]


@pytest.mark.parametrize("key", [None, "", "x", "\ud800", "kd" * 5000])
def test_no_other_cookie_is_a_session(clock, key):
    """An unknown cookie is no session, whatever it holds."""
    sessions = ConsoleSessions(clock)
    sessions.open(None)
    assert sessions.get(key) is None


def test_a_notice_is_told_once(clock):
    """A page that is loaded again does not say again what was done."""
    session = ConsoleSessions(clock).open(None)
    session.notice = "It is started."
    assert (session.take_notice(), session.take_notice()) == ("It is started.", "")

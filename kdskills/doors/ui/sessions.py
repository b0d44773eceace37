"""Who looks at the console: sessions behind a cookie of their own, which is not the token they were opened with."""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

COOKIE: Final = "kdskills_console"
LIFE_S: Final = 12 * 3600
"""Seconds a session lasts, however much it is used."""
MAX_SESSIONS: Final = 10_000
"""Sessions there may be at one time; the oldest goes when another one is opened."""


@dataclass
class ConsoleSession:
    """One browser that is signed in.

    Attributes:
        key: What the cookie holds.
        token: Public id of the token it was opened with, which is asked for again at each request; None for callers who
            need none here.
        until: Moment at which it ends, on the clock of `ConsoleSessions`.
        csrf: What every form of this session sends along.
        notice: What the next page tells, once.
    """

    key: str
    token: str | None
    until: float
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    notice: str = ""

    def proves(self, text: object) -> bool:
        """Whether *text* is what a form of this session sends along."""
        return isinstance(text, str) and hmac.compare_digest(text.encode("utf-8", "surrogatepass"), self.csrf.encode())

    def take_notice(self) -> str:
        """Return what is to be told, which is told once."""
        notice, self.notice = self.notice, ""
        return notice


class ConsoleSessions:
    """The sessions of one process, in memory: a service that starts again has its people sign in again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: OrderedDict[str, ConsoleSession] = OrderedDict()  # the oldest first: all of them last as long

    def open(self, token: str | None) -> ConsoleSession:
        """Begin a session for who showed the token of this public id, or for who needs none."""
        now = self._clock()
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            if oldest.until > now and len(self._sessions) < MAX_SESSIONS:
                break
            del self._sessions[oldest.key]
        session = ConsoleSession(secrets.token_urlsafe(32), token, now + LIFE_S)
        self._sessions[session.key] = session
        return session

    def get(self, key: str | None) -> ConsoleSession | None:
        """Return the session whose cookie this is; None where there is none any more."""
        session = self._sessions.get(key or "")
        return session if session is not None and session.until > self._clock() else None

    def close(self, session: ConsoleSession) -> None:
        """End a session."""
        self._sessions.pop(session.key, None)

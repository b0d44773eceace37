"""Limits of a token in this process: requests in a minute, and work at once."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kdskills.app.identity import Identity
from kdskills.errors import CallerMustAct

MAX_BUCKETS: Final = 10_000


class RateLimited(CallerMustAct):
    """More requests than the token allows; `details["retry_after"]` is in seconds."""

    code = "rate_limited"


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_at: float


class RequestLimits:
    """Counts requests by token: a bucket that fills at the allowed rate and holds a minute's worth.

    Args:
        per_minute: Requests a token may make in a minute that has no limit of its own; 0 for no limit.
        clock: Monotonic seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = float(per_minute)
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def count(self, identity: Identity) -> None:
        """Count one request.

        Raises:
            RateLimited: The bucket is empty; nothing is counted then.
        """
        token_limit = identity.limits.requests_per_minute
        size = self._size if token_limit is None else float(token_limit)
        if not size:
            return
        now, rate = self._clock(), size / 60
        key = identity.token or f"{identity.project}/{identity.agent}"
        bucket = self._buckets.setdefault(key, _Bucket(size, now))
        self._buckets.move_to_end(key)
        while len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)
        bucket.tokens = min(size, bucket.tokens + (now - bucket.filled_at) * rate)
        bucket.filled_at = now
        if bucket.tokens < 1:
            wait = max(1, round((1 - bucket.tokens) / rate + 0.5))
            raise RateLimited(f"more requests than this token allows: wait {wait} s", retry_after=wait)
        bucket.tokens -= 1

"""Who calls and how often, where the service may listen without a token, and which names and web pages it answers to."""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kdskills.app.identity import OPEN_SCOPES, Identity
from kdskills.errors import CallerMustAct, CallRefused, OperatorMustAct

if TYPE_CHECKING:
    from kdskills.app.wiring import Storage


IDENTITY: Final = "kdskills.identity"
"""Where the scope of a request has who calls."""
Authenticate = Callable[[str | None], Awaitable[Identity]]
"""Takes the Authorization header, None for a caller without one, and returns who calls, or raises."""


class Unauthenticated(CallerMustAct, code="unauthenticated"):
    """No token, or one that is not known, expired or revoked."""


class ListenRefused(OperatorMustAct, code="listen_refused"):
    """The service must not, or cannot, listen there."""


def address(listen: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, or `[HOST]:PORT`. Raises ListenRefused."""
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ListenRefused(f"{listen!r} is no HOST:PORT")
    return host, int(port)


def _address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def on_loopback(host: str) -> bool:
    """Whether only this machine reaches *host*."""
    ip = _address_of(host)
    return host == "localhost" if ip is None else ip.is_loopback


async def of_header(storage: Storage, header: str | None, *, open_on_loopback: bool) -> Identity:
    """Return who a header says calls, for doors without a project in their path. Raises Unauthenticated."""
    scheme, _, token = (header or "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        caller = await storage.tokens.authenticate(token.strip())
        if caller is not None:
            return caller
        raise Unauthenticated("this token is not known")
    if open_on_loopback and header is None:
        return Identity(scopes=OPEN_SCOPES)
    raise Unauthenticated("send a token: Authorization: Bearer …")


PORTS: Final = {"http": 80, "https": 443}
LAST_PORT: Final = 65535
ORIGIN: Final = re.compile(r"(https?)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{0,5}))?")
"""Scheme, host and port in lower case, and nothing else; browsers send names of other scripts as `xn--…`."""
EVERYWHERE: Final = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - what is listened on, compared with and never bound


def answered_names(listen: str, names: Iterable[str]) -> frozenset[str]:
    """Return the names a service is called by, whose pages may call it; loopback and addresses are known by themselves.

    The address that is listened on is none of them: a page of another port there is another program's. *names* are
    those of the setting `host_names`.
    """
    listened = () if _plain(listen) == "localhost" or _address_of(_plain(listen)) is not None else (listen,)
    return frozenset(_plain(name) for name in (*listened, *names)) - EVERYWHERE


def require_own_origin(scope: Mapping[str, Any], names: Collection[str]) -> None:
    """Refuse a request, as ASGI has it, for another host than *names* or of another site's page.

    Raises CallRefused: `host_refused` when the header Host is missing, doubled or names another host; `origin_refused`
    when a page of another origin sent it.
    """
    hosts = _values(scope, b"host")
    host = _authority(f"http://{hosts[0]}") if len(hosts) == 1 else None
    server = scope.get("server")  # the address the connection came in at is a name of ours, too
    own = set(names) if server is None else {*names, _plain(str(server[0]))}
    if host is None or not (host[0] in own or on_loopback(host[0])):
        message = "this service is not called by that name: the operator adds it to the setting host_names"
        raise CallRefused(message, code="host_refused")
    for origin in _values(scope, b"origin"):
        page = _authority(origin)
        # the Host header names no scheme: it is read as a page of this origin would mean it
        meant = _authority(f"{origin.partition('://')[0]}://{hosts[0]}")
        if page is None or not (page == meant or page[0] in names):
            raise CallRefused("a page of another origin may not call this service", code="origin_refused")
    if "cross-site" in _values(scope, b"sec-fetch-site"):
        raise CallRefused("a page of another site may not call this service", code="origin_refused")


def _values(scope: Mapping[str, Any], name: bytes) -> list[str]:
    return [value.decode("latin-1").strip().lower() for key, value in scope["headers"] if key.lower() == name]


def _plain(name: str) -> str:
    return name.lower().removeprefix("[").removesuffix("]").removesuffix(".")


def _authority(url: str) -> tuple[str, int] | None:
    """Return host and port of an origin; None for what is none, such as `null`."""
    parts = ORIGIN.fullmatch(url)
    if parts is None:
        return None
    scheme, host, port = parts.groups()
    number = int(port) if port else PORTS[scheme]
    return (_plain(host), number) if number <= LAST_PORT else None


MAX_BUCKETS: Final = 10_000


class RateLimited(CallerMustAct, code="rate_limited"):
    """More requests than the token allows; `details["retry_after"]` is in seconds."""


class RequestLimits:
    """Counts requests by token: a bucket that fills at the allowed rate and holds a minute's worth.

    `per_minute` is for tokens without a limit of their own, 0 for no limit; `clock` gives monotonic seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = float(per_minute)
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # what is left in it and when; the last used stands last

    def count(self, identity: Identity) -> None:
        """Count one request. Raises RateLimited when the bucket is empty; nothing is counted then."""
        token_limit = identity.limits.requests_per_minute
        size = self._size if token_limit is None else float(token_limit)
        if not size:
            return
        now, rate = self._clock(), size / 60
        key = identity.token or f"{identity.project}/{identity.agent}"
        left, filled_at = self._buckets.pop(key, (size, now))
        left = min(size, left + (now - filled_at) * rate)
        self._buckets[key] = (left - 1 if left >= 1 else left, now)
        while len(self._buckets) > MAX_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
        if left < 1:
            wait = max(1, round((1 - left) / rate + 0.5))
            raise RateLimited(f"more requests than this token allows: wait {wait} s", retry_after=wait)

"""Who calls, by a token, and where the service may listen without one; for every door on a network."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from kdskills.app.identity import OPEN_SCOPES, Identity
from kdskills.errors import CallerMustAct, OperatorMustAct

if TYPE_CHECKING:
    from kdskills.app.host import Host


class Unauthenticated(CallerMustAct):
    """No token, or one that is not known, expired or revoked."""

    code = "unauthenticated"


class ListenRefused(OperatorMustAct):
    """The service must not, or cannot, listen there."""

    code = "listen_refused"


def address(listen: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, or `[HOST]:PORT`.

    Raises:
        ListenRefused: It is neither.
    """
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ListenRefused(f"{listen!r} is no HOST:PORT")
    return host, int(port)


def on_loopback(host: str) -> bool:
    """Whether only this machine reaches *host*."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def of_header(host: Host, header: str | None, *, open_on_loopback: bool) -> Identity:
    """Return who an Authorization header says calls; for doors that are mounted and have no project in their path.

    Raises:
        Unauthenticated: There is no token, or it is not known.
    """
    scheme, _, token = (header or "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        caller: Identity | None = await host.tokens.authenticate(token.strip())
        if caller is not None:
            return caller
        raise Unauthenticated("this token is not known")
    if open_on_loopback and header is None:
        return Identity(scopes=OPEN_SCOPES)
    raise Unauthenticated("send a token: Authorization: Bearer …")

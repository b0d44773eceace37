"""URIs of MCP roots: where a server is, and the label that names it everywhere."""

from __future__ import annotations

import ipaddress
import re
import shlex
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from kdskills.errors import BadRequest

SCHEMES: Final = ("mcp+https://", "mcp+http://", "mcp+stdio:")
LABEL: Final = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
DYNAMIC: Final = "allow_dynamic"


@dataclass(frozen=True, slots=True)
class McpAddress:
    """A server: `url` or `command`, and the label the operator gave it."""

    label: str
    url: str | None = None
    command: tuple[str, ...] = ()
    allow_dynamic: bool = False


def parse_address(uri: str) -> McpAddress:
    """Read `mcp+https://…#label`, `mcp+http://…#label` on loopback or `mcp+stdio:program args#label`.

    `#label;allow_dynamic` also takes skills whose server does not say what files they have.

    Raises:
        BadRequest: It is none of these.
    """
    target, _, fragment = uri.partition("#")
    label, _, option = fragment.partition(";")
    if not LABEL.fullmatch(label) or len(label) > 32:
        raise _bad(uri, "end it with #label: up to 32 lower-case letters and digits, with single hyphens between")
    if option not in {"", DYNAMIC}:
        raise _bad(uri, f"the only option behind the label is {DYNAMIC}")
    dynamic = option == DYNAMIC
    if target.startswith("mcp+stdio:"):
        try:
            command = tuple(shlex.split(unquote(target.removeprefix("mcp+stdio:"))))
        except ValueError as error:
            raise _bad(uri, f"the command cannot be read: {error}") from error
        if not command or "\0" in "".join(command):
            raise _bad(uri, "it names no program")
        return McpAddress(label, command=command, allow_dynamic=dynamic)
    url = target.removeprefix("mcp+")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise _bad(uri, f"the address cannot be read: {error}") from error
    if not host or parts.username is not None or parts.password is not None:
        raise _bad(uri, "it must name a host, without a user or password")
    if parts.scheme == "http" and not _loopback(host):
        raise _bad(uri, "plain http is for servers on loopback; use mcp+https")
    return McpAddress(label, url=url, allow_dynamic=dynamic)


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bad(uri: str, problem: str) -> BadRequest:
    masked_uri = re.sub(r"//[^/@#]*@", "//***@", uri)
    return BadRequest(f"{masked_uri!r} is no address of an MCP root: {problem}", code="mcp_root_invalid")

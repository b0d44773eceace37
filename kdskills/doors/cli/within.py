"""Running something with the Host a command line was started with."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeVar

import typer

from kdskills.app.identity import LOCAL
from kdskills.app.operations.table import Context, Emit
from kdskills.doors.cli.output import one_line
from kdskills.errors import BundleError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kdskills.app import Host

T = TypeVar("T")

AT_CLI: Final = replace(LOCAL, door="cli")


class HostSource:
    """What the commands of one command line share: the Host, made when one of them first needs it.

    Args:
        host: A Host that is there already; none reads the settings and plugins of this machine.
    """

    def __init__(self, host: Host | None = None) -> None:
        self._given = host

    @cached_property
    def host(self) -> Host:
        """The Host. Raises as making one does."""
        if self._given is not None:
            return self._given
        from kdskills.app import Host  # help and completion must not cost what a Host imports

        return Host()


def split(text: str) -> tuple[str, ...]:
    """Return the values of an option that holds several, separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def host_of(ctx: typer.Context) -> Host:
    """Return the Host the command line was started with. Raises as making one does."""
    source = ctx.find_object(HostSource)
    if source is not None:
        return source.host
    from kdskills.app import Host

    host = ctx.find_object(Host)
    if host is None:
        raise RuntimeError("commands run below `build_cli`, which says what Host they have")
    return host


def run(ctx: typer.Context, do: Callable[[Host], Awaitable[T]]) -> T:
    """Do something with the Host, and close what background work opened for it."""
    import asyncio

    async def do_and_close() -> T:
        host = host_of(ctx)
        try:
            return await do(host)
        finally:
            if "work" in vars(host):  # else nothing was opened, and asking would open it
                await host.work.aclose()

    return asyncio.run(do_and_close())


async def ask(
    host: Host, operation: str, arguments: Mapping[str, Any], emit: Emit | None = None, *, trust: bool = False
) -> BaseModel:
    """Run an operation by name as the account at the command line."""
    return await host.invoke(operation, arguments, Context(identity=AT_CLI, emit=emit, trust=trust))


def trusting(do: Callable[[bool], T], *, trust: bool, asks: bool) -> T:
    """Do something that may need code of a bundle; where nobody trusts it yet, ask the person at a terminal once.

    Args:
        do: Is told whether the bundle is trusted.
        trust: Whether it is from the start.
        asks: Whether the person may be asked.

    Raises:
        BundleError: `bundle_untrusted`: nobody can be asked, or the person said no.
    """
    try:
        return do(trust)
    except BundleError as error:
        if error.code != "bundle_untrusted" or not (asks and sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        typer.echo(one_line(error.message), err=True)
        if not typer.confirm("Run it this time?", err=True):
            raise BundleError("its code was not run, as you said", code=error.code, who="user") from None
    return do(True)

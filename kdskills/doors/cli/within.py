"""Running something with the Host a command line was started with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

import typer
from pydantic import BaseModel

from kdskills.app import Host
from kdskills.app.identity import LOCAL
from kdskills.app.operations.table import Context, Emit

T = TypeVar("T")

AT_CLI: Final = replace(LOCAL, door="cli")


def host_of(ctx: typer.Context) -> Host:
    """Return the Host the command line was started with."""
    found = ctx.find_object(Host)
    if found is None:
        raise RuntimeError("commands run below `build_cli`, which sets the Host")
    return found


def run(ctx: typer.Context, do: Callable[[Host], Awaitable[T]]) -> T:
    """Do something with the Host, and close what background work opened for it."""

    async def whole() -> T:
        host = host_of(ctx)
        try:
            return await do(host)
        finally:
            await host.work.aclose()

    return asyncio.run(whole())


async def ask(host: Host, operation: str, arguments: Mapping[str, Any], emit: Emit | None = None) -> BaseModel:
    """Run an operation by name as the account at the command line."""
    return await host.invoke(operation, arguments, Context(identity=AT_CLI, emit=emit))

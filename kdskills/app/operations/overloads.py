"""`call` and `run` of a Host; the stub beside this module, made by `.ci/reference`, tells their answers by operation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kdskills.app.operations.table import Context
from kdskills.errors import BadRequest

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kdskills.app.operations.table import Emit


class OperationCalls:
    """Runs operations by name, with arguments by keyword."""

    async def invoke(self, operation: str, arguments: Mapping[str, Any], context: Context) -> BaseModel:
        """Run an operation by name for the caller *context* names."""
        raise NotImplementedError  # a Host runs them: this class only gives the calls their types

    async def call(self, operation: str, *, emit: Emit | None = None, **arguments: Any) -> BaseModel:
        """Run an operation by name as the local account; as `invoke`, with arguments by keyword."""
        return await self.invoke(operation, arguments, Context(emit=emit))

    def run(self, operation: str, **arguments: Any) -> BaseModel:
        """Run an operation from code without an event loop; as `call`.

        Raises:
            BadRequest: `sync_in_loop` where an event loop runs: await `call` there.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.invoke(operation, arguments, Context()))
        raise BadRequest("this thread runs an event loop: await Host.call instead of Host.run", code="sync_in_loop")

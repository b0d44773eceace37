"""One change of one thread's catalog, by each strategy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kdskills.remote.catalog import rollout
from kdskills.remote.catalog.digest import flat_tools, tools_digest, wire_tools
from kdskills.remote.catalog.reload import Reload
from kdskills.remote.catalog.reports import NotApplied
from kdskills.remote.lint import DISPATCHER_TOOL, check_name, check_neighbours
from kdskills.remote.ports import AppServerError, JsonObject, ServerProfile

if TYPE_CHECKING:
    from kdskills.remote.client.server import AppServer

_CARRIED = ("cwd", "model", "modelProvider")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a change.

    Attributes:
        changed: Whether anything had to be changed.
        materialized_now: Whether the rollout file was written for this change.
        new_session_id: The thread that replaced the old one, or None.
    """

    changed: bool = True
    materialized_now: bool = False
    new_session_id: str | None = None


def lint(tools: Sequence[JsonObject], profile: ServerProfile) -> None:
    """Refuse a catalog with an entry the server would refuse, drop or shadow.

    Raises:
        CatalogError: With rule and suggestion.
    """
    checked_names: list[tuple[str | None, str]] = []
    for tool in tools:
        namespace, name = tool.get("namespace"), str(tool.get("name"))
        check_name(namespace, name, profile, defer_loading=bool(tool.get("deferLoading")))
        check_neighbours(namespace, name, checked_names)
        checked_names.append((namespace, name))


class Changes:
    """Carries out changes of catalogs.

    Args:
        server: The server.
        profile: What the probe proved of the server.
        bootstrap: Makes the server write a thread's rollout file, by a turn that is rolled back.
    """

    def __init__(
        self, server: AppServer, profile: ServerProfile, *, bootstrap: Callable[[str], Awaitable[None]]
    ) -> None:
        self._server = server
        self._profile = profile
        self._bootstrap = bootstrap

    async def make(self, strategy: str, session_id: str, tools: Sequence[JsonObject]) -> Outcome:
        """Change the catalog by one strategy.

        Raises:
            NotApplied: The old catalog stays in force.
        """
        if strategy == "native":
            return await self._native(session_id, tools)
        if strategy == "reload":
            reload = Reload(self._server, self._profile, session_id, tools, bootstrap=self._bootstrap)
            changed = await reload.run()
            return Outcome(changed, reload.materialized_now)
        if strategy == "successor":
            return await self._successor(session_id, tools)
        return Outcome()  # the dispatcher's catalog is what the next message carries

    async def holds_other(self, session_id: str, digest: str) -> bool:
        """Return whether a thread's file holds another catalog than the one of this digest."""
        if not self._profile.namespaces:
            return False  # names are flattened there, so the file's digest is another one anyway
        tools = await self._filed_tools(session_id)
        return tools is not None and tools_digest(flat_tools(tools)) != digest

    async def has_dispatcher(self, session_id: str) -> bool:
        """Return whether a thread without a stored record was started with the dispatcher's tool."""
        tools = await self._filed_tools(session_id) or []
        return any(tool.get("name") == DISPATCHER_TOOL for tool in tools)

    async def _filed_tools(self, session_id: str) -> list[JsonObject] | None:
        """Return the wire tools in a thread's rollout file, perhaps none; None when the file cannot be read."""
        if not self._server.local:
            return None
        try:
            path = (await self._server.describe(session_id)).get("path")
            head = await asyncio.to_thread(rollout.read_head, Path(str(path or "")), session_id)
        except (AppServerError, rollout.UnknownFormat):
            return None
        tools = head.tools
        return [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []

    async def _native(self, session_id: str, tools: Sequence[JsonObject]) -> Outcome:
        wire = wire_tools(tools, namespaces=self._profile.namespaces)
        try:
            await self._server.resume(session_id, dynamicTools=wire)
        except AppServerError as problem:
            raise NotApplied("rejected", str(problem.details.get("server_message") or problem)) from problem
        return Outcome()

    async def _successor(self, session_id: str, tools: Sequence[JsonObject]) -> Outcome:
        wire = wire_tools(tools, namespaces=self._profile.namespaces)
        try:
            old = await self._server.describe(session_id)
            if not self._server.local:
                raise NotApplied("not_local")
            path = Path(str(old.get("path") or ""))
            items = await asyncio.to_thread(rollout.response_items, path)
            params = {key: old[key] for key in _CARRIED if old.get(key)}
            answer = await self._server.request(
                "thread/start",
                **params,
                dynamicTools=wire,
                approvalPolicy="never",
                sandbox="read-only",
                config={"thread_unload_delay_secs": 0},
            )
            thread = self._server.threads.learn(answer["thread"], subscribed=True)
            if items:
                await self._server.request("thread/inject_items", threadId=thread.id, items=items)
        except AppServerError as problem:
            raise NotApplied("rejected", str(problem.details.get("server_message") or problem)) from problem
        return Outcome(new_session_id=thread.id)

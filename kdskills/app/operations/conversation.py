"""The four runtime tools as operations, each within a session of the caller over the skills of its project.

Beside them what was said in sessions of solvers, of the store that the settings name: listed, read, exported, forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, StringConstraints

from kdskills.app.operations.models import Input, Output, PageInput, PageOutput, decode_cursor, encode_cursor
from kdskills.app.work import scope_of
from kdskills.errors import BadRequest, ExecRefused, NotFound, SessionError
from kdskills.session import SkillRuntime
from kdskills.session.conversations import ConversationStore, UndoableConversations
from kdskills.session.core import CallOrder, store_errors
from kdskills.session.scope import NO_TURN, TurnScope
from kdskills.session.store import MemoryStore
from kdskills.session.tools import LoadInput, ReadInput, RunScriptInput, UnloadInput
from kdskills.storage.database import utc_now

if TYPE_CHECKING:
    from kdskills.app.identity import Identity
    from kdskills.app.operations.table import Context
    from kdskills.app.settings import Settings
    from kdskills.app.wiring import HostWiring
    from kdskills.projects.views import ProjectSkills
    from kdskills.session import SessionStore
    from kdskills.session.conversations import Conversation
    from kdskills.turn import SkillsSubsystem

ANONYMOUS = "anonymous"
"""Consumer of callers without an agent: no rule of a descriptor names it, so it sees what everybody may."""

SessionId = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9._:-]{1,128}$"),
    Field(description="The caller's name for the conversation; the first use opens it."),
]


class LoadCall(LoadInput):
    """Arguments of `skills.load`."""

    session_id: SessionId = "main"


class UnloadCall(UnloadInput):
    """Arguments of `skills.unload`."""

    session_id: SessionId = "main"


class ReadCall(ReadInput):
    """Arguments of `skills.read`; the rules of paths answer NUL in one with `path_denied`."""

    MAY_HOLD_NUL: ClassVar[tuple[str, ...]] = ("/path",)

    session_id: SessionId = "main"


class RunCall(RunScriptInput):
    """Arguments of `skills.run_script`; the rules of paths answer NUL in one with `path_denied`."""

    MAY_HOLD_NUL: ClassVar[tuple[str, ...]] = ("/path",)

    session_id: SessionId = "main"


class LoadedSkillText(Output):
    """The instructions of a loaded skill."""

    name: str
    body: str


class ToolAnswer(Output):
    """What a runtime tool answered.

    `result` is the tool's own JSON object; `instructions` are the texts of skills that are loaded now, for `skills.load`.
    """

    result: dict[str, Any]
    instructions: tuple[LoadedSkillText, ...] = ()


@dataclass(eq=False)
class Conversations:
    """Sessions by caller. What one caller calls `main` is another session than anybody else's `main`.

    `skills_of` gives the skills of a project, `open_store` opens a store of sessions by its URL.
    """

    settings: Settings
    wiring: HostWiring
    skills_of: Callable[[str], Awaitable[ProjectSkills]]
    open_store: Callable[[str], SessionStore]
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _order: CallOrder = field(default_factory=CallOrder)
    _runtimes: dict[str, tuple[SkillsSubsystem, SkillRuntime]] = field(default_factory=dict)
    _store: SessionStore | None = None

    @asynccontextmanager
    async def opened(
        self, identity: Identity, session_id: str, *, changes: bool = False, scripts: bool = False
    ) -> AsyncIterator[tuple[SkillRuntime, str, TurnScope]]:
        """Give what `open` returns to one call, behind the loads and unloads of the session that came before it."""
        key = scope_of(identity).session_key(session_id)
        async with self._order.after_changes(key, changes=changes):
            yield await self.open(identity, session_id, scripts=scripts)

    async def open(
        self, identity: Identity, session_id: str, *, scripts: bool = False
    ) -> tuple[SkillRuntime, str, TurnScope]:
        """Return the runtime of the caller's project, the key of the session there, and the caller's view as it is now.

        The session is made by its first use. Raises ExecRefused when *scripts* are to be run and no engine works.
        """
        project_skills = await self.skills_of(identity.project)
        async with self._lock:
            entry = self._runtimes.get(identity.project)
            if entry is None or entry[0] is not project_skills.subsystem:
                entry = (project_skills.subsystem, await self._runtime(project_skills.subsystem))
                self._runtimes[identity.project] = entry
        runtime = entry[1]
        if scripts and not runtime.config.run_scripts:
            await self.wiring.executor()  # says what is wrong and what cures it
            self._runtimes.pop(identity.project, None)  # nothing is wrong any more
            return await self.open(identity, session_id)
        key = scope_of(identity).session_key(session_id)
        try:
            await runtime.get_session(key)
        except SessionError:
            try:
                await runtime.create_session(key, consumer=identity.consumer or ANONYMOUS)
            except SessionError as error:  # somebody else's first use came between
                if error.code != "session_exists":
                    raise
        if identity.held_tools is None:
            return runtime, key, NO_TURN
        view = project_skills.subsystem.view(identity.consumer or ANONYMOUS, identity.held_tools)
        return runtime, key, TurnScope(view=view)

    async def store(self) -> SessionStore:
        """Return the store of sessions, opened once. Raises StoreUnavailable."""
        if self._store is None:
            url = self.settings.session_store
            self._store = MemoryStore() if url is None else await asyncio.to_thread(self.open_store, url)
        return self._store

    async def dialogues(self) -> ConversationStore:
        """Return what keeps what was said. Raises BadRequest, `session_store_missing`, when nothing here does."""
        store = self._store if self.settings.session_store is None else await self.store()
        conversations = getattr(store, "conversations", None)
        if not isinstance(conversations, ConversationStore):
            message = "conversations are in the memory of the program that has them: set `session_store` to keep them"
            raise BadRequest(message, code="session_store_missing")
        return conversations

    async def _runtime(self, subsystem: SkillsSubsystem) -> SkillRuntime:
        """Return a runtime over *subsystem*; without a working engine it has no scripts, and `run_script` asks again."""
        try:
            executor = await self.wiring.executor()
        except ExecRefused:
            executor = None
        return SkillRuntime(
            subsystem=subsystem,
            executor=executor,
            run_scripts=executor is not None,
            interpreters=self.wiring.interpreters,
            locations="logical",
            body_in="result",
            store=await self.store(),
            deny=self.wiring.deny,
            network=self.settings.network,
            packages=self.wiring.packages(subsystem),
        )


async def load(conversations: Conversations, arguments: LoadCall, context: Context) -> ToolAnswer:
    """Load skills and return their instructions."""
    by, session = context.identity.starter, conversations.opened(context.identity, arguments.session_id, changes=True)
    async with session as (runtime, key, scope):
        receipt = await runtime.load(key, arguments.names, arguments.mode, by=by, scope=scope)
    return ToolAnswer.of(result=receipt.to_json(), instructions=receipt.bodies)


async def unload(conversations: Conversations, arguments: UnloadCall, context: Context) -> ToolAnswer:
    """Unload skills."""
    async with conversations.opened(context.identity, arguments.session_id, changes=True) as (runtime, key, scope):
        receipt = await runtime.unload(key, scope=scope, **arguments.model_dump(exclude={"session_id"}))
    return ToolAnswer(result=receipt.to_json())


async def read(conversations: Conversations, arguments: ReadCall, context: Context) -> ToolAnswer:
    """Read a file of a loaded skill."""
    async with conversations.opened(context.identity, arguments.session_id) as (runtime, key, scope):
        piece = await runtime.read(key, scope=scope, **arguments.model_dump(exclude={"session_id"}))
    return ToolAnswer(result=piece.to_json())


async def run_script(conversations: Conversations, arguments: RunCall, context: Context) -> ToolAnswer:
    """Run a script of a loaded skill."""
    session = conversations.opened(context.identity, arguments.session_id, scripts=True)
    async with session as (runtime, key, scope):
        result = await runtime.run_script(key, scope=scope, **arguments.model_dump(exclude={"session_id"}))
    return ToolAnswer(result=result.to_json())


class ConversationRow(Output):
    """A conversation; `number` counts its turns."""

    conversation_id: str
    consumer: str
    user: str | None
    number: int
    created_at: datetime
    touched_at: datetime


class ConversationsOut(PageOutput):
    """Conversations, by id."""

    conversations: tuple[ConversationRow, ...]


class ConversationListInput(PageInput):
    """Which conversations."""

    user: str | None = Field(None, max_length=200, description="Id of a user whose conversations are meant; none: all.")


class ConversationInput(Input):
    """Which conversation."""

    id: SessionId = Field(description="Id of the session it was said in.")


class ConversationTurnOut(Output):
    """A turn as its reader saw it; `calls` counts its tool calls, `cost` is in US dollars, null where it is not known."""

    turn_id: str
    ended_at: datetime
    status: str
    request: str
    answer: str
    calls: int
    files: tuple[str, ...]
    input_tokens: int
    output_tokens: int
    cost: float | None = None


class ConversationOut(ConversationRow):
    """A conversation with its turns, and the sources that numbers in its answers mean."""

    turns: tuple[ConversationTurnOut, ...]
    sources: tuple[dict[str, Any], ...]


class ConversationExport(Output):
    """A whole conversation as JSON: every message, tool calls and their results among them."""

    conversation: dict[str, Any]


class UndoneTurn(ConversationRow):
    """What is left of a conversation, and the request of the turn that was taken back."""

    request: str


class ForgetConversations(Input):
    """What to forget: exactly one of these."""

    id: SessionId | None = Field(None, description="Id of one conversation.")
    user: str | None = Field(
        None, min_length=1, max_length=200, description="Id of a user: all that was said with them."
    )
    idle_days: float | None = Field(None, ge=0, le=36_500, description="Days since the last turn ended.")


class ForgottenConversations(Output):
    """How many conversations were deleted."""

    deleted: int


async def list_conversations(conversations: Conversations, arguments: ConversationListInput) -> ConversationsOut:
    """List conversations."""
    store, after = await conversations.dialogues(), None
    if arguments.cursor is not None:
        (after,) = decode_cursor(arguments.cursor, str)
    with store_errors():
        heads = await store.page(user=arguments.user, after=after, limit=arguments.limit + 1)
    page = heads[: arguments.limit]
    following = encode_cursor(page[-1].conversation_id) if len(heads) > len(page) else None
    return ConversationsOut(conversations=tuple(map(ConversationRow.of, page)), next_cursor=following)


async def _conversation(conversations: Conversations, conversation_id: str) -> Conversation:
    store = await conversations.dialogues()
    with store_errors():
        conversation = await store.get(conversation_id)
    if conversation is None:
        message = f"there is no conversation {conversation_id!r}"
        raise NotFound(message, code="conversation_not_found", conversation_id=conversation_id)
    return conversation


async def get_conversation(conversations: Conversations, arguments: ConversationInput) -> ConversationOut:
    """Show what was asked and answered."""
    conversation = await _conversation(conversations, arguments.id)
    turns = []
    for turn in conversation.turns:
        calls = sum(len(message.calls) for message in turn.messages)
        tokens = {"input_tokens": turn.usage.input, "output_tokens": turn.usage.output}
        turns.append(ConversationTurnOut.of(turn, calls=calls, **tokens))
    sources = tuple(row.to_json() for row in conversation.pool)
    return ConversationOut.of(conversation.head, turns=tuple(turns), sources=sources)


async def export_conversation(conversations: Conversations, arguments: ConversationInput) -> ConversationExport:
    """Give every message of a conversation."""
    conversation = await _conversation(conversations, arguments.id)
    return ConversationExport(conversation=conversation.to_json())


async def undo(conversations: Conversations, arguments: ConversationInput) -> UndoneTurn:
    """Take back the last turn."""
    conversation, store = await _conversation(conversations, arguments.id), await conversations.dialogues()
    if not isinstance(store, UndoableConversations):
        raise BadRequest("the store of these conversations takes no turn back", code="undo_unsupported")
    with store_errors():
        shorter = await store.take_back(conversation)
    return UndoneTurn.of(shorter.head, request=conversation.turns[-1].request)


async def delete_conversations(conversations: Conversations, arguments: ForgetConversations) -> ForgottenConversations:
    """Forget one conversation, those of a user, or those nobody went on with."""
    store, chosen = await conversations.dialogues(), arguments.model_dump(exclude_none=True)
    if len(chosen) != 1:  # nothing at all must never mean everything
        problem = "give exactly one of id, user and idle_days"
        raise BadRequest(problem, errors=[{"path": "", "problem": problem}])
    with store_errors():
        if arguments.id is not None:
            deleted = int(await store.delete(arguments.id))
        elif arguments.user is not None:
            deleted = await store.erase(arguments.user)
        else:
            deleted = await store.purge(utc_now() - timedelta(days=chosen["idle_days"]))
    return ForgottenConversations(deleted=deleted)

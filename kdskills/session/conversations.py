"""What was said in a conversation, turn by turn, with the sources its numbers mean, and where it is kept.

Values are frozen. A conversation only grows, by one whole turn at a time; a store takes the turn of one writer and refuses
that of another who began at the same point.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, Final, Protocol, runtime_checkable

from kdskills.errors import CallerMustAct
from kdskills.models import Message, ToolCall, Usage
from kdskills.sources import SourcesPool

MEMORY_CONVERSATIONS: Final = 1_024
"""How many conversations stay in memory; the one unused longest goes first."""


class ConversationBusy(CallerMustAct, code="conversation_busy"):
    """Another turn of the conversation ended first, or it was deleted meanwhile; nothing of this turn was added."""


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """One turn as later ones read it: its messages in order, secrets masked, and the paths of the files it left.

    `request` is among the messages, which may say more before it. Images that tools showed are not in it.
    """

    turn_id: str
    ended_at: datetime
    status: str
    request: str
    messages: tuple[Message, ...]
    usage: Usage = field(default_factory=Usage)
    files: tuple[str, ...] = ()

    @property
    def answer(self) -> str:
        """The last text that the model wrote, or `""`."""
        return next((each.text for each in reversed(self.messages) if each.role == "assistant" and each.text), "")

    def to_json(self) -> dict[str, Any]:
        """Return the turn as JSON."""
        rows = [{**asdict(each), "calls": [*map(asdict, each.calls)]} for each in self.messages]
        for row in rows:
            del row["images"]
        facts = {"ended_at": self.ended_at.isoformat(), "messages": rows, "files": list(self.files)}
        return {**asdict(replace(self, messages=())), **facts}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ConversationTurn:
        """Return the turn written by `to_json`; what was not is a KeyError, TypeError or ValueError."""
        facts = {
            "ended_at": datetime.fromisoformat(value["ended_at"]),
            "messages": tuple(map(_message, value["messages"])),
            "usage": Usage(**value["usage"]),
            "files": tuple(value["files"]),
        }
        return cls(**{**value, **facts})


def _message(row: Mapping[str, Any]) -> Message:
    return Message(**{**row, "calls": tuple(ToolCall(**call) for call in row["calls"])})


@dataclass(frozen=True, slots=True)
class ConversationHead:
    """A conversation in a listing; `number` counts its turns, `user` is the id of whom it is with, if anybody was named."""

    conversation_id: str
    consumer: str
    user: str | None
    number: int
    created_at: datetime
    touched_at: datetime


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as a store keeps it: `pool` holds the source of every number its answers cite."""

    head: ConversationHead
    pool: SourcesPool = field(default_factory=SourcesPool)
    turns: tuple[ConversationTurn, ...] = ()

    @classmethod
    def begin(cls, conversation_id: str, consumer: str, user: str | None, now: datetime) -> Conversation:
        """Return a conversation without a turn."""
        return cls(ConversationHead(conversation_id, consumer, user, 0, now, now))

    def following(self, turn: ConversationTurn, pool: SourcesPool) -> Conversation:
        """Return the conversation with one more turn."""
        head = replace(self.head, number=self.head.number + 1, touched_at=turn.ended_at)
        return replace(self, head=head, pool=pool, turns=(*self.turns, turn))

    def messages(self) -> tuple[Message, ...]:
        """Return what was said so far; it is the beginning of what any later turn says."""
        return tuple(message for turn in self.turns for message in turn.messages)

    def to_json(self) -> dict[str, Any]:
        """Return the conversation as JSON."""
        moments = {name: getattr(self.head, name).isoformat() for name in ("created_at", "touched_at")}
        turns = [turn.to_json() for turn in self.turns]
        return {**asdict(self.head), **moments, "pool": self.pool.to_json(), "turns": turns}


@runtime_checkable
class ConversationStore(Protocol):
    """Keeps conversations. `kdskills.testing.conversations` checks any implementation.

    Methods may be called from any thread or loop; a store that does not answer raises StoreUnavailable or OSError.
    """

    async def get(self, conversation_id: str) -> Conversation | None:
        """Return the conversation, or None."""

    async def add(self, conversation: Conversation) -> None:
        """Keep the last turn of *conversation* and its pool, both or neither, if the turns before it are what is kept.

        Raises ConversationBusy otherwise.
        """

    async def delete(self, conversation_id: str) -> bool:
        """Forget the conversation; False for an unknown id."""

    async def page(self, *, user: str | None, after: str | None, limit: int) -> list[ConversationHead]:
        """Return up to *limit* heads sorted by id, those after *after*, of *user* or of all."""

    async def purge(self, idle_before: datetime) -> int:
        """Forget every conversation whose last turn ended before *idle_before*; return how many."""

    async def erase(self, user: str) -> int:
        """Forget every conversation of *user*; return how many."""


def conversations_of(store: object) -> ConversationStore:
    """Return what keeps conversations beside the sessions of *store*: its `conversations`, or memory where it has none."""
    conversations = getattr(store, "conversations", None)
    return conversations if isinstance(conversations, ConversationStore) else MemoryConversations()


def busy(conversation: Conversation) -> ConversationBusy:
    """Return the error of who comes second."""
    conversation_id = conversation.head.conversation_id
    message = f"another turn of conversation {conversation_id!r} ended first: read it again and say it once more"
    return ConversationBusy(message, conversation_id=conversation_id)


class MemoryConversations:
    """Keeps up to 1,024 conversations in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._conversations: dict[str, Conversation] = {}  # the one unused longest first

    async def get(self, conversation_id: str) -> Conversation | None:
        """Return the conversation, or None."""
        with self._lock:
            conversation = self._conversations.pop(conversation_id, None)
            if conversation is not None:
                self._conversations[conversation_id] = conversation
            return conversation

    async def add(self, conversation: Conversation) -> None:
        """Keep the last turn if the others are what is kept; raises ConversationBusy otherwise."""
        head = conversation.head
        with self._lock:
            current = self._conversations.get(head.conversation_id)
            number = 0 if current is None else current.head.number
            created_at = head.created_at if current is None else current.head.created_at
            if (number, created_at) != (head.number - 1, head.created_at):
                raise busy(conversation)
            self._conversations.pop(head.conversation_id, None)
            self._conversations[head.conversation_id] = conversation
            while len(self._conversations) > MEMORY_CONVERSATIONS:
                del self._conversations[next(iter(self._conversations))]

    async def delete(self, conversation_id: str) -> bool:
        """Forget the conversation; False for an unknown id."""
        with self._lock:
            return self._conversations.pop(conversation_id, None) is not None

    async def page(self, *, user: str | None, after: str | None, limit: int) -> list[ConversationHead]:
        """Return up to *limit* heads sorted by id."""
        heads = [head for head in self._heads() if user in {None, head.user}]
        following = [head for head in heads if after is None or head.conversation_id > after]
        return sorted(following, key=lambda head: head.conversation_id)[:limit]

    async def purge(self, idle_before: datetime) -> int:
        """Forget every conversation whose last turn ended before *idle_before*."""
        return self._forget(head for head in self._heads() if head.touched_at < idle_before)

    async def erase(self, user: str) -> int:
        """Forget every conversation of *user*."""
        return self._forget(head for head in self._heads() if head.user == user)

    def _heads(self) -> list[ConversationHead]:
        with self._lock:
            return [conversation.head for conversation in self._conversations.values()]

    def _forget(self, heads: Iterable[ConversationHead]) -> int:
        with self._lock:
            return sum(self._conversations.pop(head.conversation_id, None) is not None for head in heads)

"""What was said in a conversation, turn by turn, with the sources its numbers mean, and where it is kept.

Values are frozen. A conversation only grows, by one whole turn at a time; a store takes the turn of one writer and refuses
that of another who began at the same point.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final, Protocol, runtime_checkable

from kdskills.errors import CallerMustAct
from kdskills.models import Message, ToolCall, Usage
from kdskills.sources import SourcesPool

MEMORY_CONVERSATIONS: Final = 1_024
"""How many conversations stay in memory; the one unused longest goes first."""

MEMORY_TEXT: Final = 64 * 1024 * 1024
"""Characters of messages that stay in memory, all conversations together; the last one that was used always stays."""


class ConversationBusy(CallerMustAct, code="conversation_busy"):
    """Another turn of the conversation is going on or ended first, or it was deleted meanwhile; nothing of this one was added."""


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """One turn as later ones read it: its messages in order, secrets masked, and the paths of the files it left.

    `request` is among the messages, which may say more before it. Images that tools showed are not in it. `cost` is in US
    dollars, None where it is not known.
    """

    turn_id: str
    ended_at: datetime
    status: str
    request: str
    messages: tuple[Message, ...]
    usage: Usage = field(default_factory=Usage)
    files: tuple[str, ...] = ()
    cost: float | None = None

    @property
    def characters(self) -> int:
        """How long its messages are together, arguments of calls among them."""
        return sum(len(each.text) + sum(len(call.arguments) for call in each.calls) for each in self.messages)

    @property
    def answer(self) -> str:
        """The last text that the model wrote, or `""`."""
        return next((each.text for each in reversed(self.messages) if each.role == "assistant" and each.text), "")

    def to_json(self) -> dict[str, Any]:
        """Return the turn as JSON."""
        moment = self.ended_at.isoformat()
        facts = {"ended_at": moment, "messages": _rows(self.messages), "files": list(self.files)}
        return {**asdict(replace(self, messages=())), **facts}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ConversationTurn:
        """Return the turn written by `to_json`; what was not is a KeyError, TypeError or ValueError."""
        facts = {
            "ended_at": datetime.fromisoformat(value["ended_at"]),
            "messages": _messages(value["messages"]),
            "usage": Usage(**value["usage"]),
            "files": tuple(value["files"]),
        }
        return cls(**{**value, **facts})


def _rows(messages: Iterable[Message]) -> list[dict[str, Any]]:
    rows = [{**asdict(each), "calls": [*map(asdict, each.calls)]} for each in messages]
    for row in rows:
        del row["images"]
    return rows


def _messages(rows: Iterable[Mapping[str, Any]]) -> tuple[Message, ...]:
    return tuple(Message(**{**row, "calls": tuple(ToolCall(**call) for call in row["calls"])}) for row in rows)


@dataclass(frozen=True, slots=True)
class TurnSummary:
    """Stands for the first turns of a conversation: their ids, what they said in short, and what must stay as it was said.

    `pinned` holds the calls and results that carry texts of loaded skills.
    """

    turn_ids: tuple[str, ...]
    text: str
    pinned: tuple[Message, ...] = ()

    def messages(self) -> tuple[Message, ...]:
        """Return what a model reads instead of the turns."""
        return (Message("user", f"{SUMMARY_HEAD}\n{self.text}"), *self.pinned)


SUMMARY_HEAD: Final = "What was said before, in short:"


def receipt_of(message: Message) -> Message:
    """Return a result of an earlier turn as one line, where that is shorter; other messages, and pinned ones, as they are."""
    line = f"[result of {message.tool or 'tool'} in an earlier turn left out: {len(message.text)} characters]"
    cut = message.role == "tool" and message.pin is None and len(line) < len(message.text)
    return replace(message, text=line) if cut else message


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
    """A conversation as a store keeps it: `pool` holds the source of every number its answers cite.

    What no longer fits is shown shorter: `summary` stands for the first turns, and of those after it, up to turn number
    `receipts`, results are one line each. `turns` holds all of them as they were.
    """

    head: ConversationHead
    pool: SourcesPool = field(default_factory=SourcesPool)
    turns: tuple[ConversationTurn, ...] = ()
    receipts: int = 0
    summary: TurnSummary | None = None

    @classmethod
    def begin(cls, conversation_id: str, consumer: str, user: str | None, now: datetime) -> Conversation:
        """Return a conversation without a turn."""
        return cls(ConversationHead(conversation_id, consumer, user, 0, now, now))

    def following(self, turn: ConversationTurn, pool: SourcesPool) -> Conversation:
        """Return the conversation with one more turn."""
        head = replace(self.head, number=self.head.number + 1, touched_at=turn.ended_at)
        return replace(self, head=head, pool=pool, turns=(*self.turns, turn))

    def without_last(self) -> Conversation:
        """Return the conversation without its last turn, numbers as they are; no turn that began before fits it."""
        turns, number = self.turns[:-1], self.head.number - 1
        created_at = self.head.created_at + timedelta(microseconds=1)
        touched_at = turns[-1].ended_at if turns else created_at
        head = replace(self.head, number=number, created_at=created_at, touched_at=touched_at)
        summary = self.summary if self.summarised <= number else None
        return replace(self, head=head, turns=turns, receipts=min(self.receipts, number), summary=summary)

    def messages(self) -> tuple[Message, ...]:
        """Return what a model reads of the turns so far; until something is cut, any later turn begins with it."""
        messages = [] if self.summary is None else [*self.summary.messages()]
        for number, turn in enumerate(self.turns[self.summarised :], self.summarised + 1):
            messages += map(receipt_of, turn.messages) if number <= self.receipts else turn.messages
        return tuple(messages)

    @property
    def summarised(self) -> int:
        """How many turns the summary stands for."""
        return 0 if self.summary is None else len(self.summary.turn_ids)

    def state(self) -> dict[str, Any]:
        """Return what a store keeps beside head and turns, as JSON."""
        summary = None
        if self.summary is not None:
            summary = {
                "turn_ids": [*self.summary.turn_ids],
                "text": self.summary.text,
                "pinned": _rows(self.summary.pinned),
            }
        return {"pool": self.pool.to_json(), "receipts": self.receipts, "summary": summary}

    @classmethod
    def of_state(
        cls, head: ConversationHead, state: Mapping[str, Any], turns: Sequence[ConversationTurn]
    ) -> Conversation:
        """Return the conversation of which `state` gave *state*; of another one it is a KeyError, TypeError or ValueError.

        Raises BadRequest for a pool that is none.
        """
        row, summary = state["summary"], None
        if row is not None:
            summary = TurnSummary(tuple(row["turn_ids"]), row["text"], _messages(row["pinned"]))
        return cls(head, SourcesPool.from_json(state["pool"]), tuple(turns), state["receipts"], summary)

    def to_json(self) -> dict[str, Any]:
        """Return the conversation as JSON."""
        moments = {name: getattr(self.head, name).isoformat() for name in ("created_at", "touched_at")}
        return {**asdict(self.head), **moments, **self.state(), "turns": [turn.to_json() for turn in self.turns]}


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


@runtime_checkable
class UndoableConversations(ConversationStore, Protocol):
    """Conversations whose last turn can be taken back, as those of the shipped stores."""

    async def take_back(self, conversation: Conversation) -> Conversation:
        """Forget the last turn of *conversation*, and of its only turn the whole; return what is left.

        Raises ConversationBusy unless *conversation* is what is kept.
        """


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
    """Keeps up to 1,024 conversations, of up to 64 Mi characters in all, in this process."""

    def __init__(self, *, text: int = MEMORY_TEXT) -> None:
        self._text = text
        self._lock = threading.Lock()
        self._conversations: dict[str, Conversation] = {}  # the one unused longest first
        self._sizes: dict[str, int] = {}

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
            before = 0 if head.number == 1 else self._sizes.get(head.conversation_id, 0)
            self._sizes[head.conversation_id] = before + conversation.turns[-1].characters
            self._sizes = {name: self._sizes[name] for name in self._conversations}
            text = sum(self._sizes.values())
            while len(self._conversations) > MEMORY_CONVERSATIONS or (
                text > self._text and len(self._conversations) > 1
            ):
                oldest = next(iter(self._conversations))
                del self._conversations[oldest]
                text -= self._sizes.pop(oldest)

    async def take_back(self, conversation: Conversation) -> Conversation:
        """Forget the last turn if *conversation* is what is kept; raises ConversationBusy otherwise."""
        shorter, conversation_id = conversation.without_last(), conversation.head.conversation_id
        with self._lock:
            current = self._conversations.get(conversation_id)
            if current is None or current.head != conversation.head:
                raise busy(conversation)
            del self._conversations[conversation_id]
            if shorter.turns:
                self._conversations[conversation_id] = shorter
                self._sizes[conversation_id] -= conversation.turns[-1].characters
        return shorter

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

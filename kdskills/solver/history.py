"""What of a conversation a turn begins with, and what it adds when it ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Final, Literal

from kdskills.errors import BadRequest, Diagnostic, KdskillsError, ModelFailed, SessionError
from kdskills.models import Message, Redactor, ToolCall
from kdskills.session.conversations import (
    Conversation,
    ConversationBusy,
    ConversationTurn,
    TurnSummary,
    receipt_of,
)
from kdskills.session.core import store_errors
from kdskills.solver.events import ContextCut, HistoryCut
from kdskills.solver.tools import whole_text
from kdskills.sources import rewrite_citations

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from kdskills.session.conversations import ConversationStore
    from kdskills.solver.events import TurnResult
    from kdskills.solver.turn import Turn

History = Literal["session", "none"] | Sequence[Message]
"""What was said before a request: that of its conversation, nothing, or messages of the caller's own."""

KEEP_TURNS: Final = 2
"""Turns before the one that is going on which are read as they were."""
STEPS: Final = 20
"""Steps that what is read of earlier turns leaves a turn at least, by its bound on tokens."""
SUMMARY_ROLE: Final = "solver.summary"
SUMMARISE: Final = (
    "Sum up the conversation below for whoever goes on with it: what the user wants and prefers, what was found out, decided "
    "and made, with names, numbers and paths, and what is still open. Keep citations such as [[S:1]] beside what they show. "
    "Write plain text, and nothing that was not said."
)
MAX_NAMED: Final = 50
"""Files of an earlier turn that are named to the model."""
TURN_PREFIX: Final = "kdskills-turn-"
_FILES: Final = "Files of the turn before, which react.read gives: {refs}"


def check_history(history: History) -> None:
    """Raise BadRequest for a history that cannot be used; each call in it has one answer, after it."""
    if isinstance(history, str):
        if history not in {"session", "none"}:
            raise _no_history("", "is none of session, none, and a list of messages")
        return
    unanswered: set[str | None] = set()
    for position, message in enumerate(history):
        if not isinstance(message, Message):
            raise _no_history(f"/{position}", f"is no Message but {type(message).__name__}")
        _check_message(message, f"/{position}")
        if message.role == "tool":
            if message.call_id not in unanswered:
                raise _no_history(f"/{position}", "answers no call before it")
            unanswered.remove(message.call_id)
        elif unanswered:
            break
        unanswered |= {call.id for call in message.calls}
    if unanswered:
        raise _no_history("", f"leaves calls without an answer: {', '.join(sorted(map(str, unanswered))[:5])}")


def _check_message(message: Message, path: str) -> None:
    if message.role not in {"user", "assistant", "tool"}:
        raise _no_history(f"{path}/role", "is none of user, assistant and tool")
    if not isinstance(message.text, str):
        raise _no_history(f"{path}/text", "is no text")
    if not all(isinstance(call, ToolCall) for call in message.calls):
        raise _no_history(f"{path}/calls", "holds what is no ToolCall")
    if message.calls and message.role != "assistant":
        raise _no_history(f"{path}/calls", "only an assistant message has calls")


def _no_history(path: str, problem: str) -> BadRequest:
    errors = [{"path": f"/history{path}", "problem": problem}]
    return BadRequest(f"the history cannot be used: {problem}", code="history_invalid", errors=errors)


def own_messages(history: History) -> tuple[Message, ...]:
    """Return messages of the caller's own, without citations: their numbers would mean sources of this turn."""
    messages = () if isinstance(history, str) else history
    return tuple(
        replace(message, text=whole_text(rewrite_citations(message.text, {}).text) if message.text else "")
        for message in messages
    )


_GOING_ON: Final[set[tuple[int, str]]] = set()
_GOING_ON_LOCK: Final = Lock()


@contextmanager
def sole_turn(store: ConversationStore, conversation_id: str | None) -> Iterator[None]:
    """Hold a conversation of *store* for one turn; None is none. Raises ConversationBusy when another turn here holds it."""
    key = (id(store), conversation_id or "")
    if conversation_id is not None:
        with _GOING_ON_LOCK:
            if key in _GOING_ON:
                message = (
                    f"another turn of conversation {conversation_id!r} is going on: wait for its end, and say it then"
                )
                raise ConversationBusy(message, conversation_id=conversation_id)
            _GOING_ON.add(key)
    try:
        yield
    finally:
        if conversation_id is not None:
            _GOING_ON.discard(key)


async def open_conversation(
    store: ConversationStore, conversation_id: str, consumer: str, user: str | None, now: datetime
) -> Conversation:
    """Return the conversation so far. Raises `store_unavailable`, and BadRequest when it is another one's."""
    with store_errors():
        conversation = await store.get(conversation_id)
    if conversation is None:
        return Conversation.begin(conversation_id, consumer, user, now)
    if (conversation.head.consumer, conversation.head.user) != (consumer, user):
        message = f"conversation {conversation_id!r} belongs to another consumer or user"
        raise BadRequest(message, code="conversation_foreign", conversation_id=conversation_id)
    return conversation


async def fit_history(turn: Turn, size: Callable[[Message], int], share: int | None = None) -> None:
    """Cut what *turn* reads of earlier turns to half of its *share* in tokens, when it takes more than that.

    Without one the share is that of the settings: of the window, and of all tokens of a turn, whose every step reads it.

    Results become one line each, oldest first; then a summary stands for all turns but the last two. What was cut goes into
    the conversation with the turn. Texts of loaded skills stay as they are. A summary that fails leaves the turns to what
    shortens each request.
    """
    settings = turn.parts.settings
    if share is None:
        share = min(int(turn.window * settings.history_share), settings.max_total_tokens // STEPS)
    conversation, before = turn.conversation, sum(map(size, turn.history))
    if conversation is None or before <= share:
        return
    last = len(conversation.turns) - KEEP_TURNS
    first = receipts = max(conversation.receipts, conversation.summarised)
    tokens = before
    while receipts < last and tokens > share // 2:
        tokens -= sum(size(each) - size(receipt_of(each)) for each in conversation.turns[receipts].messages)
        receipts += 1
    if tokens < before:
        ids = tuple(each.turn_id for each in conversation.turns[first:receipts])
        conversation = replace(conversation, receipts=receipts)
        _adopt(turn, conversation, ContextCut(kind="receipts", turns=ids, tokens_before=before, tokens_after=tokens))
    if tokens > share and last > conversation.summarised:
        try:
            summary = await _summary(turn, conversation, last, share)
        except ModelFailed as error:
            message = f"earlier turns could not be summarised: {error.code}"
            turn.bus.diagnose(Diagnostic("summary_failed", "warning", message))
            return
        conversation = replace(conversation, summary=summary)
        after = sum(map(size, conversation.messages()))
        cut = ContextCut(kind="summary", turns=summary.turn_ids, tokens_before=tokens, tokens_after=after)
        _adopt(turn, conversation, cut)


def _adopt(turn: Turn, conversation: Conversation, cut: ContextCut) -> None:
    turn.conversation, turn.history = conversation, conversation.messages()
    turn.log.context.append(cut)
    turn.bus.emit(HistoryCut, cut=cut)


async def _summary(turn: Turn, conversation: Conversation, last: int, share: int) -> TurnSummary:
    """Have the first *last* turns summarised, together with the summary there is. Raises ModelFailed, ReplayError."""
    ids = tuple(each.turn_id for each in conversation.turns[:last])
    fresh = [receipt_of(m) for each in conversation.turns[conversation.summarised : last] for m in each.messages]
    old = conversation.summary.messages() if conversation.summary is not None else ()
    pins, messages = await turn.pins(), [*old, *fresh]
    text = "\n".join(f"[{m.role}] {m.text}" for m in messages if m.text and m.pin is None)
    window = turn.parts.window(SUMMARY_ROLE) or turn.window
    room = min(window * 2, share * 4)  # characters, four to a token: half of the window at most
    if len(text) > room:
        text = f"{text[: room // 2]}\n[…]\n{text[-room // 2 :]}"
    reply = await turn.write(SUMMARY_ROLE, SUMMARISE, text)
    if not reply.text.strip():
        raise ModelFailed("the summary is empty", code="summary_empty")
    return TurnSummary(ids, turn.bus.redactor.text(reply.text.strip()), tuple(_pinned(messages, pins)))


def _pinned(messages: Sequence[Message], pins: Collection[str]) -> Iterator[Message]:
    """Yield results with a pin of *pins*, each after the call it answers; of several of one skill the last."""
    calls = {call.id: call for message in messages for call in message.calls}
    results = {m.pin: m for m in messages if m.pin is not None and set(pins) & set(m.pin.split())}
    for message in results.values():
        call = calls.get(message.call_id or "")
        if call is not None:
            yield from (Message("assistant", calls=(call,)), message)


async def add_to_conversation(turn: Turn, result: TurnResult, now: datetime) -> TurnResult:
    """Add what was said in *turn*, and return *result*: as failed, if that could not be done. A failed turn adds nothing."""
    conversation, log = turn.conversation, turn.log
    if conversation is None or not log.messages or result.status == "failed":
        return result
    messages = (*log.messages[:-1], *_end(log.messages[-1], result.text))
    redactor = turn.bus.redactor
    # Texts alone: a mask in an id, a role or a time would make the conversation unreadable.
    masked_messages = tuple(_masked(message, redactor) for message in messages)
    files = tuple(redactor.text(file.path) for file in result.files)
    request = redactor.text(turn.request)
    record = ConversationTurn(turn.id, now, result.status, request, masked_messages, log.usage, files, log.cost)
    try:
        with store_errors():
            await turn.parts.conversations.add(conversation.following(record, turn.pool))
    except KdskillsError as error:
        turn.unsaved = error
    except Exception as error:  # noqa: BLE001 - a store of another's may fail in any way; the answer is not lost with it
        words = f"the conversation could not be stored: {type(error).__name__}"
        turn.unsaved = SessionError(words, code="store_unavailable")
    if turn.unsaved is None:
        return result
    return result.model_copy(update={"status": "failed", "stop_reason": turn.unsaved.code})


def _end(last: Message, answer: str) -> tuple[Message, ...]:
    """Return how the turn ends: with what the user read, which a generator may have written."""
    if not answer.strip() or last.text == answer:
        return (last,)
    reply = Message("assistant", answer)
    return (reply,) if last.role == "assistant" and not last.calls else (last, reply)


def _masked(message: Message, redactor: Redactor) -> Message:
    calls = tuple(replace(call, arguments=redactor.arguments(call.arguments)) for call in message.calls)
    return replace(
        message, text=redactor.text(message.text), calls=calls, images=()
    )  # bytes that nobody can look through for secrets


def earlier_file(turn: Turn, path: str) -> tuple[Path, str] | None:
    """Return the folder of an earlier turn of the conversation and the path in it, when *path* begins with its id.

    None when it does not, or the folder is gone.
    """
    turn_id, _, below = path.partition("/")
    turns = () if turn.conversation is None else turn.conversation.turns
    if not below or all(earlier.turn_id != turn_id for earlier in turns):
        return None
    folder = turn.workspace.root.with_name(f"{TURN_PREFIX}{turn_id}")
    return (folder, below) if folder.is_dir() else None


def files_note(turn: Turn) -> tuple[Message, ...]:
    """Return the message that names the files the turn before left, if they are still there."""
    turns = () if turn.conversation is None else turn.conversation.turns[-1:]
    refs = [f"{last.turn_id}/{path}" for last in turns for path in last.files]
    refs = [f"turn:{ref}" for ref in refs if earlier_file(turn, ref) is not None]
    more = f" and {len(refs) - MAX_NAMED} more" if len(refs) > MAX_NAMED else ""
    return (Message("user", _FILES.format(refs=", ".join(refs[:MAX_NAMED]) + more)),) if refs else ()

"""The emulated app-server's files: one rollout per thread, its first line the thread's own data.

A rollout is JSON lines. The first is `session_meta`; then `response_item` lines are what the model reads, and `event_msg`
lines mark turns. Beside them a small note per thread says which file is its current one, because a revert begins a new file;
the old version also keeps a thread's tools there, so that its first line changes nothing.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from kdskills.testing.app_server_profiles import INTERNAL, EmulatorProfile, JsonObject, RpcError
from kdskills.testing.app_server_tools import shape_fault

ABORTED = "aborted"


@dataclass(slots=True)
class Turn:
    """A turn as history knows it."""

    id: str
    status: str = "inProgress"
    error: JsonObject | None = None
    items: list[JsonObject] = field(default_factory=list)

    def public(self, *, items: bool = True) -> JsonObject:
        """Return the turn as the wire has it."""
        view = {"items": list(self.items) if items else [], "itemsView": "summary" if items else "notLoaded"}
        return {"id": self.id, "status": self.status, "error": self.error, **view}


@dataclass(slots=True)
class Loaded:
    """What a rollout says."""

    tools: list[JsonObject]
    cwd: str
    paged: bool
    history: list[JsonObject]
    turns: list[Turn]


@dataclass(slots=True)
class Note:
    """Where a thread lives; kept in a file of its own."""

    path: str
    name: str | None = None
    archived: bool = False
    tools: list[JsonObject] | None = None


class Files:
    """The home folder of an emulated server."""

    def __init__(self, home: Path, profile: EmulatorProfile) -> None:
        self.home = home
        self.profile = profile
        self._notes = home / "emulator"

    def new_path(self, thread_id: str, suffix: str = "") -> Path:
        """Return where the rollout of a thread goes."""
        now = datetime.now(UTC)
        folder = self.home / "sessions" / now.strftime("%Y") / now.strftime("%m") / now.strftime("%d")
        return folder / f"rollout-{now.strftime('%Y-%m-%dT%H-%M-%S')}-{thread_id}{suffix}.jsonl"

    def note(self, thread_id: str) -> Note | None:
        """Return what is known of a thread that has a file."""
        path = self._notes / f"{thread_id}.json"
        return Note(**json.loads(path.read_text("utf-8"))) if path.exists() else None

    def keep(self, thread_id: str, note: Note) -> None:
        """Keep what is known of a thread."""
        self._notes.mkdir(parents=True, exist_ok=True)
        said = {"path": note.path, "name": note.name, "archived": note.archived, "tools": note.tools}
        (self._notes / f"{thread_id}.json").write_text(json.dumps(said), "utf-8")

    def forget(self, thread_id: str) -> None:
        """Remove a thread's file and note."""
        note = self.note(thread_id)
        if note is not None:
            Path(note.path).unlink(missing_ok=True)
            (self._notes / f"{thread_id}.json").unlink()

    def move(self, thread_id: str, note: Note, *, archived: bool) -> None:
        """Move a rollout into the archive, or out of it."""
        old = Path(note.path)
        folder = self.home / "archived_sessions" if archived else self.new_path(thread_id).parent
        folder.mkdir(parents=True, exist_ok=True)
        old.rename(folder / old.name)
        self.keep(thread_id, Note(str(folder / old.name), note.name, archived, note.tools))

    def meta(self, thread_id: str, cwd: str, tools: Sequence[JsonObject]) -> JsonObject:
        """Return the first line of a rollout."""
        payload: JsonObject = {
            "id": thread_id,
            "timestamp": datetime.now(UTC).isoformat(),
            "cwd": cwd,
            "originator": "kdskills-emulator",
            "cli_version": self.profile.version,
            "base_instructions": {"text": "You are a coding agent."},
            "dynamic_tools": [dict(tool) for tool in tools],
        }
        if self.profile.paged:
            payload |= {"session_id": thread_id, "history_mode": "paginated"}
        return {"timestamp": payload["timestamp"], "ordinal": 0, "type": "session_meta", "payload": payload}

    def read_meta(self, path: Path) -> JsonObject:
        """Return the payload of a rollout's first line.

        Raises:
            RpcError: It cannot be read.
        """
        first = path.read_bytes().partition(b"\n")[0]
        try:
            line = json.loads(first)
        except ValueError as error:
            message = (
                "Failed to initialize session: thread-store internal error: failed to resume local thread recorder"
            )
            said = f"error resuming thread: Fatal error: {message}: failed to parse first rollout record at {path}"
            raise RpcError(said, INTERNAL) from error
        payload = line.get("payload") if isinstance(line, dict) else None
        fault = None if isinstance(payload, dict) and line.get("type") == "session_meta" else "no session metadata"
        tools = payload.get("dynamic_tools") or [] if isinstance(payload, dict) else []
        fault = fault or next((found for found in (shape_fault(tool, self.profile) for tool in tools) if found), None)
        if fault or not isinstance(payload, dict):
            cause = f"thread-store internal error: failed to read session metadata {path}: {fault}"
            raise RpcError(f"failed to read thread: {cause}", INTERNAL)
        return payload

    def load(self, path: Path) -> Loaded:
        """Read a rollout whole: the model's history, and the turns.

        Raises:
            RpcError: Its first line cannot be read.
        """
        payload = self.read_meta(path)
        lines = [json.loads(line) for line in path.read_text("utf-8").split("\n")[1:] if line.strip()]
        replay = Replay()
        for line in lines:
            replay.take(line)
        tools = list(payload.get("dynamic_tools") or [])
        paged = payload.get("history_mode") == "paginated"
        return Loaded(tools, str(payload.get("cwd", "")), paged, replay.finished(), replay.turns)


class Replay:
    """Builds history and turns again from a rollout's lines."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._history: list[tuple[str | None, JsonObject]] = []
        self._turn: Turn | None = None

    def take(self, line: JsonObject) -> None:
        """Take one line in; kinds of lines it does not know are passed over."""
        payload = line.get("payload") or {}
        kind = payload.get("type") if line.get("type") == "event_msg" else line.get("type")
        if kind == "response_item":
            self._history.append((self._turn.id if self._turn else None, payload))
        elif kind == "compacted":
            self._history = [(None, item) for item in payload["replacement"]]
        elif kind == "task_started":
            self._turn = Turn(payload["turn_id"])
            self.turns.append(self._turn)
        elif kind == "item_completed" and self._turn:
            self._turn.items.append(payload["item"])
        elif kind in {"task_complete", "turn_aborted"} and self._turn:
            failed = bool(payload.get("error"))
            self._turn.status = "interrupted" if kind == "turn_aborted" else "failed" if failed else "completed"
            self._turn = None
        elif kind == "thread_rolled_back":
            self._drop(payload["num_turns"])

    def _drop(self, count: int) -> None:
        dropped = {turn.id for turn in self.turns[-count:]}
        self.turns = self.turns[:-count]
        self._history = [(turn, item) for turn, item in self._history if turn not in dropped]

    def finished(self) -> list[JsonObject]:
        """Return the model's history: turns cut short are interrupted, calls without an outcome aborted."""
        for turn in self.turns:
            if turn.status == "inProgress":
                turn.status = "interrupted"
        known = {item.get("call_id") for _, item in self._history if item.get("type") == "function_call_output"}
        history = []
        for _, item in self._history:
            history.append(item)
            if item.get("type") == "function_call" and item.get("call_id") not in known:
                history.append({"type": "function_call_output", "call_id": item.get("call_id"), "output": ABORTED})
        return history


class Rollout:
    """One thread's file: lines are held back until it is materialised, then written at once.

    Args:
        path: Where it goes; None for an ephemeral thread, which never has a file.
        lines: The lines it begins with.
        written: Whether they are in the file already.
    """

    def __init__(self, path: Path | None, lines: Sequence[JsonObject], *, written: bool = False) -> None:
        self.path = path
        self._held = [] if written else list(lines)
        self._written = written

    @property
    def materialized(self) -> bool:
        """Whether the file is there."""
        return self._written

    def add(self, kind: str, payload: JsonObject) -> None:
        """Add a line."""
        self._held.append({"timestamp": datetime.now(UTC).isoformat(), "type": kind, "payload": payload})
        if self._written:
            self.write()

    def write(self) -> None:
        """Write what was held back; from now on every line goes out at once."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in self._held)
        self._held.clear()
        self._written = True


def cut_before(path: Path, turn_id: str) -> list[str]:
    """Return a rollout's lines up to the turn that is reverted.

    Raises:
        RpcError: There is no such turn.
    """
    kept: list[str] = []
    for line in path.read_text("utf-8").split("\n"):
        if line.strip():
            payload = json.loads(line).get("payload") or {}
            if payload.get("type") == "task_started" and payload.get("turn_id") == turn_id:
                return kept
            kept.append(line)
    raise RpcError(f"turn not found: {turn_id}")


def fresh_suffix() -> str:
    """Return what tells the file of a revert from the one before."""
    return f"_{uuid.uuid4()}"

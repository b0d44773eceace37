"""Which sandbox an owner has, and who may use it now: records on disk, leases with fencing tokens.

One record per owner. A lease is held by one run; the next waits. A holder that died, or that held on beyond its time,
loses the lease to the next, whose token is higher. The far side refuses lower tokens, so a holder that comes back late
can do no harm.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from kdskills.execution.dirs import private_dir
from kdskills.execution.owner import is_leftover
from kdskills.execution.request import Owner
from kdskills.execution.stage import locked

POLL_S: Final = 0.02
VERSION: Final = 1


def owner_key(owner: Owner, *further_parts: str) -> str:
    """Return the owner's name in records: a hash over length-prefixed parts, so that no two owners meet."""
    parts = [owner.tenant, owner.project, owner.agent, owner.conversation, *further_parts]
    text = b"".join(len(part.encode()).to_bytes(8, "big") + part.encode("utf-8", "surrogatepass") for part in parts)
    return hashlib.sha256(text).hexdigest()


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of one owner's sandbox.

    Attributes:
        token: Highest fencing token given out.
        sandbox: Id of the sandbox, or None.
        created: When the sandbox was made, by the wall clock.
        used: When it was last used.
        until: When the lease is over, whoever holds it; 0 when nobody does.
        holder: Labels of the process that holds the lease.
    """

    token: int = 0
    sandbox: str | None = None
    created: float = 0.0
    used: float = 0.0
    until: float = 0.0
    holder: Mapping[str, str] = field(default_factory=dict)

    def is_held(self, now: float) -> bool:
        """Whether a living process holds the lease and its time is not over."""
        return self.until > now and not is_leftover(self.holder)

    def expired(self, now: float, idle_s: float, hard_s: float) -> bool:
        """Whether its sandbox is over its idle or its hard time."""
        return now - self.used > idle_s or now - self.created > hard_s


@dataclass(slots=True)
class SandboxLease:
    """The right to use an owner's sandbox, and what is written down of it."""

    key: str
    token: int
    record: Record


class SandboxLeases:
    """The records below one folder, shared by every process of this account.

    Args:
        top: Folder of the records; made when it is not there.
    """

    def __init__(self, top: Path) -> None:
        self._top = top

    def acquire(
        self, key: str, labels: Mapping[str, str], hold_s: float, given_up: threading.Event
    ) -> SandboxLease | None:
        """Wait for the lease of *key* and take it for *hold_s* seconds; None when *given_up* was set first."""
        while not given_up.is_set():
            now = time.time()
            with self._locked(key):
                record = self._read(key)
                # The token rises with every lease: the sandbox refuses a former holder that comes back late.
                if not record.is_held(now):
                    renewed = replace(record, token=record.token + 1, until=now + hold_s, holder=dict(labels))
                    self._write(key, renewed)
                    return SandboxLease(key, renewed.token, renewed)
            given_up.wait(POLL_S)
        return None

    def note(self, lease: SandboxLease, sandbox: str | None, created: float) -> bool:
        """Record the sandbox that the holder uses now; False when another run holds the lease by now."""
        return self._change(lease, sandbox=sandbox, created=created, used=time.time())

    def release(self, lease: SandboxLease) -> bool:
        """Release the lease; False when another run holds it by now."""
        return self._change(lease, until=0.0, holder={}, used=time.time())

    def leftovers(self, idle_s: float, hard_s: float) -> Iterator[tuple[str, Record, str]]:
        """Return (key, record, reason) of records nobody will use again: dead holders, sandboxes over their time."""
        for path in sorted(self._top.glob("*.json")) if self._top.is_dir() else ():
            record, now = self._read(path.stem), time.time()
            if record.until and is_leftover(record.holder):
                yield path.stem, record, "its owner is dead"
            elif record.sandbox is not None and not record.is_held(now) and record.expired(now, idle_s, hard_s):
                yield path.stem, record, "its time is over"

    def forget(self, key: str, record: Record) -> bool:
        """Remove a leftover's sandbox from its record, unless it changed; its token stays, for tokens only rise."""
        with self._locked(key):
            if self._read(key) != record:
                return False
            self._write(key, Record(token=record.token))
        return True

    def _change(self, lease: SandboxLease, **changes: object) -> bool:
        with self._locked(lease.key):
            record = self._read(lease.key)
            if record.token != lease.token:
                return False
            lease.record = replace(record, **changes)  # type: ignore[arg-type]  # names of Record's own fields
            self._write(lease.key, lease.record)
        return True

    def _locked(self, key: str) -> AbstractContextManager[None]:
        private_dir(self._top)
        return locked(self._top / f"{key}.lock")

    def _read(self, key: str) -> Record:
        """Return the record; a malformed one counts as unused, with a token above any that was given out."""
        path = self._top / f"{key}.json"
        try:
            facts = json.loads(path.read_bytes())
            if facts.pop("version") == VERSION:
                return Record(**facts)
        except FileNotFoundError:
            return Record()
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        return Record(token=time.time_ns() // 1_000_000)

    def _write(self, key: str, record: Record) -> None:
        fd, name = tempfile.mkstemp(prefix=".new-", dir=self._top)
        with os.fdopen(fd, "w", encoding="utf-8") as sink:
            json.dump({"version": VERSION, **asdict(record)}, sink)
        Path(name).rename(self._top / f"{key}.json")

"""A thread that renews the leases of running calls, independent of all handlers."""

from __future__ import annotations

import logging
import os
import threading
from typing import Final

from kdskills.remote.ports import CallJournal

LEASE_S: Final = 6.0
RENEW_S: Final = 2.0

_log = logging.getLogger(__name__)


class CallLeases:
    """Renews the lease of every running call, from a daemon thread that sleeps while no call runs.

    Args:
        lease_s: How long a lease lasts.
        renew_s: How often it is renewed.
    """

    def __init__(self, lease_s: float = LEASE_S, renew_s: float = RENEW_S) -> None:
        self.lease_s = lease_s
        self._renew_s = renew_s
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._leases: dict[tuple[int, str], tuple[CallJournal, str]] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def hold(self, journal: CallJournal, key: str, owner: str) -> None:
        """Renew this call's lease from now on.

        Raises:
            RuntimeError: The thread cannot be started.
        """
        if self._process != os.getpid():  # after a fork: the thread and its calls belong to the parent process
            self._begin()
        with self._changed:
            self._leases[id(journal), key] = (journal, owner)
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._renew_all, name="kdskills-leases", daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify()

    def release(self, journal: CallJournal, key: str, owner: str) -> None:
        """Stop renewing this call's lease, if *owner* still has it."""
        with self._changed:
            if self._leases.get((id(journal), key)) == (journal, owner):
                del self._leases[id(journal), key]

    def close(self) -> None:
        """End the thread; calls that still run count as dead once their leases expire."""
        if self._process != os.getpid():
            self._begin()
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=self.lease_s)

    def _renew_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._leases)
                self._changed.wait_for(lambda: self._closed, timeout=self._renew_s)
                if self._closed:
                    return
                leases = dict(self._leases)
            for journal, rows in _by_journal(leases):
                self._renew(journal, rows)

    def _renew(self, journal: CallJournal, rows: dict[str, str]) -> None:
        try:
            journal.renew(rows, self.lease_s)
        except Exception as error:  # noqa: BLE001 - a journal that is away for a moment must not end this thread
            _log.warning("leases of %d calls could not be renewed: %s", len(rows), type(error).__name__)


def _by_journal(leases: dict[tuple[int, str], tuple[CallJournal, str]]) -> list[tuple[CallJournal, dict[str, str]]]:
    groups: dict[int, tuple[CallJournal, dict[str, str]]] = {}
    for (number, key), (journal, owner) in leases.items():
        groups.setdefault(number, (journal, {}))[1][key] = owner
    return list(groups.values())

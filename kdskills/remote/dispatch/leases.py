"""The thread that keeps leases alive, which no handler can block."""

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
    """Renews the lease of every call that is held, from a daemon thread that sleeps while nothing is.

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
            RuntimeError: This process may not have the thread that would.
        """
        if self._process != os.getpid():  # forked: the thread stayed behind, with the calls of the other process
            self._begin()
        with self._changed:
            self._leases[id(journal), key] = (journal, owner)
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._renew_all, name="kdskills-leases", daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify()

    def release(self, journal: CallJournal, key: str, owner: str) -> None:
        """Stop renewing it, if it is still held for *owner*."""
        with self._changed:
            if self._leases.get((id(journal), key)) == (journal, owner):
                del self._leases[id(journal), key]

    def close(self) -> None:
        """End the thread; what is still held will count as dead when its lease has run out."""
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

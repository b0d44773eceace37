"""The init of a container: what it waits for before a program of the same user may begin."""

import os

import pytest

from kdskills_runtime import container_init


@pytest.mark.parametrize(
    "words",
    ["/sbin/docker-init -- python3 -m kdskills_runtime.container_init", "python3 -m kdskills_runtime.container_init"],
)
def test_a_first_process_that_is_not_ours_is_not_waited_for(monkeypatch, words):
    """An engine's own init, and the one that serves the order itself, are let be."""
    monkeypatch.setattr(container_init, "command", lambda _: words.encode().replace(b" ", b"\0") + b"\0")
    monkeypatch.setattr(os, "open", pytest.fail)
    assert container_init.first_is_closed()


def test_a_first_process_that_holds_the_container_is_waited_for(monkeypatch):
    """Nothing begins while it can be read, and nothing at all when that stays so."""
    answers = [True, True, False]

    def look(path, _flags):
        assert path == "/proc/1/environ"
        if not (answers.pop(0) if answers else True):
            raise PermissionError
        return os.dup(0)

    monkeypatch.setattr(container_init, "command", lambda _: b"python3\0-m\0kdskills_runtime.container_init\0hold\0")
    monkeypatch.setattr(os, "open", look)
    assert container_init.first_is_closed()
    monkeypatch.setattr(container_init, "CLOSED_S", 0.05)
    assert not container_init.first_is_closed()

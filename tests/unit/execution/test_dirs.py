"""Where execution keeps its files, for users with and without a home."""

from __future__ import annotations

import pytest

from kdskills.errors import ExecRefused
from kdskills.execution.dirs import cache_dir, state_dir


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A uid without an account and without HOME is refused with the variable that cures it, never given `./~`."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("os.geteuid", lambda: 10003)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for find, variable in ((cache_dir, "XDG_CACHE_HOME"), (state_dir, "XDG_STATE_HOME")):
        with pytest.raises(ExecRefused, match=variable):
            find()
        monkeypatch.setenv(variable, "/some/where")
        assert str(find()) == "/some/where/kdskills"

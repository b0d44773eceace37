"""Settings come from arguments, variables and files, and never let a variable open the wall."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from kdskills.app import Settings, SettingsInvalid
from kdskills.app.settings import FILE_ONLY, SYSTEM_CONFIG, config_files, user_config, variable_of
from kdskills.execution import IsolationLevel


def write(path: Path, text: str) -> Path:
    """Write a settings file."""
    path.write_text(text)
    return path


def test_defaults_are_closed() -> None:
    """With nothing said, the wall is asked for and nothing may be left unenforced."""
    made = Settings()
    assert (made.executor, made.isolation, made.allow_unisolated, made.best_effort_limits) == (
        "auto",
        IsolationLevel.NAMESPACE,
        False,
        (),
    )


def test_stronger_files_come_first(tmp_path: Path) -> None:
    """The first file beats the second; keys of both are read."""
    strong = write(tmp_path / "a.toml", 'executor = "docker"\n')
    weak = write(tmp_path / "b.toml", 'executor = "bubblewrap"\nsandbox_uid = 12000\n')
    made = Settings.load(strong, weak)
    assert (made.executor, made.sandbox_uid) == ("docker", 12000)


def test_variables_beat_files_and_arguments_beat_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`KDSKILLS_EXECUTOR` beats the file, an argument beats both."""
    file = write(tmp_path / "a.toml", 'executor = "docker"\n')
    monkeypatch.setenv("KDSKILLS_EXECUTOR", "bubblewrap")
    assert Settings.load(file).executor == "bubblewrap"
    assert Settings.load(file, executor="landlock").executor == "landlock"


@pytest.mark.parametrize("name", sorted(FILE_ONLY))
def test_no_variable_opens_the_wall(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable for a file-only field is an error that names the file, not a silent success or no-op."""
    monkeypatch.setenv(f"KDSKILLS_{name.upper()}", "1")
    with pytest.raises(SettingsInvalid, match="cannot be set by a variable") as caught:
        Settings.load(tmp_path / "absent.toml")
    assert (caught.value.code, caught.value.who) == ("settings_invalid", "operator")
    with pytest.raises(SettingsInvalid, match="cannot be set by a variable"):
        Settings()


def test_home_variable_does_not_move_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """`HOME` and `XDG_CONFIG_HOME` cannot point to another settings file, which could open the wall."""
    before = user_config()
    monkeypatch.setenv("HOME", "/somewhere/else")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/somewhere/else")
    assert user_config() == before


@pytest.mark.parametrize(
    "text",
    ['exekutor = "docker"\n', "sandbox_uid = 0\n", 'min_isolation = "some"\n', "executor = \n", "executor = 3\n"],
)
def test_misunderstood_files_are_errors(text: str, tmp_path: Path) -> None:
    """Unknown keys, uid 0, wrong values and broken TOML are errors of the operator, not ignored."""
    with pytest.raises(SettingsInvalid) as caught:
        Settings.load(write(tmp_path / "a.toml", text))
    assert caught.value.who == "operator"


def test_options_for_engines(tmp_path: Path) -> None:
    """Engines are built with exactly what the operator decided."""
    file = write(
        tmp_path / "a.toml",
        'allow_unisolated = true\nbest_effort_limits = ["memory"]\nsandbox_uid = 7\nimage_packages = ["numpy"]\n',
    )
    options = Settings.load(file).execution_options()
    assert (options.allow_unisolated, options.best_effort, options.sandbox_uid, options.image_packages) == (
        True,
        frozenset({"memory"}),
        7,
        ("numpy",),
    )


def test_hosts_are_granted_by_a_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grants are rules, checked when settings are read; no variable, nested ones neither, adds to them."""
    file = write(
        tmp_path / "a.toml", 'network_bytes = 5\n[network]\n"public.fetch" = ["pypi.org", "*.example.net:443"]\n'
    )
    assert Settings.load(file).network == {"public.fetch": ("pypi.org", "*.example.net:443")}
    assert Settings.load(file).execution_options().egress.size == 5
    with pytest.raises(SettingsInvalid, match="is no rule such as"):
        Settings.load(write(tmp_path / "b.toml", '[network]\npublic = ["http://pypi.org/"]\n'))
    monkeypatch.setenv(f"{variable_of('network')}__PUBLIC", '["pypi.org"]')
    with pytest.raises(SettingsInvalid, match="cannot be set by a variable"):
        Settings.load(file)


@pytest.mark.parametrize("seconds", ["inf", "nan", "0", "1728001"])
def test_a_connection_has_a_bound(tmp_path: Path, seconds: str) -> None:
    """What the clock of a connection cannot count is refused when settings are read."""
    with pytest.raises(SettingsInvalid, match="network_seconds"):
        Settings.load(write(tmp_path / "a.toml", f"network_seconds = {seconds}\n"))


def test_every_setting_is_documented() -> None:
    """Each field has a description, from which the reference page is made."""
    assert [name for name, field in Settings.model_fields.items() if len(field.description or "") < 20] == []


def test_a_uid_without_an_account_has_only_the_system_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run programs under uids nobody registered: there is then no user's file, and nothing fails."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert (user_config(), config_files()) == (None, (SYSTEM_CONFIG,))
    assert Settings.load().executor == "auto"
    monkeypatch.setenv("KDSKILLS_ALLOW_UNISOLATED", "true")
    with pytest.raises(SettingsInvalid, match=str(SYSTEM_CONFIG)):
        Settings.load()


def test_the_key_of_e2b_is_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key reaches the engine and no representation; addresses it would be sent to come from files only."""
    secret = "e2b_" + "5ec2e7" * 7
    monkeypatch.setenv("KDSKILLS_E2B_API_KEY", secret)
    settings = Settings.load(write(tmp_path / "a.toml", 'e2b_api_url = "https://e2b.example"\ne2b_idle_ttl_s = 9\n'))
    options = settings.execution_options().e2b
    assert options.api_key is not None
    assert (options.api_key.get_secret_value(), options.api_url, options.idle_ttl_s) == (
        secret,
        "https://e2b.example",
        9,
    )
    assert [text for text in (repr(settings), repr(options), settings.model_dump_json()) if secret in text] == []


@pytest.fixture
def nobody(monkeypatch):
    """An account without an entry in the system's list and without variables, as containers have them."""

    def missing(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", missing)
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_an_account_without_a_home_has_settings(nobody):
    """Settings can be read; the state folder is one that cannot be made, never one below the working folder."""
    nobody.setattr(os, "geteuid", lambda: 54321)
    assert Settings().state_dir == Path("/nonexistent/.local/state/kdskills")
    nobody.setenv("HOME", "relative")
    assert Settings().state_dir == Path("/nonexistent/.local/state/kdskills")
    nobody.setattr(os, "geteuid", lambda: 0)
    assert Settings().state_dir == Path("/root/.local/state/kdskills")


def test_variables_place_the_state_of_an_account_without_a_home(nobody):
    """An absolute `XDG_STATE_HOME` counts, a relative one does not, and the setting beats both."""
    nobody.setattr(os, "geteuid", lambda: 54321)
    nobody.setenv("XDG_STATE_HOME", "/srv/state")
    assert Settings().state_dir == Path("/srv/state/kdskills")
    nobody.setenv("XDG_STATE_HOME", "state")
    assert Settings().state_dir == Path("/nonexistent/.local/state/kdskills")
    nobody.setenv("KDSKILLS_STATE_DIR", "/srv/other")
    assert Settings().state_dir == Path("/srv/other")


def test_sessions_are_saved_only_where_all_hosts_look() -> None:
    """Without a named store each host would save sessions for itself: that is refused, and says what must be set."""
    with pytest.raises(SettingsInvalid) as refused:
        Settings.load(jobs={"session_folders": "store"})
    assert "artifacts must name a store" in refused.value.message
    assert Settings(jobs={"session_folders": "store"}, artifacts="s3://bucket/x").jobs.session_folders == "store"

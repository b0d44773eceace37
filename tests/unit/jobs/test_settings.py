"""Settings of background work: from files, variables and arguments, every interval and limit checked."""

import json

import pytest
from pydantic import ValidationError

from kdskills.app.settings import Settings, SettingsInvalid, settings_line
from kdskills.jobs.settings import JobsSettings, sqlite_url, user_state_dir


def test_defaults_are_those_of_the_specification():
    """Limits and intervals a caller may count on."""
    jobs = JobsSettings()
    assert (jobs.run_cmd_timeout_s, jobs.run_cmd_max_s, jobs.task_max_s) == (60, 120, 86_400)
    assert (jobs.result_bytes, jobs.tail_bytes) == (200 * 1024, 8192)
    assert (jobs.input_bytes, jobs.output_bytes, jobs.files_bytes) == (20 << 20, 20 << 20, 50 << 20)
    assert (jobs.job_wall_s, jobs.startup_timeout_s, jobs.heartbeat_s, jobs.watch_timeout_s) == (1800, 30, 20, 600)
    assert (jobs.poll_s, jobs.lease_s, jobs.keep_s, jobs.keep_per_project) == (2.0, 30, 7 * 86_400, 100_000)


@pytest.mark.parametrize(
    ("name", "value"),
    [("slots", 0), ("poll_s", 0), ("lease_s", 1), ("task_max_s", 86_401), ("keep_per_project", 0), ("unheard_of", 1)],
    ids=str,
)
def test_nonsense_is_refused(name, value):
    """No setting takes what would stop the work or break a promise."""
    with pytest.raises(ValidationError):
        JobsSettings(**{name: value})


def test_retired_settings_are_passed_over(caplog):
    """A setting of an earlier version that decides nothing any more stops nobody, and is told of."""
    assert JobsSettings(cancel_poll_s=0.05, steps_poll_s=0.05, slots=3).slots == 3
    assert [record.getMessage().split()[2] for record in caplog.records] == ["jobs.cancel_poll_s", "jobs.steps_poll_s"]


def test_one_variable_leaves_the_file_in_force(tmp_path, monkeypatch):
    """A variable beats its own field of the file's table, not the table."""
    path = tmp_path / "config.toml"
    path.write_text("state_dir = '/somewhere'\n[jobs]\nslots = 3\nkeep_per_project = 7\n")
    monkeypatch.setenv("KDSKILLS_JOBS__SLOTS", "5")
    settings = Settings.load(path)
    assert (settings.jobs.slots, settings.jobs.keep_per_project) == (5, 7)
    assert settings.work_database == "sqlite:////somewhere/work.db"


def test_a_misspelt_field_is_told(tmp_path, monkeypatch):
    """Unknown keys of the table are errors, by file and by variable."""
    path = tmp_path / "config.toml"
    path.write_text("[jobs]\nslotz = 3\n")
    with pytest.raises(SettingsInvalid, match=r"jobs\.slotz"):
        Settings.load(path)
    path.write_text("")
    monkeypatch.setenv("KDSKILLS_JOBS__SLOTZ", "5")
    with pytest.raises(SettingsInvalid, match="nearest name is KDSKILLS_JOBS__SLOTS"):
        Settings.load(path)


def test_a_database_is_shared_when_named(tmp_path):
    """`database_url` beats the file in the state folder."""
    url = "postgresql://kd@db/work"
    assert Settings(database_url=url, state_dir=tmp_path).work_database == url
    assert Settings(state_dir=tmp_path).work_database == sqlite_url(tmp_path)


def test_state_is_kept_where_the_platform_says(monkeypatch, tmp_path):
    """An absolute `XDG_STATE_HOME` is honoured; a relative one means nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert user_state_dir() == tmp_path / "kdskills"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_state_dir() == tmp_path / ".local/state/kdskills"


def test_settings_reach_a_worker_whole(tmp_path):
    """What is told to a worker reads back as the same settings, secrets and nested tables included."""
    told = Settings(state_dir=tmp_path, e2b_api_key="e2b_secret", allow_unisolated=True, jobs=JobsSettings(slots=7))
    assert Settings(**json.loads(settings_line(told))) == told

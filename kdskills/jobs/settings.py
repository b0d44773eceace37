"""What an operator decides about background work: where it is kept, every interval and every limit."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MIB: Final = 1024 * 1024
KIB: Final = 1024
DAY_S: Final = 86_400.0
RETIRED: Final = frozenset({"steps_poll_s", "cancel_poll_s"})
"""Settings of earlier versions: they may still stand in a file, and decide nothing."""
_LOG: Final = logging.getLogger("kdskills.jobs")

HOST_PORT: Final = r"^(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]*):\d{1,5}$"
NO_HOME: Final = Path("/nonexistent")
"""Home of accounts that have none, as systems write it: what must be kept there is refused when it is made."""


def user_state_dir() -> Path:
    """Return the folder of this account's durable state: `$XDG_STATE_HOME/kdskills`, else `~/.local/state/kdskills`.

    An account without a home, as containers have them, gets a folder that cannot be made: it can do all that keeps nothing.
    """
    xdg_folder = os.environ.get("XDG_STATE_HOME", "")
    if xdg_folder.startswith("/"):
        return Path(xdg_folder) / "kdskills"
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - no raise
    if not home.is_absolute():
        home = Path("/root") if os.geteuid() == 0 else NO_HOME
    return home / ".local" / "state" / "kdskills"


class QuotaLimits(BaseModel):
    """What one project may have of background work; empty is any number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    running: int | None = Field(
        None, ge=1, description="Commands that run at the same time on all hosts together; others wait."
    )
    queued: int | None = Field(None, ge=0, description="Commands and jobs that wait.")
    tasks_per_day: int | None = Field(
        None, ge=0, description="Commands submitted in a day of UTC, a job's steps each one."
    )
    cpu_s_per_day: float | None = Field(None, ge=0, description="Seconds of processor time in a day of UTC.")
    artifact_bytes: int | None = Field(None, ge=0, description="Bytes of artifacts that are kept.")


class Quotas(QuotaLimits):
    """What each project may have of background work; what a project's own limits name goes before."""

    projects: dict[str, QuotaLimits] = Field(default_factory=dict, description="Limits of single projects, by name.")

    def of(self, project: str) -> QuotaLimits:
        """Return the limits of a project."""
        own = self.projects.get(project)
        if own is None:
            return self
        return self.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})


class JobsSettings(BaseModel):
    """Settings of background work; `KDSKILLS_JOBS__NAME` sets one, as does the table `[jobs]` of a settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_retired(cls, values: Any) -> Any:
        """Pass over settings of earlier versions that decide nothing any more, and say so."""
        retired = sorted(RETIRED & values.keys()) if isinstance(values, dict) else []
        for name in retired:
            _LOG.warning("the setting jobs.%s decides nothing any more: work is waited for, not polled for", name)
        return {name: value for name, value in values.items() if name not in RETIRED} if retired else values

    slots: int = Field(
        default_factory=lambda: max(2, 2 * (os.cpu_count() or 1)),
        ge=1,
        le=1024,
        description="Commands one worker runs at the same time.",
    )
    services: int = Field(32, ge=0, le=1024, description="Services one worker runs at the same time.")
    held: int = Field(
        256,
        ge=1,
        le=4096,
        description="Tasks, services and jobs one worker holds at the same time, waiting ones included.",
    )
    global_concurrency: int | None = Field(
        None, ge=1, description="Commands that run at the same time on all hosts of the pool together."
    )
    room_bytes: int = Field(
        64 * MIB,
        ge=0,
        description="Free bytes on the disk of the state folder with less of which a worker takes nothing new.",
    )
    pool: bool | None = Field(
        None,
        description="Whether any host may take the work; empty means yes with PostgreSQL, and it is no with SQLite.",
    )

    poll_s: float = Field(
        2.0, gt=0, le=10, description="Seconds between two looks for work of which no notification came."
    )
    watch_s: float = Field(
        0.03, gt=0, le=10, description="Least seconds between two looks at SQLite's file that each found it changed."
    )
    beat_s: float = Field(
        2.0, gt=0, le=60, description="Seconds between two beats of a worker, each of which buries dead ones."
    )
    lease_s: float = Field(30.0, gt=1, le=600, description="Seconds a host of the pool keeps its work without a beat.")
    idle_s: float = Field(30.0, ge=0, description="Seconds without work after which an embedded worker ends.")
    start_s: float = Field(
        30.0, gt=0, description="Seconds an embedded worker may take to start before another is tried."
    )
    restart_backoff_s: float = Field(0.5, gt=0, description="Seconds before a service is restarted, doubled each time.")
    restart_backoff_max_s: float = Field(30.0, gt=0, description="Longest wait before a service is restarted.")
    retry_backoff_s: float = Field(0.0, ge=0, description="Seconds before a failed step is tried again.")

    run_cmd_timeout_s: float = Field(60.0, gt=0, description="Timeout of `skills.run_cmd` when the call names none.")
    run_cmd_max_s: float = Field(120.0, gt=0, description="Longest timeout `skills.run_cmd` accepts.")
    task_timeout_s: float = Field(3600.0, gt=0, description="Timeout of a task when the call names none.")
    task_max_s: float = Field(DAY_S, gt=0, le=DAY_S, description="Longest timeout a task accepts.")
    job_wall_s: float = Field(1800.0, gt=0, description="Longest a job takes when the call names nothing else.")
    startup_timeout_s: float = Field(30.0, gt=0, le=600, description="Seconds a service has to become ready.")
    result_bytes: int = Field(200 * KIB, ge=0, le=16 * MIB, description="Bytes of each stream kept in a result.")
    log_bytes: int = Field(64 * MIB, ge=MIB, description="Bytes of each stream kept in the log files of one attempt.")
    input_bytes: int = Field(20 * MIB, ge=0, description="Largest input file.")
    output_bytes: int = Field(20 * MIB, ge=0, description="Largest output file.")
    files_bytes: int = Field(50 * MIB, ge=0, description="Inputs, and outputs, of one task together.")
    tail_bytes: int = Field(
        8192, ge=0, le=MIB, description="Bytes of each stream in a status when the call names none."
    )
    heartbeat_s: float = Field(20.0, gt=0, description="Seconds between two heartbeats of a watch.")
    watch_timeout_s: float = Field(
        600.0, gt=0, description="Seconds after which a watch returns what is known by then."
    )

    quotas: Quotas = Field(default_factory=Quotas, description="What each project may have of background work.")

    keep_s: float = Field(7 * DAY_S, gt=0, description="Seconds that finished work is kept.")
    keep_per_project: int = Field(100_000, ge=1, description="Finished tasks, and jobs, a project keeps at most.")
    keep_bytes_per_project: int = Field(
        0,
        ge=0,
        description="Bytes a project's work keeps at most, in artifacts, each content once, and in what latest attempts printed; "
        "what ended first goes, and nothing that runs; 0 for any number.",
    )
    session_folders: Literal["host", "store"] = Field(
        "host",
        description="Where the files of sessions are between two commands: `host` leaves them on the host that ran the last one; "
        "`store` saves them to `artifacts`, which must be set, so that the next one runs on any host.",
    )
    session_store_files: int = Field(4000, ge=1, le=4000, description="Files of a session that are saved at most.")
    session_store_bytes: int = Field(1024 * MIB, ge=1, description="Bytes of a session that are saved at most.")
    session_store_keep_s: float = Field(
        0.0, ge=0, description="Seconds a saved session stays after its last command; 0 for ever."
    )
    retention_every_s: float = Field(300.0, gt=0, description="Seconds between two rounds of retention.")
    retention_batch: int = Field(500, ge=1, description="Records one round of retention forgets at a time.")


class FleetSettings(BaseModel):
    """How a host serves what it has to the doors of the others, and how it asks them; the table `[fleet]` of a settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: str | None = Field(
        None,
        pattern=HOST_PORT,
        description="Address a worker serves logs, artifacts and services of its host to other hosts at, `HOST:PORT`; the worker of slot N "
        "takes the port N further, port 0 is any free one. Empty: it serves none.",
    )
    address: str | None = Field(
        None,
        pattern=HOST_PORT,
        description="What other hosts dial instead, `HOST:PORT`; empty means what is listened on.",
    )
    certificate: Path | None = Field(
        None,
        description="Certificate, with its chain, that makes the stream TLS; it names the host of `fleet.address`.",
    )
    key: Path | None = Field(
        None, description="Its private key; empty means that the file of the certificate has it, too."
    )
    authority: Path | None = Field(
        None,
        description="Certificates that those of other hosts are checked against; streams without TLS are refused then. Empty: those of the system.",
    )
    service_silence_s: float = Field(
        120.0, gt=0, le=DAY_S, description="Seconds a service behind `/services` may be silent before it is cut off."
    )

    @property
    def listening(self) -> tuple[str, int]:
        """Host and port of `listen`."""
        return _host_port(self.listen or "")

    @property
    def dialed(self) -> tuple[str, int] | None:
        """Host and port of `address`; None without one."""
        return _host_port(self.address) if self.address else None


def _host_port(address: str) -> tuple[str, int]:
    name, _, port = address.rpartition(":")
    return name.strip("[]"), int(port or 0)


def sqlite_url(state_dir: Path) -> str:
    """Return the URL of the database that is used when none is named."""
    return f"sqlite:///{state_dir / 'work.db'}"

"""The work operations as rows of the table: twelve of the contract, and those that list and read back (spec work §2)."""

from kdskills.app.operations.work_follow import (
    JOB_CANCEL,
    JOB_STATUS,
    JOB_WATCH,
    TASK_CANCEL,
    TASK_LOGS,
    TASK_STATUS,
    TASK_WATCH,
)
from kdskills.app.operations.work_list import ARTIFACT, JOBS, TASKS
from kdskills.app.operations.work_run import ACTIVATE, RUN_CMD, RUN_CMD_ASYNC, RUN_SERVICE, START_JOB

WORK = (
    ACTIVATE,
    RUN_CMD,
    RUN_CMD_ASYNC,
    RUN_SERVICE,
    START_JOB,
    TASK_STATUS,
    JOB_STATUS,
    TASK_WATCH,
    JOB_WATCH,
    TASK_CANCEL,
    JOB_CANCEL,
    TASK_LOGS,
    TASKS,
    JOBS,
    ARTIFACT,
)

__all__ = ["WORK"]

"""The benchmark of sessions reaches into internals, and a run of it is judged by nobody but its reader."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.benchmarks.runtime import TABLE, Ground, Row


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.what)
async def test_every_row_can_be_measured(row: Row, tmp_path: Path) -> None:
    """A sample of each row does its work and takes time."""
    ground = Ground(tmp_path, 3)
    async with asynccontextmanager(row.measure)(ground) as sample:
        took = await sample()
    assert took.wall > 0

"""Models that are completed at their first use."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from pydantic import ValidationError

from kdskills.bundle.descriptor import LateModel

THREADS = 8


def test_importing_every_public_name_completes_no_model():
    """What pydantic needs to build validators, the list of installed packages too, is not loaded by an import."""
    code = (
        "import sys, kdskills\n"
        "names = [getattr(kdskills, name) for name in kdskills.__all__]\n"
        "models = (kdskills.SkillsDescriptor, kdskills.AgentRules)\n"
        "assert not any(model.__pydantic_complete__ for model in models)\n"
        "assert 'importlib.metadata' not in sys.modules\n"
        "assert kdskills.SkillsDescriptor(agents_config={'a': {'enabled': ['x.y']}}).agents_config['a'].enabled\n"
        "assert kdskills.SkillsDescriptor.__pydantic_complete__\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_threads_complete_a_model_once():
    """Whoever comes while a model is completed gets the complete one."""
    for _ in range(20):

        class Row(LateModel):
            size: int
            more: dict[str, list[int]]

        assert not Row.__pydantic_complete__
        together = Barrier(THREADS)

        def read(model: type[Row] = Row, start: Barrier = together) -> int:
            start.wait()
            return model.model_validate({"size": "3", "more": {"a": ["4"]}}).size

        with ThreadPoolExecutor(THREADS) as threads:
            sizes = [future.result() for future in [threads.submit(read) for _ in range(THREADS)]]
        assert sizes == [3] * THREADS


def test_a_late_model_is_frozen_and_takes_no_further_keys():
    """As strict as if it were complete from the start."""

    class Row(LateModel):
        name: str

    with pytest.raises(ValidationError, match="extra_forbidden"):
        Row(name="a", other=1)
    with pytest.raises(ValidationError, match="frozen"):
        Row(name="a").name = "b"

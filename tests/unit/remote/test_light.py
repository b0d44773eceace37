"""What importing remote skills must not bring along."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("websockets", "jsonschema", "sqlalchemy", "alembic", "pluggy")


@pytest.mark.parametrize("module", ["kdskills.remote", "kdskills.remote.api", "kdskills.remote.session"])
def test_importing_needs_no_optional_package(module):
    """Neither the room nor its facades import the optional packages, or pluggy."""
    program = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"

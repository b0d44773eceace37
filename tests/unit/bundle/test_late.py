"""What importing the public names does not load."""

from __future__ import annotations

import subprocess
import sys


def test_importing_every_public_name_builds_no_model():
    """Descriptors are no models: the names, those of programs aside, load neither pydantic nor the list of packages."""
    code = (
        "import sys, kdskills\n"
        "programs = {'Host', 'ReactSolver', 'ScriptedModel', 'Settings', 'SkillRuntime', 'SolverSystem'}\n"
        "names = [getattr(kdskills, name) for name in kdskills.__all__ if name not in programs]\n"
        "assert not {'pydantic', 'importlib.metadata'} & set(sys.modules)\n"
        "assert kdskills.SkillsDescriptor(agents_config={'a': {'enabled': ['x.y']}}).agents_config['a'].enabled\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

"""Say where modules come from, and what a child finds of the packages."""

import os
import subprocess
import sys

ours = {name: getattr(module, "__file__", None) for name, module in [*sys.modules.items()]}

import packed

import kdskills_runtime

kdskills_runtime.report(
    {
        "name": packed.NAME,
        "packed": packed.__file__,
        "foreign": sorted(name for name, file in ours.items() if file and file.startswith(os.environ["PYTHONPATH"])),
        "children": [
            subprocess.run(argv, capture_output=True, text=True).stdout
            for argv in (["say-packed", "x"], ["say-python"], ["python3", "-c", "import packed; print(packed.__file__)"])
        ],
        "variables": {name: os.environ.get(name) for name in ("PATH", "PYTHONPATH", "NODE_PATH")},
    }
)

"""Fuzzing of what reads untrusted text, run by hand.

Each harness beside this file has `check(data)`, which turns bytes into input for one part and asserts what must hold
for any input. atheris drives it, and is no dependency of the project:

    .venv/bin/pip install atheris
    .venv/bin/python tests/fuzz/driver.py parser -max_total_time=600 WORKING_FOLDER tests/fuzz/seeds/parser

The arguments are libFuzzer's. A failing input is written to `crash-…` in the working directory (`-artifact_prefix=`
says where else). Mend the product, put the input into `seeds/<harness>/` under a name that says what it shows, and
give the mend a unit test of its own. `tests/unit/test_fuzz_seeds.py` runs every seed without atheris.
A corpus is made small again with `-merge=1 NEW_FOLDER OLD_FOLDER`.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
SLOW_SECONDS = 2.0
"""Most processor time one input may take: an input of 64 KB that takes longer is not read in linear time."""


def load(name: str) -> ModuleType:
    """Load the harness *name*."""
    spec = importlib.util.spec_from_file_location(f"fuzz_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def guarded(check: Callable[[bytes], None], data: bytes, seconds: float = SLOW_SECONDS) -> None:
    """Run *check* with warnings as errors, and fail when it takes too long."""
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(data)
    taken = time.process_time() - started
    if taken > seconds:
        raise AssertionError(f"{len(data)} bytes took {taken:.1f} s")


def main() -> None:
    """Fuzz the harness that the command line names, with the rest of its arguments."""
    import atheris

    name, *arguments = sys.argv[1:]
    # The files beside this one are no libraries: none may stand in for a module of the same name.
    sys.path.sort(key=lambda entry: Path(entry or ".").resolve() == HERE)
    with atheris.instrument_imports(include=["kdskills"]):
        module = load(name)
    with tempfile.NamedTemporaryFile("w", suffix=".dict", encoding="utf-8") as words:
        words.writelines(f'"{_escaped(word)}"\n' for word in module.WORDS)
        words.flush()

        def one(data: bytes) -> None:
            guarded(module.check, data, 4 * SLOW_SECONDS)  # counting coverage slows Python down

        atheris.Setup([sys.argv[0], f"-dict={words.name}", *arguments], one)
        atheris.Fuzz()


def _escaped(word: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word.encode("utf-8", "surrogatepass"))


if __name__ == "__main__":
    main()

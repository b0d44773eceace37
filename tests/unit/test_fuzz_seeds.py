"""Every input that fuzzing kept, run through its harness; and the harnesses themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

FUZZ = Path(__file__).parents[1] / "fuzz"
HARNESSES = sorted(path.name for path in (FUZZ / "seeds").iterdir())
SEEDS = sorted(path for path in (FUZZ / "seeds").rglob("*") if path.is_file())
MOST_BYTES = 300_000


@pytest.fixture(scope="module")
def driver() -> Iterator[ModuleType]:
    """The module that loads harnesses; what it adds to the search path goes again."""
    before = list(sys.path)
    spec = spec_from_file_location("fuzz_driver", FUZZ / "driver.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


@pytest.mark.parametrize("name", HARNESSES)
def test_every_harness_has_its_seeds(driver: ModuleType, name: str) -> None:
    """Each folder of seeds belongs to a harness, which holds for all of them and takes no time over any."""
    harness = driver.load(name)
    seeds = [path for path in SEEDS if path.parent.name == name]
    assert seeds
    for path in seeds:
        try:
            driver.guarded(harness.check, path.read_bytes())
        except Exception as error:
            error.add_note(f"seed {path.relative_to(FUZZ)}")
            raise


@pytest.mark.parametrize("name", HARNESSES)
def test_harnesses_hold_for_new_inputs(driver: ModuleType, name: str) -> None:
    """Inputs made of a harness's own words hold as the kept ones do."""
    harness = driver.load(name)
    words = st.sampled_from([word.encode("utf-8", "surrogatepass") for word in harness.WORDS])

    @given(st.binary(max_size=12), st.lists(words | st.binary(max_size=4), max_size=20).map(b"".join))
    def check(head: bytes, text: bytes) -> None:
        driver.guarded(harness.check, head + text)

    check()


def test_seeds_stay_small() -> None:
    """The kept inputs take less than 300 KB in all."""
    assert sum(path.stat().st_size for path in SEEDS) < MOST_BYTES


def test_slow_inputs_are_seen(driver: ModuleType) -> None:
    """An input that takes too long is a failure, and so is one that warns."""
    with pytest.raises(AssertionError, match="3 bytes took"):
        driver.guarded(lambda data: sum(range(100_000)), b"abc", seconds=0)


def test_draws_are_total_and_repeatable(driver: ModuleType) -> None:
    """A draw takes what is there, the first choice when nothing is, and pumps a part of the rest up to the size asked."""
    driver.load("urls")  # puts the folder on the search path
    draw = sys.modules["draw"].Draw
    empty = draw(b"")
    assert (empty.number(9), empty.choice("xy"), empty.flag(), empty.text(), empty.rest()) == (0, "x", False, "", b"")
    some = draw(b"\x02\x01\x03abcdef")
    assert (some.number(2), some.flag(), some.text(), some.rest()) == (0, True, "abc", b"def")
    assert draw(b"\x01\x01\x01abc").pumped(9) == b"abbbbbbbbc"[:1] + b"bc" * 3 + b"bc"

"""Making many objects at once."""

from __future__ import annotations

import gc
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, replace

import pytest

from kdskills.skills.model import maker_of
from kdskills.skills.registry import collector_paused


@dataclass(frozen=True, slots=True)
class Row:
    """A row as skills are."""

    name: str
    size: int = 3
    more: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name and size."""
        return f"{self.name}:{self.size}"


make_row = maker_of(Row)


@pytest.fixture
def collector():
    """The collector, turned on, and left as it was."""
    before = gc.isenabled()
    gc.enable()
    yield gc
    (gc.enable if before else gc.disable)()


def test_what_is_made_is_what_the_class_makes():
    """Positions, names and defaults are taken as the class takes them."""
    for values, named in ((("a", 1, {"b": "c"}), {}), (("a",), {"size": 7}), ((), {"name": "a"})):
        made = make_row(*values, **named)
        assert (made, type(made), repr(made)) == (Row(*values, **named), Row, repr(Row(*values, **named)))
    assert (made.label, replace(made, size=9), pickle.loads(pickle.dumps(made))) == ("a:3", Row("a", 9), Row("a"))


def test_what_is_made_is_locked():
    """Nothing can be set or added, as with any other instance."""
    made = make_row("a")
    with pytest.raises(FrozenInstanceError):
        made.name = "b"
    assert not hasattr(made, "__dict__")


def test_defaults_are_not_shared():
    """Each instance has a default of its own."""
    assert make_row("a").more is not make_row("a").more


def test_missing_values_are_refused():
    """What the class would miss is missed."""
    with pytest.raises(TypeError, match="name"):
        make_row()


def test_the_collector_rests_and_goes_on(collector):
    """It is off inside and on again behind, also after an error."""
    with collector_paused():
        assert not collector.isenabled()
    assert collector.isenabled()
    with pytest.raises(ValueError, match="inside"), collector_paused():
        raise ValueError("inside")
    assert collector.isenabled()


def test_a_collector_that_was_off_stays_off(collector):
    """Who turned it off is the one to turn it on."""
    collector.disable()
    with collector_paused(), collector_paused():
        assert not collector.isenabled()
    assert not collector.isenabled()
    collector.enable()
    with collector_paused():
        with collector_paused():
            pass
        assert not collector.isenabled()
    assert collector.isenabled()

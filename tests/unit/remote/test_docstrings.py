"""Google docstrings, and what they add to schemas and texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.remote.schemas import derive
from kdskills.remote.schemas.derive import parse_docstring


def ship(order, weight=1, *rest, **more):
    """Book a parcel
    with the carrier.

    More about it: this is no section, and no argument either.

    Args:
        order (str): The order's number,
            as the shop writes it.
        weight (dict(str, int), optional): In grams: always.
        *rest: Further orders.
        **more: Whatever else.
        missing: Of nobody.

    Returns:
        dict[str, int]: The parcel: its
            number.

    Raises:
        ValueError: Never.
    """


def test_a_docstring_is_read():
    """First paragraph in one line, each argument with its continuation, the result without its type."""
    doc = parse_docstring(ship.__doc__)
    assert doc.summary == "Book a parcel with the carrier."
    assert dict(doc.parameters) == {
        "order": "The order's number, as the shop writes it.",
        "weight": "In grams: always.",
        "rest": "Further orders.",
        "more": "Whatever else.",
        "missing": "Of nobody.",
    }
    assert doc.returns == "The parcel: its number."


@pytest.mark.parametrize(
    ("said", "returns"),
    [
        ("int: The count.", "The count."),
        ("The count.", "The count."),
        ("list of str: Names.", "Names."),
        ("int | None: Perhaps.", "Perhaps."),
        ("dict or None: Perhaps.", "Perhaps."),
        ("dict[str, list[int]]: Deep.", "Deep."),
        ("kdskills.remote.Receipt: Of the turn.", "Of the turn."),
        ("True when it worked: else nothing.", "True when it worked: else nothing."),
        ("See https://example.org for more.", "See https://example.org for more."),
        ("int:", None),
    ],
)
def test_the_type_of_the_result_is_left_out(said, returns):
    """Only what looks like a type before the colon goes."""
    assert parse_docstring(f"X.\n\nReturns:\n    {said}\n").returns == returns


@pytest.mark.parametrize("text", [None, "", "  \n ", "\n\n"])
def test_blank_docstrings_say_nothing(text):
    """Blank counts as absent."""
    doc = parse_docstring(text)
    assert (doc.summary, dict(doc.parameters), doc.returns) == (None, {}, None)


def test_a_docstring_that_begins_with_a_section_has_no_summary():
    """`Args:` is no description."""
    doc = parse_docstring("Args:\n    a: The a.\n")
    assert (doc.summary, dict(doc.parameters)) == (None, {"a": "The a."})


def test_text_at_the_left_edge_ends_a_section():
    """What follows a section is not its continuation."""
    doc = parse_docstring("X.\n\nArgs:\n    a: The a.\nAnd then: this.\n    b: not an argument.\n")
    assert dict(doc.parameters) == {"a": "The a."}


@given(st.text())
def test_any_text_is_read_without_complaint(text):
    """A docstring is prose; none breaks a registration, and the summary is one line."""
    doc = parse_docstring(text)
    assert doc.summary is None or doc.summary.strip() == doc.summary != ""


def test_descriptions_fill_an_inferred_schema():
    """Schema and declared properties are described; what is not declared stays out."""

    def handler(order: str, weight: int = 1):
        """Book a parcel.

        Args:
            order: The order.
            weight: In grams.
            other: Not declared.
        """

    known = derive("h", handler)
    assert known.description == "Book a parcel."
    assert known.input_schema == {
        "type": "object",
        "description": "Book a parcel.",
        "properties": {
            "order": {"type": "string", "description": "The order."},
            "weight": {"type": "integer", "description": "In grams."},
        },
        "additionalProperties": False,
        "required": ["order"],
    }


def test_an_explicit_schema_gains_descriptions_where_they_are_missing_and_nothing_else():
    """What it says stays; what it does not declare is not added."""
    given_schema = {
        "type": "object",
        "properties": {"order": {"type": "string"}, "weight": {"description": "Mine."}, "more": True},
        "required": ["order"],
    }
    assert derive("h", ship, given_schema).input_schema == {
        "type": "object",
        "description": "Book a parcel with the carrier.",
        "properties": {
            "order": {"type": "string", "description": "The order's number, as the shop writes it."},
            "weight": {"description": "Mine."},
            "more": True,
        },
        "required": ["order"],
    }
    assert derive("h", ship, {"description": "Mine."}).input_schema == {"description": "Mine."}


def test_the_description_of_a_skill(session):
    """Argument, docstring, `Remote skill <name>`, in this order; blank counts as absent."""

    def told():
        """From the docstring."""

    def silent():
        return None

    assert session.register("a", told, description="Given.").description == "Given."
    assert session.register("a", told).description == "From the docstring."
    assert session.register("a", told, description=" \n").description == "From the docstring."
    assert session.register("a", silent).description == "Remote skill a"
    assert session.register("a", silent, description="").description == "Remote skill a"


def test_a_description_that_cannot_be_sent_is_refused(session):
    """Half a character would make the whole catalog unreadable."""
    with pytest.raises(ValueError, match="description of `a` cannot be sent"):
        session.register("a", ship, description="\ud800")

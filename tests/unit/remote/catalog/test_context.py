"""What the context channel carries, and when."""

from hypothesis import given
from hypothesis import strategies as st

from kdskills.remote.catalog.backend import REPLACES, additional_context, context_text


@given(st.text())
def test_nothing_closes_the_servers_element(text):
    """No text can hold `</`, so none ends the server's `<kdskills>` element."""
    escaped = additional_context(text)["kdskills"]["value"]
    assert "</" not in escaped
    assert escaped.replace("<\\/", "</") == text.replace("<\\/", "</")


def test_the_channel_is_the_servers():
    """The value travels under `kdskills`, as of the application."""
    assert additional_context("a</kdskills>b") == {"kdskills": {"kind": "application", "value": "a<\\/kdskills>b"}}


def test_a_changed_catalog_replaces_every_earlier_one():
    """The first catalog goes as it is, a later one says that it replaces, and so does an empty one."""
    assert context_text("catalog", earlier=False) == "catalog"
    assert context_text("", earlier=False) is None
    assert context_text("catalog", earlier=True) == f"{REPLACES}\ncatalog"
    assert context_text("", earlier=True) == REPLACES == "This catalog replaces every earlier one."

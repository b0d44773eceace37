"""Calling operations from code: with and without an event loop."""

import pytest

from kdskills.app import Host, Settings
from kdskills.errors import BadRequest


def test_run_without_a_loop():
    """Code without an event loop gets the answer at once."""
    assert Host(Settings(), entry_points=False).run("skills.list", bundle="bundles/press").bundle == "press"


async def test_run_in_a_loop_says_what_to_await():
    """In an event loop `run` is refused with a code, before anything is done; `call` is there for it."""
    host = Host(Settings(), entry_points=False)
    with pytest.raises(BadRequest, match=r"await Host\.call") as caught:
        host.run("skills.list", bundle="bundles/press")
    assert (caught.value.code, caught.value.who) == ("sync_in_loop", "caller")
    assert (await host.call("skills.list", bundle="bundles/press")).bundle == "press"

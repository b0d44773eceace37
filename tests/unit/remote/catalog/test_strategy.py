"""Which way a catalog takes."""

from itertools import product

import pytest

from kdskills.remote.catalog.changes import DISPATCHER, start_plan, strategy_of_old
from kdskills.remote.ports import ServerProfile

TOOL = {"name": "a", "description": "d", "inputSchema": {"type": "object"}}
RELOAD = ServerProfile(reload=True, probed=True)
BOTH = ServerProfile(native=True, reload=True, probed=True)


@pytest.mark.parametrize(
    ("profile", "wanted", "local", "ephemeral", "expected"),
    [
        (BOTH, "auto", True, False, "native"),
        (BOTH, "auto", False, True, "native"),
        (RELOAD, "auto", True, False, "reload"),
        (RELOAD, "auto", True, True, "dispatcher"),
        (RELOAD, "auto", False, False, "dispatcher"),
        (ServerProfile(), "auto", True, False, "dispatcher"),
        (RELOAD, "dispatcher", True, False, "dispatcher"),
        (ServerProfile(), "reload", True, False, "dispatcher"),
        (RELOAD, "native", True, False, "dispatcher"),
        (BOTH, "reload", True, False, "reload"),
        (RELOAD, "successor", True, False, "successor"),
    ],
)
def test_a_new_thread_takes_the_first_proven_way(profile, wanted, local, ephemeral, expected):
    """Native, then reload where there is a local file to be, else the dispatcher."""
    assert start_plan(None, profile, wanted, local=local, ephemeral=ephemeral).strategy == expected


def test_nothing_unproven_is_ever_chosen():
    """Whatever is asked for, a way the probe did not prove is not taken."""
    for wanted, local, ephemeral in product(["auto", "native", "reload", "dispatcher"], [True, False], [True, False]):
        plan = start_plan(None, ServerProfile(), wanted, local=local, ephemeral=ephemeral)
        assert plan.strategy == "dispatcher"
        assert strategy_of_old(ServerProfile(), wanted, local=local, successor=False) is None


def test_a_thread_started_elsewhere_may_have_no_way():
    """Without proof an old thread gets a successor only if that is allowed."""
    assert strategy_of_old(BOTH, "auto", local=True, successor=True) == "native"
    assert strategy_of_old(RELOAD, "auto", local=True, successor=True) == "reload"
    assert strategy_of_old(RELOAD, "auto", local=False, successor=True) == "successor"
    assert strategy_of_old(RELOAD, "auto", local=False, successor=False) is None


def test_start_plans():
    """Reload starts with the tools, or with none; the dispatcher always with its one tool."""
    plan = start_plan([TOOL], RELOAD, "auto", local=True, ephemeral=False)
    assert (plan.strategy, plan.wire) == ("reload", [{"type": "function", **TOOL}])
    assert start_plan(None, RELOAD, "auto", local=True, ephemeral=False).wire is None
    for tools in (None, [TOOL]):
        plan = start_plan(tools, ServerProfile(), "auto", local=True, ephemeral=False)
        assert (plan.strategy, plan.wire, plan.tools) == ("dispatcher", [DISPATCHER], tools or [])
    old = start_plan(None, ServerProfile(namespaces=False), "auto", local=True, ephemeral=False)
    assert old.wire == [{key: value for key, value in DISPATCHER.items() if key != "type"}]


def test_wire_tools_of_the_caller_pass_untouched():
    """Entries that are in wire shape already go out as they are, even to a server of the dispatcher."""
    mine = [{"type": "function", **TOOL, "extra": 1}]
    assert start_plan(mine, RELOAD, "auto", local=True, ephemeral=False).wire == mine
    plan = start_plan(mine, ServerProfile(), "auto", local=True, ephemeral=False)
    assert (plan.wire, plan.strategy) == (mine, "")


def test_the_dispatchers_tool_is_the_specs():
    """One tool `kdskills_call {skill: string, arguments: object}`."""
    assert DISPATCHER["name"] == "kdskills_call"
    assert DISPATCHER["inputSchema"]["properties"] == {"skill": {"type": "string"}, "arguments": {"type": "object"}}

"""The bounds and barriers of a turn, one by one."""

from pydantic import BaseModel

from kdskills.models import ToolCall
from kdskills.solver import SolverSettings
from kdskills.solver.dispatch import CheckedCall
from kdskills.solver.turn_tools import PYTHON, WRITE


class Nothing(BaseModel):
    """Arguments of no matter."""


def test_defaults_are_those_of_the_specification():
    """Every bound a turn has when nobody says otherwise."""
    given = SolverSettings().model_dump()
    wanted = {
        "max_steps": 24,
        "max_tool_calls": 96,
        "max_parallel": 8,
        "max_total_tokens": 400_000,
        "wall_s": 900,
        "tool_timeout_s": 120,
        "model_timeout_s": 120,
        "model_retries": 4,
        "skills_form": "full",
        "on_unknown_sid": "flag",
        "answer_role": None,
        "final_call": True,
        "run_scripts": None,
    }
    assert {name: given[name] for name in wanted} == wanted


def test_what_changes_the_session_runs_alone():
    """Loading and unloading are barriers, reading a file and running a script are not."""
    tools = ("skills.load", "skills.unload", "skills.read", "skills.run_script")
    found = [CheckedCall(ToolCall("a", tool, "{}"), tool, {}, None, Nothing()).barrier for tool in tools]
    assert found == [True, True, False, False]
    assert WRITE.barrier(Nothing())


def test_generated_code_has_the_time_it_may_ask_for():
    """The bound of other tools would end a program that may take 600 s."""
    assert PYTHON.timeout_s is not None
    assert PYTHON.timeout_s > 600

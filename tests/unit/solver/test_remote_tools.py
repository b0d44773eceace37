"""Registered Python functions are tools of a solver, sync and async sessions alike."""

import threading
from dataclasses import dataclass

import pytest

from kdskills.remote import AsyncRemoteSkillsFacade, RemoteSkillsFacade
from kdskills.solver import ReactSolver
from kdskills.testing.models import ScriptedModel, call, say, together


class NoServer:
    """A client whose server is never asked: a solver calls the functions itself."""


@dataclass
class Order:
    """What is shipped."""

    city: str
    parcels: int = 1


@pytest.fixture(params=[RemoteSkillsFacade, AsyncRemoteSkillsFacade], ids=["sync", "async"])
def session(request):
    """A session of either kind."""
    return request.param(NoServer()).session("thread-1")


async def turn(build, session, *calls):
    """Run a turn that makes *calls* at once and then ends; return its result and what the model was told last."""
    model = ScriptedModel([together(*calls), say("done")])
    system = build(model=model, remote=session)
    async with system:
        result = await ReactSolver(system).run("x")
    return result, str(model.requests[-1].messages)


async def test_a_function_is_offered_under_its_name_and_schema(build, session):
    """The model is shown `remote_<name>` with the description and the inferred schema."""

    def ship(order: Order) -> str:
        """Book a parcel."""
        return order.city

    session.register("ship_order", ship)
    system = build([say("done")], remote=session)
    async with system:
        await ReactSolver(system).run("x")
        spec = system.tools.get("remote.ship_order").spec()
    assert (spec.name, spec.description) == ("remote_ship_order", "Book a parcel.")
    assert spec.input_schema["properties"]["order"]["required"] == ["city"]


async def test_a_call_reaches_the_function_with_its_types(build, session):
    """Arguments arrive as instances, the answer goes to the model as text."""
    seen = []

    def ship(order: Order) -> dict:
        seen.append(order)
        return {"shipped": order.parcels}

    session.register("ship_order", ship)
    result, _told = await turn(build, session, call("remote_ship_order", order={"city": "Oslo", "parcels": 2}))
    (made,) = result.steps[0].calls
    assert (seen, made.ok, made.result) == ([Order("Oslo", 2)], True, '{"shipped": 2}')


async def test_bad_arguments_are_told_and_nothing_runs(build, session):
    """The session's own validation answers, with the path of the fault."""
    ran = []
    session.register(
        "ship_order",
        ran.append,
        input_schema={"type": "object", "properties": {"order": {"type": "integer"}}, "required": ["order"]},
    )
    result, told = await turn(build, session, call("remote_ship_order", order="x"))
    (made,) = result.steps[0].calls
    assert (ran, made.ok) == ([], False)
    assert "order" in told


async def test_a_raising_function_is_an_answer(build, session):
    """A failure is told in the session's redacted words; the turn goes on."""

    def broken():
        raise ValueError("password=hunter2 is wrong")

    session.register("broken", broken)
    result, told = await turn(build, session, call("remote_broken"))
    (made,) = result.steps[0].calls
    assert (result.status, made.ok) == ("final", False)
    assert "remote skill broken failed" in told
    assert "hunter2" not in told + str(made)


async def test_a_sync_session_does_not_run_on_the_loop(build):
    """A blocking function of a sync session runs in a thread."""
    session = RemoteSkillsFacade(NoServer()).session("thread-1")
    where = []
    session.register("block", lambda: where.append(threading.current_thread() is threading.main_thread()))
    await turn(build, session, call("remote_block"))
    assert where == [False]


async def test_an_unregistered_function_reads_as_unknown(build, session):
    """A function that was taken away after the system opened is answered, not raised."""
    session.register("gone", lambda: 1)
    model = ScriptedModel([call("remote_gone"), say("done")])
    system = build(model=model, remote=session)
    async with system:
        session.unregister("gone")
        result = await ReactSolver(system).run("x")
    assert result.steps[0].calls[0].ok is False
    assert "no remote skill registered for gone" in str(model.requests[-1].messages)


async def test_namespaces_are_part_of_the_name(build, session):
    """A namespaced function is `remote.<namespace>.<name>`."""
    session.register("find", lambda: "here", namespace="crm")
    result, _told = await turn(build, session, call("remote_crm_find"))
    (made,) = result.steps[0].calls
    assert (made.tool, made.ok, made.result) == ("remote.crm.find", True, "here")


async def test_images_are_named(build, session):
    """What a function answers beside text is named in its place, because a solver's answers are text."""
    items = [
        {"type": "inputText", "text": "a parcel"},
        {"type": "inputImage", "imageUrl": "data:image/png;base64,AA=="},
        {"type": "inputAudio", "audioUrl": "data:audio/wav;base64,AA=="},
    ]
    session.register("photo", lambda: {"contentItems": items, "success": True})
    result, told = await turn(build, session, call("remote_photo"))
    (made,) = result.steps[0].calls
    assert (made.ok, made.result) == (True, "a parcel\n[inputImage]\n[inputAudio]")
    assert "base64" not in told


@pytest.mark.parametrize("name", ["model_config", "model_extra", "copy", "_x", "self", "__class__", "class"])
async def test_arguments_of_odd_names(build, session, name):
    """Any name a JSON object may have reaches the function, also those that mean something in Python."""
    seen = []
    session.register("odd", lambda **given: seen.append(given))
    await turn(build, session, call("remote_odd", **{name: 1}))
    assert seen == [{name: 1}]

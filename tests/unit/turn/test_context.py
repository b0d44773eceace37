"""What is active: set by handles, reset on every exit, never made up."""

from __future__ import annotations

import ast
import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import kdskills.turn
from kdskills.errors import ContextOrder, NoActiveSkills
from kdskills.turn import (
    bound,
    build_skill_short_id_map,
    build_skills_instruction_block,
    get_active_skills_subsystem,
    get_active_view,
    get_skill,
    import_skillset,
    resolve_skill_ref,
    set_active_skills_subsystem,
    skills_for_consumer,
    skills_gallery_text,
)

CALLS = [
    get_active_skills_subsystem,
    get_active_view,
    lambda: get_skill("a"),
    lambda: resolve_skill_ref("a"),
    lambda: skills_for_consumer("w"),
    lambda: import_skillset(["a"]),
    build_skill_short_id_map,
    skills_gallery_text,
    lambda: build_skills_instruction_block(["a"]),
    lambda: bound(print),
]


def nothing_active() -> bool:
    """Whether nothing is active here."""
    try:
        get_active_skills_subsystem()
    except NoActiveSkills:
        return True
    return False


@pytest.mark.parametrize("call", CALLS)
def test_nothing_active_is_an_error(call) -> None:
    """Every facade function raises when nothing is active; none makes anything up."""
    with pytest.raises(NoActiveSkills) as caught:
        call()
    assert (caught.value.code, caught.value.who) == ("no_active_subsystem", "caller")
    assert nothing_active()


def test_activate_is_the_view(write, build) -> None:
    """`activate` gives the view, puts it in force inside, and nothing after."""
    write("a.x")
    subsystem = build()
    with subsystem.activate("w", ["t"], include_internal=True) as view:
        assert (view.consumer, view.tools, view.include_internal) == ("w", frozenset({"t"}), True)
        assert get_active_skills_subsystem() is subsystem
        assert get_active_view() is view
    assert nothing_active()


def test_activate_acts_on_entering(build) -> None:
    """Calling `activate` alone changes nothing."""
    build().activate("w")
    assert nothing_active()


def test_nested_and_failing_exits_reset(build) -> None:
    """Each exit puts back what was before, also when the block fails."""
    one, two = build(), build()
    inside: list[object] = []
    with one.activate("w"):
        with pytest.raises(IndexError), two.activate("v"):
            inside.append(get_active_skills_subsystem()) or inside[7]
        assert inside == [two]
        assert get_active_skills_subsystem() is one
        with two.activate("v"):
            pass
        assert get_active_view().consumer == "w"
    assert nothing_active()


def test_a_block_that_cannot_be_entered_changes_nothing(build) -> None:
    """When the view cannot be made, nothing becomes active."""
    with pytest.raises(TypeError), build().activate("w", [object()]):
        pass
    assert nothing_active()


def test_set_active_acts_at_once(build) -> None:
    """The handle is in force without entering it; leaving or closing it puts back what was before."""
    one, two = build(), build()
    handle = set_active_skills_subsystem(one, consumer="w", tools=["t"])
    assert (get_active_skills_subsystem(), handle.view.consumer, handle.view.tools) == (one, "w", frozenset({"t"}))
    with set_active_skills_subsystem(two) as inner:
        assert (get_active_view(), inner.view.consumer) == (inner.view, None)
    assert get_active_skills_subsystem() is one
    handle.close()
    handle.close()
    assert nothing_active()


def test_closing_out_of_order_raises(build) -> None:
    """An activation under another one cannot be closed, and nothing is lost by trying."""
    one, two = build(), build()
    first = set_active_skills_subsystem(one)
    second = set_active_skills_subsystem(two)
    with pytest.raises(ContextOrder) as caught:
        first.close()
    assert caught.value.code == "context_order"
    assert get_active_skills_subsystem() is two
    second.close()
    first.close()
    assert nothing_active()


def test_closing_in_another_context_raises(build) -> None:
    """A handle is closed where it was made, not in a copy of that context nor in an empty one."""
    handle = set_active_skills_subsystem(build())
    for context in (contextvars.copy_context(), contextvars.Context()):
        with pytest.raises(ContextOrder):
            context.run(handle.close)
    handle.close()
    assert nothing_active()


def test_leaving_a_block_out_of_order_raises(build) -> None:
    """A `with` block left while another activation is open on top says so."""
    inner = None
    with pytest.raises(ContextOrder), build().activate("w"):
        inner = set_active_skills_subsystem(build())
    assert inner is not None
    inner.close()
    assert get_active_view().consumer == "w"
    _unwind()
    assert nothing_active()


def _unwind() -> None:
    """Close what a failed block left open."""
    from kdskills.turn.subsystem import current

    current().close()


def test_plain_threads_see_nothing(build) -> None:
    """A thread starts with nothing active, and what it activates stays its own."""
    seen: list[bool] = []
    other = build()

    def work() -> None:
        seen.append(nothing_active())
        with other.activate():
            seen.append(get_active_skills_subsystem() is other)

    with build().activate("w") as view:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert get_active_view() is view
    assert seen == [True, True]


def test_bound_carries_into_threads(build) -> None:
    """`bound` carries what is active, keeps name, arguments and errors, and leaves nothing behind in the thread."""
    subsystem = build()

    def work(number: int, *, more: int = 0) -> tuple[object, int]:
        if number < 0:
            raise ValueError("negative")
        return get_active_skills_subsystem(), number + more

    with ThreadPoolExecutor(1) as pool:
        with subsystem.activate("w"):
            carried = bound(work)
            assert pool.submit(work, 1).exception().__class__ is NoActiveSkills
        assert pool.submit(carried, 1, more=2).result() == (subsystem, 3)
        assert isinstance(pool.submit(carried, -1).exception(), ValueError)
        assert pool.submit(nothing_active).result()
    assert carried.__name__ == "work"


async def test_run_in_executor_needs_bound(build) -> None:
    """`run_in_executor` carries nothing; `bound` does; many at once do not disturb one another."""
    loop = asyncio.get_running_loop()
    with build().activate("w") as view:
        assert await loop.run_in_executor(None, nothing_active)
        carried = bound(get_active_view)
        found = await asyncio.gather(*(loop.run_in_executor(None, carried) for _ in range(20)))
        assert set(found) == {view}


async def test_bound_coroutine_functions(build) -> None:
    """A bound coroutine function has it in force while it runs, across its awaits."""

    async def work() -> object:
        await asyncio.sleep(0)
        return get_active_view()

    with build().activate("w") as view:
        carried = bound(work)
    assert await carried() is view
    assert nothing_active()


async def test_fifty_tasks_with_their_own(write, build) -> None:
    """Fifty tasks at once, each with its own subsystem and consumer, see their own and inherit the outer one."""
    write("a.x")
    outer = build()
    subsystems = [build({f"c{number}": {"disabled": ["a.x"]} if number % 2 else {}}) for number in range(50)]

    async def turn(number: int) -> None:
        assert get_active_skills_subsystem() is outer
        with subsystems[number].activate(f"c{number}"):
            for _ in range(5):
                await asyncio.sleep(0)
                assert get_active_skills_subsystem() is subsystems[number]
                assert get_active_view().consumer == f"c{number}"
                assert (get_skill("a.x") is None) is bool(number % 2)
        assert get_active_skills_subsystem() is outer

    with outer.activate():
        await asyncio.gather(*(turn(number) for number in range(50)))
    assert nothing_active()


async def test_tasks_inherit_and_keep_their_own_changes(build) -> None:
    """A task has what was active when it was made; what it sets does not leak out."""
    one, two = build(), build()

    async def work() -> object:
        before = get_active_skills_subsystem()
        set_active_skills_subsystem(two)
        return before

    with one.activate():
        task = asyncio.create_task(work())
    assert nothing_active()
    assert await task is one
    assert nothing_active()


async def test_cancelled_task_resets(build) -> None:
    """Cancelling inside a block leaves through its reset."""
    left: list[bool] = []

    async def work() -> None:
        try:
            with build().activate("w"):
                await asyncio.sleep(60)
        finally:
            left.append(nothing_active())

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left == [True]


def test_turn_needs_no_asyncio(repo) -> None:
    """No module of the room imports asyncio: it also runs inside a sandbox, where starting is dear."""
    for path in (repo / "kdskills" / "turn").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", [])] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert "asyncio" not in names


def test_exports_are_sorted() -> None:
    """The room's names are a sorted list, all there."""
    names = kdskills.turn.__all__
    assert sorted(names) == list(names)
    assert [name for name in names if not hasattr(kdskills.turn, name)] == []

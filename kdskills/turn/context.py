"""Which subsystem and view are in force here: one context variable, set and reset by handles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from functools import wraps
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from kdskills.errors import ContextOrder, NoActiveSkills

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from types import TracebackType

    from kdskills.turn.subsystem import SkillsSubsystem
    from kdskills.turn.view import SkillView

P = ParamSpec("P")
R = TypeVar("R")


class Activation:
    """A subsystem and a view in force since this handle was made, until it is closed.

    Use it as a context manager, or close it yourself: in the same context, the last one first.
    """

    def __init__(self, subsystem: SkillsSubsystem, view: SkillView) -> None:
        self.subsystem = subsystem
        self.view = view
        self._token: Token[Activation | None] | None = None

    def open(self) -> Activation:
        """Put the view in force here."""
        self._token = _ACTIVE.set(self)
        return self

    def close(self) -> None:
        """Put back what was in force before. Closing twice does nothing.

        Raises:
            ContextOrder: Another activation is still open on top of this one, or this is another context.
        """
        if self._token is None:
            return
        if _ACTIVE.get() is not self:
            raise ContextOrder("close the activation opened last first, in the context it was opened in")
        try:
            _ACTIVE.reset(self._token)
        except ValueError as error:
            raise ContextOrder("an activation is closed in the context it was opened in") from error
        self._token = None

    def __enter__(self) -> Activation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


_ACTIVE: ContextVar[Activation | None] = ContextVar("kdskills_active", default=None)


def current() -> Activation:
    """Return what is in force here.

    Raises:
        NoActiveSkills: Nothing is; none is made up.
    """
    active = _ACTIVE.get()
    if active is None:
        raise NoActiveSkills("no skills are active here: use subsystem.activate(...), or bound(fn) for threads")
    return active


def get_active_skills_subsystem() -> SkillsSubsystem:
    """Return the subsystem in force in this context.

    Raises:
        NoActiveSkills: Nothing is active; plain threads start with nothing.
    """
    return current().subsystem


def get_active_view() -> SkillView:
    """Return the view in force in this context.

    Raises:
        NoActiveSkills: Nothing is active.
    """
    return current().view


def set_active_skills_subsystem(
    subsystem: SkillsSubsystem, *, consumer: str | None = None, tools: Iterable[Any] | str | None = None
) -> Activation:
    """Put a subsystem in force at once, for entry points.

    Args:
        subsystem: What becomes active.
        consumer: Whose view; None is an anonymous consumer.
        tools: The consumer's tools; None for no tool gate.

    Returns:
        A handle that is a context manager; leaving or closing it puts back what was in force before.
    """
    return Activation(subsystem, subsystem.view(consumer, tools)).open()


@contextmanager
def activated(subsystem: SkillsSubsystem, view: SkillView) -> Iterator[SkillView]:
    """Put *view* in force for a `with` block, and put back what was before on every exit."""
    with Activation(subsystem, view).open():
        yield view


def bound(fn: Callable[P, R]) -> Callable[P, R]:
    """Return *fn* with what is active here in force wherever it runs, such as in a thread.

    Raises:
        NoActiveSkills: Nothing is active to carry.
    """
    active = current()

    if iscoroutinefunction(fn):
        awaitable = cast("Callable[P, Awaitable[Any]]", fn)

        @wraps(fn)
        async def later(*args: P.args, **kwargs: P.kwargs) -> Any:
            with activated(active.subsystem, active.view):
                return await awaitable(*args, **kwargs)

        return cast("Callable[P, R]", later)

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with activated(active.subsystem, active.view):
            return fn(*args, **kwargs)

    return call

"""Make thousands of objects at once, without what Python does for each of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field, fields, make_dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector from running inside: it would look at all skills again for every few hundred new ones.

    The collector is one for the process: another thread's cycles wait as long. It is turned on again by whoever turned it
    off, never by anybody else.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def maker_of(cls: type[T]) -> Callable[..., T]:
    """Return what makes instances of a frozen dataclass with slots, taking what the class takes.

    The class's own way sets each field by a call that goes around its lock, which is most of what making a skill costs. This
    one fills a twin without the lock, which lies in memory alike, and then says what it is.

    Args:
        cls: A frozen dataclass with slots and without `__post_init__`.
    """
    rows = [
        (each.name, Any, field(default=each.default, default_factory=each.default_factory))
        for each in fields(cls)  # type: ignore[arg-type]
    ]
    twin = make_dataclass(cls.__name__, rows, slots=True, repr=False, eq=False)

    def make(*values: Any, **keywords: Any) -> T:
        instance: Any = twin(*values, **keywords)
        instance.__class__ = cls
        typed_instance: T = instance
        return typed_instance

    return make

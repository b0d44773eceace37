"""Annotations as types: each is resolved on its own, so that one unknown name spoils nothing else."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import InitVar
from typing import Annotated, Any, ClassVar, Final, ForwardRef, NotRequired, Required, TypeVar

from kdskills.remote.ports import RemoteCall

_CALL = RemoteCall.__name__


def target_of(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function whose annotations and docstring speak for a handler."""
    target: Any = handler
    while isinstance(target, functools.partial):
        target = target.func
    if not inspect.isroutine(target) and not inspect.isclass(target):
        target = getattr(type(target), "__call__", target)  # noqa: B004 - the function behind it is wanted, not a yes or no
    unwrapped: Callable[..., Any] = inspect.unwrap(target)
    return unwrapped


def scope_of(handler: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the global and the enclosing names a handler's annotations may use."""
    function = target_of(handler)
    if inspect.isclass(function):
        return module_names(function), {}
    function = getattr(function, "__func__", function)
    cells = zip(
        getattr(getattr(function, "__code__", None), "co_freevars", ()),
        getattr(function, "__closure__", None) or (),
        strict=False,
    )
    return dict(getattr(function, "__globals__", {})), {name: value for name, cell in cells for value in _content(cell)}


def module_names(cls: type) -> dict[str, Any]:
    """Return the names of the module a class was written in."""
    return dict(vars(sys.modules.get(cls.__module__, types.ModuleType("none"))))


def resolve(annotation: object, names: Mapping[str, Any], local: Mapping[str, Any]) -> Any:
    """Return the type an annotation means, and `Any` when a name in it is unknown.

    An unknown `RemoteCall`, imported for type checkers only, is known all the same.
    """
    holder = type("Holder", (), {"__annotations__": {"it": annotation}})  # of a class, where `ClassVar` is allowed
    try:
        return typing.get_type_hints(holder, dict(names), dict(local), include_extras=True)["it"]
    except Exception:  # noqa: BLE001 - an annotation is the handler's own code and may fail in any way: unresolvable is `{}`
        spelt = annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else annotation
        return RemoteCall if isinstance(spelt, str) and _names_call(spelt) else Any


def class_hints(cls: type) -> dict[str, Any]:
    """Return the annotations of a class and its bases, each resolved where it was written."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        annotations = inspect.get_annotations(base)
        # Of the class's own names only classes inside it: a field `date: date = None` must not hide the type by its default.
        local = {name: inner for name, inner in vars(base).items() if inspect.isclass(inner)} | {base.__name__: base}
        names = module_names(base)
        hints.update({name: resolve(annotation, names, local) for name, annotation in annotations.items()})
    return hints


def parameters_of(handler: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return a handler's parameters with resolved annotations; None when Python cannot tell them."""
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return None
    names, local = scope_of(handler)
    return [
        parameter
        if parameter.annotation is parameter.empty
        else parameter.replace(annotation=resolve(parameter.annotation, names, local))
        for parameter in signature.parameters.values()
    ]


def return_of(handler: Callable[..., Any]) -> Any:
    """Return what a handler says it returns, coroutines unwrapped; `inspect.Signature.empty` when it says nothing."""
    try:
        annotation = inspect.signature(handler).return_annotation
    except (TypeError, ValueError):
        return inspect.Signature.empty
    if annotation is inspect.Signature.empty or inspect.isclass(target_of(handler)):
        return inspect.Signature.empty
    resolved = resolve(annotation, *scope_of(handler))
    origin, arguments = typing.get_origin(resolved), typing.get_args(resolved)
    if origin is not None and getattr(origin, "__name__", "") in {"Awaitable", "Coroutine"} and arguments:
        return arguments[-1]
    return resolved


def is_call(annotation: object) -> bool:
    """Whether a parameter of this annotation takes the `RemoteCall`."""
    if annotation is RemoteCall:
        return True
    return is_union(annotation) and RemoteCall in typing.get_args(annotation)


def is_union(annotation: object) -> bool:
    """Whether an annotation is `X | Y`, in either spelling."""
    return typing.get_origin(annotation) in {typing.Union, types.UnionType}


def bare(annotation: Any) -> Any:
    """Return an annotation without its wrappers: `Annotated`, `Required`, `Final`, `InitVar`, `NewType`, type variables."""
    while True:
        origin = typing.get_origin(annotation)
        if origin is Annotated or origin in {Required, NotRequired, Final}:
            annotation = typing.get_args(annotation)[0]
        elif isinstance(annotation, InitVar):
            annotation = annotation.type
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif isinstance(annotation, TypeVar):
            annotation = annotation.__bound__ or Any
        elif hasattr(annotation, "__value__") and type(annotation).__name__ == "TypeAliasType":
            annotation = annotation.__value__
        else:
            return annotation


def note_of(annotation: Any) -> str | None:
    """Return the description an `Annotated` carries, as text or in an object's `description`."""
    for extra in getattr(annotation, "__metadata__", ()):
        note = extra if isinstance(extra, str) else getattr(extra, "description", None)
        if isinstance(note, str) and note.strip():
            return note
    return None


def is_class_variable(annotation: object) -> bool:
    """Whether an annotation is of the class, not of its objects."""
    return annotation is ClassVar or typing.get_origin(annotation) is ClassVar


def substitute(annotation: Any, variables: Mapping[Any, Any]) -> Any:
    """Return an annotation of a generic class with its type variables filled in."""
    if isinstance(annotation, TypeVar):
        return variables.get(annotation, annotation)
    parameters = getattr(annotation, "__parameters__", ())
    if variables and parameters and not inspect.isclass(annotation):
        return annotation[tuple(variables.get(name, name) for name in parameters)]
    return annotation


def _content(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # a name of the enclosing function that has no value yet
        return []


def _names_call(spelt: str) -> bool:
    words = {part.strip().rpartition(".")[2] for part in spelt.replace("Optional[", "").replace("]", "").split("|")}
    return _CALL in words

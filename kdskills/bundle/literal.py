"""Reading a Python descriptor as data: what it assigns is understood from its text, and nothing of it runs.

A descriptor that only assigns literals says the same whether it is run or read. Whatever else stands in it, be it an
import or a call, is code, and is refused here with the line it begins at.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

from kdskills.errors import BundleError

MAX_LITERAL: Final = 256 * 1024
"""Bytes of Python that are parsed to be read: parsing takes a hundred times their room."""
MAX_DEPTH: Final = 50
ENCODINGS: Final = frozenset({"utf-8", "utf-8-sig"})


def read_assignments(data: bytes, path: Path) -> dict[str, Any]:
    """Return the names that Python source assigns literals to, with their values; the later assignment counts.

    Args:
        data: The source.
        path: Where it lies, for errors.

    Raises:
        BundleError: `bundle_untrusted`: it holds code. `bundle_python_failed`: it is no Python. `bundle_unreadable`: it
            is too large or nested too deep to be read.
    """
    if len(data) > MAX_LITERAL:
        _unreadable(path, f"larger than {MAX_LITERAL} bytes, and so not read as data; write it as JSON or YAML")
    try:
        if tokenize.detect_encoding(io.BytesIO(data).readline)[0] not in ENCODINGS:
            raise untrusted(path, 1, "it names another encoding than UTF-8")
        tree = ast.parse(data, str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        words = getattr(error, "msg", None) or str(error)
        message = f"{path.name}, line {line}: {type(error).__name__}: {words}"
        raise BundleError(message, code="bundle_python_failed", file=path.name, line=line) from error
    except (MemoryError, RecursionError) as error:
        _unreadable(path, "nested too deep to be read", error)
    assignments: dict[str, Any] = {}
    for statement in tree.body:
        value = _assigned(statement, path)
        if value is not None:
            assignments.update(dict.fromkeys(_targets(statement, path), _value(value, path)))
    return assignments


def untrusted(path: Path, line: int, reason: str) -> BundleError:
    """Return the error of code that was not run, for the person who may say that it should."""
    message = (
        f"{path.name}, line {line}: {reason}. Code of a bundle runs with your rights, and nothing of it was run: "
        "read it, then pass --trust"
    )
    return BundleError(message, code="bundle_untrusted", who="caller", file=path.name, line=line)


def _assigned(statement: ast.stmt, path: Path) -> ast.expr | None:
    """Return the value that a statement assigns; None for docstrings and what only the compiler reads."""
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return statement.value
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return None
    if isinstance(statement, ast.Pass) or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
        return None
    raise untrusted(path, statement.lineno, "it holds code, not only literals")


def _targets(statement: ast.stmt, path: Path) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    if len(names) != len(targets):
        raise untrusted(path, statement.lineno, "it assigns to more than a name")
    return names


def _value(node: ast.expr, path: Path, depth: int = 0) -> Any:
    """Return the value of a literal."""
    if depth > MAX_DEPTH:
        _unreadable(path, f"line {node.lineno} is nested more than {MAX_DEPTH} deep")
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = node.operand.value if isinstance(node.operand, ast.Constant) else None
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number
    elif isinstance(node, ast.Dict) and None not in node.keys:
        keys = [_value(key, path, depth + 1) for key in node.keys if key is not None]
        values = [_value(item, path, depth + 1) for item in node.values]
        return _hashed(lambda: dict(zip(keys, values, strict=True)), node, path)
    elif isinstance(node, ast.List | ast.Tuple | ast.Set):
        items = [_value(item, path, depth + 1) for item in node.elts]
        return _hashed(lambda: _MAKERS[type(node)](items), node, path)
    raise untrusted(path, node.lineno, "it holds code, not only literals")


def _hashed(make: Callable[[], Any], node: ast.expr, path: Path) -> Any:
    try:
        return make()
    except TypeError as error:
        message = f"{path.name}, line {node.lineno}: TypeError: {error}"
        raise BundleError(message, code="bundle_python_failed", file=path.name, line=node.lineno) from error


def _unreadable(path: Path, reason: str, cause: BaseException | None = None) -> NoReturn:
    raise BundleError(f"{path.name}: {reason}", code="bundle_unreadable", file=path.name) from cause


_MAKERS: Final[Mapping[type[ast.expr], Callable[[list[Any]], Any]]] = MappingProxyType(
    {ast.List: list, ast.Tuple: tuple, ast.Set: set}
)

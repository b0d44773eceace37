"""Loading a bundle from its folder."""

from __future__ import annotations

import ast
import io
import json
import os
import stat
import tokenize
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final, Literal, NoReturn, get_args

from kdskills.bundle.descriptor import (
    ALLOWED_TOOLS_MODES,
    CATALOG_MODES,
    CHECK_KEYS,
    EVERYONE,
    IMPORT_POLICIES,
    TRUST_LEVELS,
    UPPER,
    SkillsDescriptor,
    lies_inside,
    refuse,
    resembling,
)
from kdskills.errors import BundleError, DescriptorError, Diagnostic, FileRefused, StrPath, path_argument
from kdskills.skills.safe_open import is_folder, read_file
from kdskills.skills.yaml_core import YamlLimits, YamlRefused, load_yaml, to_python

PythonPolicy = Literal["execute", "read", "refuse"]
"""What is done with Python of a bundle: it runs, is read as data if it is literal, or is refused."""

NAMES = ("skills_descriptor.py", "skills_descriptor.yaml", "skills_descriptor.json")
MAX_DESCRIPTOR = 1024 * 1024
DESCRIPTOR_NAME = "SKILLS_DESCRIPTOR"
YAML_LIMITS = YamlLimits(nodes=100_000, size=MAX_DESCRIPTOR)
MAX_LITERAL: Final = 256 * 1024
"""Bytes of Python that are parsed to be read: parsing takes a hundred times their room."""
MAX_DEPTH: Final = 50
ENCODINGS: Final = frozenset({"utf-8", "utf-8-sig"})


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle as found in its folder.

    Attributes:
        root: The folder, with links followed.
        name: The folder's name.
        descriptor: Where its skills are and who may use which; `bundle_root` is the folder.
        tools_path: `tools.py`, or None.
        demo_path: `demo.yaml`, or None.
        diagnostics: Warnings about the descriptor and the folder.
        trusted: Whether code of the folder may run, `tools.py` too: it was loaded with `python="execute"`.
    """

    root: Path
    name: str
    descriptor: SkillsDescriptor
    tools_path: Path | None = None
    demo_path: Path | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    trusted: bool = True


def load_bundle(
    path: StrPath,
    *,
    python: PythonPolicy = "execute",
    allow_outside_bundle: bool = False,
) -> Bundle:
    """Load a bundle.

    To a program that says nothing else, the folder is trusted: a `skills_descriptor.py` runs in this process. Its own
    `allow_outside_bundle` and `bundle_root` do not count; only the caller can let a bundle's file point out of it.

    Args:
        path: The bundle's folder.
        python: `execute` trusts the folder. `read` runs nothing: a descriptor of literals is read as data. `refuse`
            refuses a descriptor in Python. Only a bundle loaded with `execute` lets a solver run its `tools.py`.
        allow_outside_bundle: Whether the descriptor's root may lie outside the folder.

    Raises:
        BundleError: The folder cannot be loaded: `bundle_missing`, `bundle_empty`, `bundle_ambiguous`,
            `bundle_file_refused`, `bundle_python_refused`, `bundle_untrusted`, `bundle_python_failed`,
            `bundle_unreadable`.
        DescriptorError: The descriptor says something not understood.
    """
    if python not in get_args(PythonPolicy):
        raise TypeError(f"python is 'execute', 'read' or 'refuse', not {python!r}")
    root = _folder(path_argument(path, "path"))
    if root is None:
        raise BundleError(f"there is no bundle folder at {path}", code="bundle_missing", path=str(path))
    descriptor_names = [name for name in NAMES if os.path.lexists(root / name)]
    if len(descriptor_names) > 1:
        message = f"a bundle has one descriptor, this has {', '.join(descriptor_names)}"
        raise BundleError(message, code="bundle_ambiguous", files=descriptor_names)
    if not descriptor_names and not is_folder(root / "skills"):
        message = f"{path} is no bundle: it has neither a skills_descriptor nor a folder skills/ that can be seen"
        raise BundleError(message, code="bundle_empty", path=str(path))
    findings: list[Diagnostic] = []
    file_name = descriptor_names[0] if descriptor_names else None
    try:
        content = _read(root, file_name, python) if file_name else {}
        descriptor = _fixed_descriptor(content, root, file_name, allow_outside_bundle, findings)
    except DescriptorError as error:
        if file_name is None:
            raise
        words, file_facts = f"{file_name}: {error.message}", {**error.details, "file": file_name}
        raise DescriptorError(words, code=error.code, who="author", **file_facts) from error
    return Bundle(
        root=root,
        name=root.name,
        descriptor=descriptor,
        tools_path=_optional_file(root, "tools.py", findings),
        demo_path=_optional_file(root, "demo.yaml", findings),
        diagnostics=(*descriptor.diagnostics, *findings),
        trusted=python == "execute",
    )


def _folder(path: Path) -> Path | None:
    """Return the folder at *path* with links followed, or None; no file-system state and no text raises."""
    try:
        root = os.path.realpath(path)
    except (OSError, ValueError):
        return None
    return Path(root) if is_folder(root) else None


def _read(root: Path, name: str, python: str) -> Mapping[str, Any]:
    """Return what the descriptor file says, not yet understood."""
    if name.endswith(".py") and python == "refuse":
        raise BundleError(f"{name} is Python, and running it was not allowed", code="bundle_python_refused", file=name)
    try:
        data = read_file(root, name, limit=MAX_DESCRIPTOR).data
    except FileRefused as error:
        raise BundleError(f"{name} cannot be used: {error}", code="bundle_file_refused", file=name) from error
    suffix = "literal" if python == "read" and name.endswith(".py") else name.rpartition(".")[2]
    value = _READERS[suffix](data, root / name)
    if not isinstance(value, Mapping):
        raise refuse("descriptor_type", "descriptor", f"a mapping, not {type(value).__name__}")
    return value


def _python(data: bytes, path: Path) -> Mapping[str, Any]:
    """Run the file in a namespace of its own, outside `sys.modules`, and pick the names that mean something."""
    namespace: dict[str, Any] = {"__name__": "skills_descriptor", "__file__": str(path)}
    try:
        code = compile(data, str(path), "exec", dont_inherit=True)
        exec(code, namespace)  # noqa: S102 - a bundle's Python descriptor is trusted code, by contract
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        line = _line(error, str(path))
        words = traceback.format_exception_only(type(error), error)[-1].strip()
        message = f"{path.name}, line {line}: {words}"
        raise BundleError(message, code="bundle_python_failed", file=path.name, line=line) from error
    return _meaningful_names(namespace)


def _meaningful_names(namespace: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the names of a Python descriptor that mean something. Raises DescriptorError for those close to one."""
    known_names = (*UPPER.values(), DESCRIPTOR_NAME)
    for name, value in namespace.items():
        if name in known_names or name.startswith("_") or isinstance(value, (type, ModuleType)):
            continue
        suggestion = resembling(name, known_names)
        if suggestion is not None:
            raise refuse("descriptor_unknown_key", name, f"not read; did you mean {suggestion}?")
    assignments = {name: namespace[name] for name in UPPER.values() if name in namespace}
    if DESCRIPTOR_NAME not in namespace:
        return assignments
    if assignments:
        message = f"beside {DESCRIPTOR_NAME} there is {', '.join(assignments)}; say it in one place"
        raise refuse("descriptor_conflict", DESCRIPTOR_NAME, message)
    descriptor = namespace[DESCRIPTOR_NAME]
    if not isinstance(descriptor, dict):
        raise refuse("descriptor_type", DESCRIPTOR_NAME, f"a dict, not {type(descriptor).__name__}")
    return descriptor


def _line(error: BaseException, path: str) -> int:
    """Return the line of the descriptor at which *error* came up; 1 when it names none."""
    if isinstance(error, SyntaxError) and error.filename == path and error.lineno:
        return error.lineno
    # Not `extract_tb`: it reads sources through a cache all threads share, and which breaks when two of them use it.
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == path]
    return next((line for line in reversed(lines) if line), 1)


def _yaml(data: bytes, path: Path) -> Any:
    try:
        document = load_yaml(_text(data), YAML_LIMITS)
    except UnicodeDecodeError as error:
        _unreadable(path, "it is no UTF-8", None, error)
    except YamlRefused as error:
        _unreadable(path, error.message, None if error.position is None else error.position[0] + 1, error)
    if document.duplicates:
        key, mark = document.duplicates[0]
        _unreadable(path, f"the key {key!r} stands twice", mark.line + 1)
    return to_python(document.root)


def _text(data: bytes) -> str:
    return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def _json(data: bytes, path: Path) -> Any:
    try:
        return json.loads(_text(data), object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        _unreadable(path, error.msg, error.lineno, error)
    except RecursionError as error:
        _unreadable(path, "it is nested too deep", None, error)
    except ValueError as error:
        _unreadable(path, "it is no UTF-8" if isinstance(error, UnicodeDecodeError) else str(error), None, error)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        twice = next(key for index, (key, _) in enumerate(pairs) if key in {name for name, _ in pairs[:index]})
        raise ValueError(f"the key {twice!r} stands twice")
    return mapping


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _unreadable(path: Path, why: str, line: int | None = None, cause: BaseException | None = None) -> NoReturn:
    location = f"{path.name}, line {line}" if line else path.name
    raise BundleError(f"{location}: {why}", code="bundle_unreadable", file=path.name, line=line) from cause


_READERS: Mapping[str, Callable[[bytes, Path], Any]] = MappingProxyType(
    {
        "py": _python,
        "literal": lambda data, path: _meaningful_names(read_assignments(data, path)),
        "yaml": _yaml,
        "json": _json,
    }
)


def _fixed_descriptor(
    content: Mapping[str, Any], root: Path, name: str | None, allow: bool, findings: list[Diagnostic]
) -> SkillsDescriptor:
    """Understand the descriptor, and fix it to the bundle's folder."""
    written = SkillsDescriptor.from_json(content)
    for key in ("bundle_root", "allow_outside_bundle"):
        if key in content and getattr(written, key):
            message = f"{key} in a bundle's own file is ignored: only the caller decides it"
            findings.append(Diagnostic("descriptor_key_ignored", "warning", message, path=name, ref=key))
    fixed_fields: dict[str, Any] = {"bundle_root": str(root), "allow_outside_bundle": allow}
    custom_root = written.custom_skills_root
    if isinstance(custom_root, str) and Path(custom_root).is_absolute():
        if lies_inside(Path(custom_root), root):
            fixed_fields["custom_skills_root"] = Path(os.path.realpath(custom_root)).relative_to(root)
        elif not allow:
            message = f"{custom_root!r} lies outside the bundle; only the caller of load_bundle can allow that"
            raise refuse("descriptor_root_outside_bundle", "custom_skills_root", message)
    descriptor = SkillsDescriptor.from_json(written.to_json() | fixed_fields)
    descriptor.resolve_root()
    return descriptor


def _optional_file(root: Path, name: str, findings: list[Diagnostic]) -> Path | None:
    """Return a file of the bundle, or None; what is there but is no regular file is left out with a warning."""
    path = root / name
    if not os.path.lexists(path):
        return None
    if stat.S_ISREG(path.lstat().st_mode):
        return path
    message = f"{name} is not a regular file; it is not used"
    findings.append(Diagnostic("bundle_file_ignored", "warning", message, path=name))
    return None


def read_assignments(data: bytes, path: Path) -> dict[str, Any]:
    """Return the names that Python source assigns literals to, with their values; the later assignment counts.

    Raises BundleError: `bundle_untrusted` for code, `bundle_python_failed` for what is no Python, `bundle_unreadable`
    for what is too large or nested too deep to be read.
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
        _unreadable(path, "nested too deep to be read", None, error)
    assignments: dict[str, Any] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            if statement.value is None:  # only a type is told
                continue
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if len(names) != len(targets):
                raise untrusted(path, statement.lineno, "it assigns to more than a name")
            assignments.update(dict.fromkeys(names, _value(statement.value, path)))
        elif not (  # docstrings, and what only the compiler reads
            isinstance(statement, ast.Pass)
            or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
            or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")
        ):
            raise untrusted(path, statement.lineno, "it holds code, not only literals")
    return assignments


def untrusted(path: Path, line: int, reason: str) -> BundleError:
    """Return the error of code that was not run, for the person who may say that it should."""
    message = (
        f"{path.name}, line {line}: {reason}. Code of a bundle runs with your rights, and nothing of it was run: "
        "read it, then pass --trust"
    )
    return BundleError(message, code="bundle_untrusted", who="caller", file=path.name, line=line)


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
    try:
        if isinstance(node, ast.Dict) and None not in node.keys:
            pairs = zip(node.keys, node.values, strict=True)
            return {_value(key, path, depth + 1): _value(item, path, depth + 1) for key, item in pairs if key}
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return _MAKERS[type(node)]([_value(item, path, depth + 1) for item in node.elts])
    except TypeError as error:  # what no set and no key can be
        message = f"{path.name}, line {node.lineno}: TypeError: {error}"
        raise BundleError(message, code="bundle_python_failed", file=path.name, line=node.lineno) from error
    raise untrusted(path, node.lineno, "it holds code, not only literals")


_MAKERS: Final[Mapping[type[ast.expr], Callable[[list[Any]], Any]]] = {ast.List: list, ast.Tuple: tuple, ast.Set: set}


def descriptor_schema() -> dict[str, Any]:
    """Return the JSON Schema of a descriptor in YAML or JSON; what it refuses, `load_bundle` refuses, too."""
    text: dict[str, Any] = {"type": "string"}
    texts = {"anyOf": [text, {"type": "array", "items": text}, {"type": "null"}]}
    listed = texts | {"description": "Full ids, bare ids or patterns such as `acme.*`; one as text, or a list."}
    rules = {
        "enabled": {
            "anyOf": [listed, {"type": "boolean"}],
            "description": "Only what matches may be used; false: nothing.",
        },
        "disabled": {"anyOf": [listed, {"type": "boolean"}], "description": "What matches may not be used; true: all."},
        "imports": {"enum": list(IMPORT_POLICIES), "description": "How imports are decided."},
        "catalog": {"enum": [*CATALOG_MODES, None], "description": "What catalogs that do not fit list."},
    }
    policy: dict[str, Any] = {key: {"enum": [*levels, False]} for key, levels in TRUST_LEVELS.items()}
    policy["signers"] = {"anyOf": [texts, {"const": False}], "description": "Names of anchors that may sign."}

    def closed(properties: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "object", "properties": dict(properties), "additionalProperties": False}

    keys: dict[str, Any] = {
        "custom_skills_root": {
            "anyOf": [text, {"const": False}, {"type": "null"}],
            "description": "Folder of the skills.",
        },
        "agents_config": {
            "type": "object",
            "additionalProperties": closed(rules),
            "propertyNames": {"anyOf": [{"const": EVERYONE}, {"pattern": r"^[^*]*[^*\s][^*]*$"}]},
            "description": 'Rules by consumer; "*" denies to everybody, "@role" holds for users who have the role.',
        },
        "allowed_tools": {
            "type": "object",
            "additionalProperties": {"enum": list(ALLOWED_TOOLS_MODES)},
            "description": 'What `allowed-tools` of skills does, by namespace; "*": all others.',
        },
        "trust": {
            "type": "object",
            "additionalProperties": closed(policy),
            "description": 'What is asked of skills, by namespace; "*": all.',
        },
        "consumers": texts | {"description": "The agents the bundle has."},
        "public": listed | {"description": "Skills that anybody may fetch."},
        "check": closed(dict.fromkeys(CHECK_KEYS, texts))
        | {"description": "Codes of findings that are told, or left out."},
    }
    keys |= {UPPER[name]: schema for name, schema in keys.items()}
    keys |= {"version": {"const": 1}, "extra": {"type": "object"}}
    return {"title": "Descriptor of a bundle of skills", "type": "object", "properties": keys}

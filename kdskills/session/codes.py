"""The codes of the runtime tools, who must act on each, and the one way to raise them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final

from kdskills.errors import ToolCallRefused, Who


@dataclass(frozen=True, slots=True)
class ToolErrorCode:
    """One code: who must act, when it is given, and the one thing a model does next."""

    who: Who
    when: str
    next: str


CODES: Final[Mapping[str, ToolErrorCode]] = MappingProxyType(
    {
        "invalid_argument": ToolErrorCode(
            "model",
            "the arguments are out of shape, hold a NUL or a blank path, or pass a limit",
            "Send the call again with the arguments mended.",
        ),
        "skill_not_found": ToolErrorCode(
            "model", "the skill is unknown or refused; both read the same", "Load a skill by a name that is listed."
        ),
        "too_many_active": ToolErrorCode(
            "model",
            "the next set would hold more skills than the session allows",
            "Load with mode replace, or unload a skill first.",
        ),
        "active_budget_exceeded": ToolErrorCode(
            "model",
            "the next set would need more tokens than the budget for active skills",
            "Load this skill alone, with mode replace.",
        ),
        "no_active_skills": ToolErrorCode(
            "model", "nothing is loaded in this session", "Load a skill first, then send the call again."
        ),
        "skill_not_active": ToolErrorCode(
            "model", "this visible skill is not loaded", "Load this skill first, then send the call again."
        ),
        "path_denied": ToolErrorCode(
            "model",
            "the path has a form that is never followed, or leads over a link",
            "Give the path of a file as it is listed.",
        ),
        "resource_not_found": ToolErrorCode(
            "model", "there is no such file in the skill", "Give the path of a file that is there."
        ),
        "not_a_file": ToolErrorCode(
            "model", "the path names a directory or something that is no regular file", "Name a file, not a folder."
        ),
        "not_text": ToolErrorCode(
            "model",
            "the file is not UTF-8 text; read it as binary",
            "Do not read this file as text; use a program or the encoding binary.",
        ),
        "too_large": ToolErrorCode(
            "author", "the file is larger than max_read_bytes", "Do without this file, or work on it with a program."
        ),
        "skill_unreadable": ToolErrorCode(
            "author",
            "the skill's SKILL.md cannot be read or parsed now",
            "Go on without this skill, and tell the user that it cannot be read.",
        ),
        "extension_not_allowed": ToolErrorCode(
            "author",
            "no interpreter is registered for the script's suffix",
            "Run another script of the skill, or go on without it.",
        ),
        "run_disabled": ToolErrorCode(
            "operator",
            "scripts are switched off in this runtime",
            "Do not run scripts or programs here; answer without them, and say so.",
        ),
        "interpreter_missing": ToolErrorCode(
            "operator",
            "the interpreter is not installed in the executor",
            "Do not run this script again; answer without it, and say so.",
        ),
        "store_unavailable": ToolErrorCode(
            "operator",
            "the session store does not answer",
            "Answer with what you have, and say that the session cannot be reached.",
        ),
        "environment_missing": ToolErrorCode(
            "operator",
            "packages that the script needs are not locked or not built here",
            "Do not run this script again; answer without it, and say that its packages are missing.",
        ),
        "environment_lock_stale": ToolErrorCode(
            "operator",
            "the packages that are locked are not those the script asks for",
            "Do not run this script again; answer without it, and say that its packages are out of date.",
        ),
        "environment_conflict": ToolErrorCode(
            "operator",
            "loaded skills need different versions of one package",
            "Load the skill of this script alone, with mode replace, and run it again.",
        ),
        "environment_unusable": ToolErrorCode(
            "operator",
            "the lock or the built packages cannot be used here",
            "Do not run this script again; answer without it, and say that its packages cannot be used.",
        ),
        "executor_unavailable": ToolErrorCode(
            "operator",
            "no executor accepts the run; no defect of the script",
            "Do not run it again; answer without it, and say that nothing runs here.",
        ),
        "executor_failed": ToolErrorCode(
            "operator",
            "the executor broke; no defect of the script",
            "Send the call once more; when it fails again, answer without it, and say so.",
        ),
        "approval_denied": ToolErrorCode(
            "user", "a person or the configuration said no", "Do not try this again; go on without it, and say so."
        ),
        "approval_unavailable": ToolErrorCode(
            "operator",
            "the run needs approval and nobody can be asked",
            "Do not try this again; go on without it, and say that nobody could be asked.",
        ),
        "skill_denied": ToolErrorCode(
            "operator",
            "a policy plugin refused this action on a visible skill",
            "Do not try this again; go on without it, and say so.",
        ),
        "tool_not_found": ToolErrorCode("model", "there is no such tool", "Call one of the tools there are."),
        "conflict": ToolErrorCode(
            "caller", "five tries to commit were overtaken by other calls", "Send the call once more."
        ),
        "cancelled": ToolErrorCode("caller", "the call was cancelled", "Answer with what you have."),
    }
)
"""Every code a runtime tool answers with, in the order of the reference page."""

MAX_COMPARED: Final = 3
"""Unknown names of one call for which near ones are looked for: comparing texts is slow."""
MAX_ALIKE: Final = 40
_HOST_PATH: Final = re.compile(r"(?<![\w.:/…])/[^\s'\",;:()<>]+")

PATH_REASONS: Final = ("absolute", "dotdot", "backslash", "nul", "drive", "root", "symlink", "outside_scripts")
"""Values of `details.reason` under `path_denied`."""


def refuse(code: str, message: str, *, refusal: object | None = None, **details: Any) -> ToolCallRefused:
    """Build the error of *code*, with JSON-able *details*; *refusal* is kept on the error and never serialised."""
    error = ToolCallRefused(message, code=code, who=CODES[code].who, **details)
    error.refusal = refusal
    return error


def pathless(text: str) -> str:
    """Return *text* without absolute paths: what an engine says of this host is not for a model."""
    return _HOST_PATH.sub("…", text)


def invalid(message: str, *errors: tuple[str, str]) -> ToolCallRefused:
    """Build `invalid_argument` with `(JSON pointer, problem)` pairs."""
    return refuse("invalid_argument", message, errors=[{"path": path, "problem": problem} for path, problem in errors])


def not_found(requested: Iterable[str], visible: Iterable[str], refusals: tuple[object, ...] = ()) -> ToolCallRefused:
    """Build `skill_not_found` with up to 5 near names; the same for unknown and refused skills."""
    names = list(requested)
    pool = sorted(visible)
    similar: list[str] = []
    for name in map(str.casefold, names[:MAX_COMPARED]):
        trigrams = _trigrams(name)
        # only the names that share most runs of three characters are compared in full
        shared = sorted(((len(trigrams & _trigrams(candidate)), candidate) for candidate in pool), reverse=True)
        alike = sorted(candidate for count, candidate in shared[:MAX_ALIKE] if count)
        similar += [match for match in get_close_matches(name, alike, n=5, cutoff=0.5) if match not in similar]
        if len(similar) >= 5:
            break
    quoted_names = ", ".join(repr(name) for name in names)
    hint = f"; near names: {', '.join(similar[:5])}" if similar else ""
    message = f"no such skill: {quoted_names}{hint}"
    return refuse("skill_not_found", message, refusal=refusals, names=names, near=similar[:5])


def _trigrams(name: str) -> set[str]:
    text = f" {name} "
    return {text[start : start + 3] for start in range(len(text) - 2)}


def path_denied(path: str, reason: str) -> ToolCallRefused:
    """Build `path_denied` with one of `PATH_REASONS`."""
    problem = {
        "absolute": "begins with a slash; paths are relative to the skill's folder",
        "dotdot": "holds '..'; name the file from the skill's folder down",
        "backslash": "holds a backslash; use forward slashes",
        "nul": "holds a NUL character",
        "drive": "names a drive; paths are relative to the skill's folder",
        "root": "names the skill's folder itself; name a file in it",
        "symlink": "leads over a link, and links are never followed",
        "outside_scripts": "is not below scripts/",
    }[reason]
    return refuse("path_denied", f"the path {path!r} {problem}", path=path, reason=reason)

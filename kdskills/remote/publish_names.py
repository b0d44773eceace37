"""Names of published skills as a server accepts them, with the skills they stand for; no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from kdskills.remote.ports import CatalogError

if TYPE_CHECKING:
    from kdskills.turn import SkillView

PUBLIC: Final = "public"
LONGEST_ROOT: Final = 64
_FORBIDDEN: Final = re.compile(r"[^A-Za-z0-9_-]")


def folded(text: str) -> str:
    """Return a name with hyphens as underscores, as tools are named."""
    return text.replace("-", "_")


def tool_names(view: SkillView, python_tools: Iterable[str]) -> dict[str, tuple[str, str | None]]:
    """Return `{namespace.tool: (full id, tool id)}` of a view's listed skills; the tool id is None for the skill itself.

    Raises:
        CatalogError: Two skills or tools would have one name.
    """
    python_tool_ids = frozenset(python_tools)
    names: dict[str, tuple[str, str | None]] = {}
    for full_id, skill in view.listed.items():
        top = f"{skill.namespace}.{folded(skill.id)}"
        candidates: list[tuple[str, str | None]] = [(top, None)]
        candidates += [(f"{top}__{_word(tool.id)}", tool.id) for tool in skill.tools if tool.id in python_tool_ids]
        for name, tool_id in candidates:
            if name in names:
                raise _collision(name, names[name][0], full_id)
            names[name] = (full_id, tool_id)
    return names


def root_names(view: SkillView) -> dict[str, str]:
    """Return `{folder name: full id}` of a view's listed skills.

    Raises:
        CatalogError: Two skills would have one folder, or a name is too long.
    """
    names: dict[str, str] = {}
    for full_id, skill in view.listed.items():
        name = skill.id if skill.namespace == PUBLIC else f"{skill.namespace}-{skill.id}"
        if len(name) > LONGEST_ROOT:
            raise CatalogError(
                f"the folder of {full_id} would be called {name}, which is longer than {LONGEST_ROOT} characters",
                rule="root_name_long",
                suggestion="shorten the skill's id, or publish with route='tools'",
            )
        if name in names:
            raise _collision(name, names[name], full_id)
        names[name] = full_id
    return names


def _word(tool_id: str) -> str:
    """Return a tool id with underscores for characters that no name may contain."""
    return _FORBIDDEN.sub("_", folded(tool_id))


def _collision(name: str, first: str, second: str) -> CatalogError:
    return CatalogError(
        f"{first} and {second} would both be called {name}",
        rule="published_twice",
        suggestion="rename one of them, or grant only one to this consumer",
    )

"""Names of published skills: what a server takes, and the table back; no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from kdskills.remote.ports import CatalogError

if TYPE_CHECKING:
    from kdskills.turn import SkillView

PUBLIC: Final = "public"
LONGEST_ROOT: Final = 64


def folded(text: str) -> str:
    """Return a name with hyphens as underscores, as tools are named."""
    return text.replace("-", "_")


def tool_names(view: SkillView, python_tools: Iterable[str]) -> dict[str, tuple[str, str | None]]:
    """Return `{namespace.tool: (full id, tool id)}` of a view's listed skills; the tool id is None for the skill itself.

    Raises:
        CatalogError: Two skills or tools would have one name.
    """
    known = frozenset(python_tools)
    found: dict[str, tuple[str, str | None]] = {}
    for full_id, skill in view.listed.items():
        top = f"{skill.namespace}.{folded(skill.id)}"
        wanted: list[tuple[str, str | None]] = [(top, None)]
        wanted += [(f"{top}__{_word(tool.id)}", tool.id) for tool in skill.tools if tool.id in known]
        for name, tool_id in wanted:
            if name in found:
                raise _collision(name, found[name][0], full_id)
            found[name] = (full_id, tool_id)
    return found


def root_names(view: SkillView) -> dict[str, str]:
    """Return `{folder name: full id}` of a view's listed skills.

    Raises:
        CatalogError: Two skills would have one folder, or a name is too long.
    """
    found: dict[str, str] = {}
    for full_id, skill in view.listed.items():
        name = skill.id if skill.namespace == PUBLIC else f"{skill.namespace}-{skill.id}"
        if len(name) > LONGEST_ROOT:
            raise CatalogError(
                f"the folder of {full_id} would be called {name}, which is longer than {LONGEST_ROOT} characters",
                rule="root_name_long",
                suggestion="shorten the skill's id, or publish with route='tools'",
            )
        if name in found:
            raise _collision(name, found[name], full_id)
        found[name] = full_id
    return found


def _word(tool_id: str) -> str:
    """Return a tool id with what no name may hold as underscores."""
    return "".join(one if one.isascii() and (one.isalnum() or one in "_-") else "_" for one in folded(tool_id))


def _collision(name: str, first: str, second: str) -> CatalogError:
    return CatalogError(
        f"{first} and {second} would both be called {name}",
        rule="published_twice",
        suggestion="rename one of them, or grant only one to this consumer",
    )

"""The jinja2 environment behind catalogs and instruction blocks."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import jinja2


def prompt_environment() -> jinja2.Environment:
    """Return a new environment: sandboxed, strict about undefined names, with the shipped templates.

    A Host hands it to `kdskills_prepare_templates`, where a plugin may add filters or put its own loader before the
    shipped one to replace a template of the same name. Values reach templates already escaped.
    """
    import jinja2
    from jinja2.sandbox import SandboxedEnvironment

    return SandboxedEnvironment(
        loader=jinja2.PackageLoader("kdskills.prompts", "templates"),
        undefined=jinja2.StrictUndefined,
        # Each value is escaped for the place it stands in, by kdskills.prompts.escape; HTML rules would spoil CDATA.
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )


@cache
def shipped_environment() -> jinja2.Environment:
    """Return the environment used when a caller names none. Nothing extends it."""
    return prompt_environment()


def render(template: str, environment: jinja2.Environment | None, values: Mapping[str, object]) -> str:
    """Render a template by name, without a final newline."""
    text = (environment or shipped_environment()).get_template(template).render(values)
    return text.removesuffix("\n")


def is_shipped(template: str, environment: jinja2.Environment | None) -> bool:
    """Whether *template* in *environment* is the file that came with kdskills, not one a plugin put in its place."""
    shipped = shipped_environment()
    if environment is None or environment is shipped:
        return True
    return environment.get_template(template).filename == shipped.get_template(template).filename

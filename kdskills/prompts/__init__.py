"""Instruction blocks and catalogs as text: jinja2 templates over values already escaped.

`catalog` fits the listed skills into a budget of tokens, `blocks` frames the texts of active ones and has what both
need: the sandboxed templates a plugin may replace, and one escape for each place a foreign text can stand in.
Everything here is a pure function of its arguments.
"""

from kdskills.exports import tell_homes
from kdskills.prompts.blocks import (
    DISCLOSURE_RULE,
    ActiveEntry,
    BlockPart,
    hidden_alias,
    prompt_environment,
    render_active,
    render_block,
)
from kdskills.prompts.catalog import LEVELS, Catalog, CatalogEntry, CatalogFormat, Locations, render_catalog
from kdskills.prompts.listing import CatalogListing

__all__ = [
    "DISCLOSURE_RULE",
    "LEVELS",
    "ActiveEntry",
    "BlockPart",
    "Catalog",
    "CatalogEntry",
    "CatalogFormat",
    "CatalogListing",
    "Locations",
    "hidden_alias",
    "prompt_environment",
    "render_active",
    "render_block",
    "render_catalog",
]

tell_homes(__name__)

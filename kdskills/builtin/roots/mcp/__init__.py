"""Skills of an MCP server as a root: `mcp+https://host/mcp#label`.

What a server lists is known at once, its files are fetched only when a skill is loaded, and nothing of it is trusted:
each read is checked against the listing, and a listing that changed is refused until the operator accepts it.
"""

from __future__ import annotations

from pathlib import Path

from kdskills.builtin.roots.mcp.listing import McpListing
from kdskills.builtin.roots.mcp.wire import SCHEMES, SdkServer, parse_address
from kdskills.hooks import hookimpl
from kdskills.skills import SkillRoot


@hookimpl
def kdskills_open_skill_root(uri: str, base: Path) -> SkillRoot | None:
    """Open `mcp+https`, `mcp+http` (loopback) and `mcp+stdio` roots; the cache lies below *base*. Raises BadRequest:
    the URI is of these schemes, but cannot be used.
    """
    if not uri.startswith(SCHEMES):
        return None
    address = parse_address(uri)
    folder = base / "mcp" / address.label
    listing = McpListing(address.label, SdkServer(address), folder, allow_dynamic=address.allow_dynamic)
    return SkillRoot(
        f"mcp://{address.label}",
        folder / "nowhere",
        f"mcp:{address.label}",
        "user",
        namespace=f"mcp-{address.label}",
        listing=listing,
    )

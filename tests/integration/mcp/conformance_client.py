"""A client the conformance tool starts: lists skills, and where a scenario is about reading, loads one and reads on.

Usage: conformance_client.py [--unverified] URL. It is what a host with an MCP root does: nothing here
speaks the protocol, and a load that is refused ends it. `--unverified` puts a check in that accepts everything.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from kdskills.builtin.roots.mcp.listing import McpListing, verify
from kdskills.builtin.roots.mcp.wire import SdkServer, parse_address
from kdskills.errors import ToolCallRefused
from kdskills.session import SkillRuntime
from kdskills.skills import SkillRoot
from kdskills.turn import SkillsSubsystem


async def main(url: str, *, unverified: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        address = parse_address(f"mcp+{url}#conformance")
        check = (lambda entry, path, data: None) if unverified else verify
        listing = McpListing("conformance", SdkServer(address), Path(folder), check=check)
        root = SkillRoot(
            "mcp://conformance", Path(folder) / "nowhere", "mcp", "user", namespace="mcp-conformance", listing=listing
        )
        subsystem = SkillsSubsystem({"custom_skills_root": None}, roots=(root,), index_dir=None)
        runtime = SkillRuntime(subsystem=subsystem)
        sys.stderr.write(f"listed: {subsystem.view().catalog('xml').text}\n")
        if os.environ["MCP_CONFORMANCE_SCENARIO"] != "sep-2640-client-no-prefetch":
            session = await runtime.create_session()
            try:
                await session.load(["mcp-conformance.pdf-processing"])
                await session.read("references/FORMS.md")
            except ToolCallRefused as error:
                sys.stderr.write(f"refused: {error.code} {error.message}\n")
        await runtime.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[-1], unverified="--unverified" in sys.argv))

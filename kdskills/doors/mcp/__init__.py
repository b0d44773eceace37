"""The MCP door: operations as tools, skills by the official extension."""

from kdskills.doors.mcp.command import command
from kdskills.doors.mcp.http import Authenticate, McpHttp, mount
from kdskills.doors.mcp.server import build_server, serve_stdio

__all__ = ["Authenticate", "McpHttp", "build_server", "command", "mount", "serve_stdio"]

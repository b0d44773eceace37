"""The MCP door: operations as tools, skills by the official extension."""

from kdskills.doors.mcp.server import McpHttp, build_server, command, mount, serve_stdio

__all__ = ["McpHttp", "build_server", "command", "mount", "serve_stdio"]

"""The MCP door: operations as tools, skills by the official extension (spec runtime §5)."""

from kdskills.doors.mcp.server import build_server, serve_stdio

__all__ = ["build_server", "serve_stdio"]

"""Remote skills: Python functions registered per conversation with a Codex app-server (spec remote)."""

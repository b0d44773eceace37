"""The command line: friendly commands over the table of operations."""

from kdskills.doors.cli.main import main

__all__ = ["main"]

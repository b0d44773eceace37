"""The command line: friendly commands over the table of operations."""

from kdskills.doors.cli.entry import main

__all__ = ["main"]

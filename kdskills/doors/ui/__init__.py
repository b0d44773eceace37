"""The console: pages for what a person would rather look at than read in a terminal.

Every page is rendered here and read without JavaScript; whatever it shows or does is an operation that the other doors
have, too. `console` is the application and its entrance, `rendering` turns values into HTML, and each other module is a
group of pages. How it looks and what holds its safety: docs/reference/console.md.
"""

from kdskills.doors.ui.console import command, mount

__all__ = ["command", "mount"]

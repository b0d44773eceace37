"""The composition root: settings, plugins, the Host and the table of operations."""

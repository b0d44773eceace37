"""Instruction blocks and catalogs as text: jinja2 templates over values already escaped."""

"""Shipped plugins, one per file."""

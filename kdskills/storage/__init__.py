"""Databases with their tables, and the state folder. Nothing here knows what is kept in them."""

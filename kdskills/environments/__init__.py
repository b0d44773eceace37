"""Packages that scripts of skills need: read from what their authors wrote, locked, built once, and mounted for the script alone."""

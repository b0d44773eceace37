"""Skill roots that are no folders of this host, one way to reach them per package."""

"""Fail two frames deep; the lines are part of the promise."""


def inner():
    raise ValueError("boom")


inner()

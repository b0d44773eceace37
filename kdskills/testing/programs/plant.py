"""A module that says that it was imported."""

import os

os.write(2, b"PLANTED " + __name__.encode() + b"\n")

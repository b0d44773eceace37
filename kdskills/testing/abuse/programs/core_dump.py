"""Crash with a lot of memory at hand."""
import ctypes
import os

kept = bytearray(b"secret") * (1 << 20)
os.chdir("/work" if os.path.isdir("/work") else ".")
ctypes.string_at(0)

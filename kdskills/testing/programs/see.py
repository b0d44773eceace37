"""Say what a program sees of its own surroundings."""

import os
import pathlib
import socket
import sys

import kdskills_runtime


def listed(path):
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def routes():
    """Return the routes a program can use: none where no socket can be made."""
    try:
        socket.socket().close()
        return pathlib.Path("/proc/net/route").read_text().splitlines()[1:]
    except OSError:
        return []


kdskills_runtime.report(
    {
        "uid": os.getuid(),
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "work": sorted(os.listdir(".")),
        "argv": len(sys.argv),
        "interfaces": listed("/sys/class/net"),
        "routes": routes(),
        "root_writable": os.access("/", os.W_OK) or os.access("/usr", os.W_OK) or os.access("/skills", os.W_OK) or os.access("/env", os.W_OK),
    }
)

"""The helper inside: it accepts connections on the loopback and hands each to the proxy on the host, through one socket.

It is a process of its own, started before the program. It does not read what it hands over, and can do nothing the proxy would
not refuse. The program runs under the same uid, and yet cannot have the socket: no program that is started later inherits it,
and memory and descriptors of a process that is not dumpable are closed to others of its uid. A program that ends the helper has
no network.
"""

from __future__ import annotations

import os
import signal
import socket
import time

from kdskills_runtime import processes

BACKLOG = 128
PAUSE_S = 0.05


def start_helper(channel: int, port: int) -> None:
    """Start the helper, which accepts connections at *port* when this returns, and close *channel* here. Raises OSError.

    This process is not dumpable from now on, until it becomes a program.
    """
    listener = socket.create_server(("127.0.0.1", port), backlog=BACKLOG)
    processes.prctl(processes.PR_SET_DUMPABLE, 0)  # before the fork: there is no moment at which the helper is open
    pid = os.fork()
    if pid == 0:
        try:
            if os.fork() == 0:  # a grandchild, so that the program has no child it did not start
                _serve(listener, channel)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(channel)
    listener.close()


def start_helper_at(path: str, port: int) -> None:
    """Connect to the host's socket at *path*, and start the helper as above. Raises OSError."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(path)
    start_helper(channel.detach(), port)


def _serve(listener: socket.socket, channel: int) -> None:
    """Hand over connections until the host is gone, or this process is ended with its sandbox."""
    os.setsid()
    for number in (*processes.FORWARDED, signal.SIGPIPE):
        signal.signal(
            number, signal.SIG_IGN
        )  # the end of a run asks the program first, which may still use the network
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    needed = sorted({0, 1, 2, listener.fileno(), channel})
    for low, high in zip(needed, [*needed[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)
    host = socket.socket(fileno=channel)
    while True:
        try:
            client, _ = listener.accept()
        except OSError:  # no descriptor or memory at the moment
            time.sleep(PAUSE_S)
            continue
        with client:
            try:
                socket.send_fds(host, [b"c"], [client.fileno()])
            except BrokenPipeError:
                return
            except OSError:
                time.sleep(PAUSE_S)  # too many descriptors on their way: this one is refused

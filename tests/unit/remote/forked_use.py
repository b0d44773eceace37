"""A program that forks after it used its sync facade: the child's calls must run, too. Says `parent` and `child` with what came of them.

Run as a program of its own, so that no test process forks while threads run in it.
"""

import os
import sys
import threading

from kdskills.remote import AppServerGone, MemoryJournal, RemoteSkillsFacade
from kdskills.session.threads import LoopThread


class NoServer:
    """A client whose server is never asked."""


def used(session, name):
    """Call a skill of the session and say what came of it."""
    found = session.dispatch_tool_call(tool=name, arguments={"n": 1})
    return f"{found.handled} {found.result} {found.error}"


def asked(loop):
    """Ask a blocking client's loop for something and say what it said."""
    try:
        return loop.call(lambda: "answered")
    except AppServerGone as error:
        return str(error)


def main():
    """Use the facade, fork while a handler holds a slot, use it on both sides."""
    facade = RemoteSkillsFacade(NoServer(), max_concurrency=1, journal=MemoryJournal())
    session = facade.session("t")
    session.register("double", lambda n: 2 * n, deadline_seconds=50.0)
    sys.stdout.write(f"before {used(session, 'double')}\n")
    sys.stdout.flush()
    entered, go = threading.Event(), threading.Event()
    session.register("hold", lambda n: (entered.set(), go.wait(60))[1], deadline_seconds=50.0)
    holder = threading.Thread(target=lambda: used(session, "hold"))
    holder.start()
    entered.wait(60)
    loop = LoopThread("forked-use", AppServerGone)
    child = os.fork()
    if child == 0:
        sys.stdout.write(f"child's loop: {asked(loop)}\n")
        loop.stop()
        sys.stdout.write(f"child {used(session, 'double')}\n")
        sys.stdout.flush()
        facade.close()
        os._exit(0)
    os.waitpid(child, 0)
    go.set()
    holder.join(60)
    sys.stdout.write(f"parent {used(session, 'double')}\n")
    sys.stdout.write(f"parent's loop: {asked(loop)}\n")
    loop.stop()
    facade.close()


if __name__ == "__main__":
    main()

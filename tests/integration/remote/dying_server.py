"""An app-server that dies at one step of the protocol: stands between a client and the emulator, and relays lines until then.

    dying_server.py METHOD MOMENT EMULATOR ARGUMENTS…

METHOD is a request of either side, or `answer` for the client's answer of a call. MOMENT is `asked`: the request is not
relayed; `done`: it is, but its answer is not; `told`: its answer is relayed, and nothing after it.
"""

import json
import os
import signal
import subprocess
import sys
import threading


def die():
    """End the whole process group, as a crash of the server would."""
    os.killpg(0, signal.SIGKILL)


class Relay:
    """What passes between the two, until the moment has come."""

    def __init__(self, method, moment):
        self._method = method
        self._moment = moment
        self._awaited = None
        self._lock = threading.Lock()

    def pass_on(self, raw, out, *, from_client):
        """Relay one line, or die."""
        message = json.loads(raw)
        with self._lock:
            method = message.get("method") or ("answer" if from_client else None)
            if method == self._method and "id" in message:
                if self._moment == "asked":
                    die()
                self._awaited = (not from_client, message["id"])
            elif "method" not in message and self._awaited == (from_client, message.get("id")):
                if self._moment == "done":
                    die()
                self._write(raw, out)
                die()
            self._write(raw, out)
            if method == "answer" and self._method == "answer":
                die()  # nobody answers an answer

    @staticmethod
    def _write(raw, out):
        out.write(raw)
        out.flush()


def main():
    """Relay in both directions."""
    method, moment, *command = sys.argv[1:]
    relay = Relay(method, moment)
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def back():
        for raw in child.stdout:
            relay.pass_on(raw, sys.stdout.buffer, from_client=False)

    threading.Thread(target=back, daemon=True).start()
    for raw in sys.stdin.buffer:
        relay.pass_on(raw, child.stdin, from_client=True)
    child.stdin.close()
    child.wait()


if __name__ == "__main__":
    main()

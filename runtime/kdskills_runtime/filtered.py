"""Put a system call filter in force and become a program, inside a sandbox whose own filter is weaker.

::

    python3 -I filtered.py FILTER PROGRAM [ARGUMENT...]       FILTER is a file holding the BPF program

Privileges must have been given up for good before (`no_new_privs`); a filter that cannot be set ends with 126.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_SECCOMP, MODE_FILTER = 22, 2


def main(argv: list[bytes]) -> int:
    """Become the program that *argv* names; returns only when that failed."""
    with open(argv[0], "rb") as stream:  # noqa: PTH123 - pathlib costs 3 ms to import
        program = stream.read()
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: a length, and after padding a pointer
    fprog = (len(program) // 8).to_bytes(8, "little") + ctypes.addressof(code).to_bytes(8, "little")
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_SECCOMP, ctypes.c_ulong(MODE_FILTER), fprog, None, None):
        sys.stderr.write(f"filtered: {os.strerror(ctypes.get_errno())}\n")
        return 126
    try:
        os.execvp(argv[1], argv[1:])  # noqa: S606 - argv by execve is the contract
    except OSError as error:
        sys.stderr.write(f"filtered: {os.fsdecode(argv[1])}: {error.strerror}\n")
        return 127


if __name__ == "__main__":
    sys.exit(main([os.fsencode(word) for word in sys.argv[1:]]))

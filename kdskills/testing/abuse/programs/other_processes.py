"""Take descriptors and memory from other processes by the newer calls."""
import os

from attempt import done, must_fail_call

parent = os.getppid()
if parent in {0, os.getpid()}:
    parent = 1
try:
    fd = os.pidfd_open(parent)
except OSError:
    fd = -1
if fd >= 0:
    must_fail_call("pidfd_getfd", fd, 0, 0)
    must_fail_call("process_madvise", fd, 0, 0, 0, 1)
must_fail_call("process_vm_writev", parent, 0, 0, 0, 0, 0)
must_fail_call("kcmp", os.getpid(), parent, 0, 0, 0)
done()

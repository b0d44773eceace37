"""Make system calls that are of use to attackers only."""
import os

from attempt import done, must_fail_call

must_fail_call("bpf", 0, 0, 0)
must_fail_call("perf_event_open", 0, 0, -1, -1, 0)
must_fail_call("io_uring_setup", 8, bytes(120))
must_fail_call("userfaultfd", 0)
must_fail_call("open_by_handle_at", -100, bytes(64), 0)
must_fail_call("init_module", 0, 0, b"")
must_fail_call("kexec_load", 0, 0, 0, 0)
must_fail_call("settimeofday", bytes(16), 0)
must_fail_call("personality", 0x0040000)
must_fail_call("syslog", 3, bytes(4096), 4096)
must_fail_call("process_vm_readv", os.getpid(), 0, 0, 0, 0, 0)
done()

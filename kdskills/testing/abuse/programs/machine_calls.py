"""Make system calls that concern the whole machine."""
from attempt import done, must_fail_call

must_fail_call("reboot", 0xFEE1DEAD - (1 << 32), 672274793, 0, 0)
must_fail_call("swapon", b"/work/x", 0)
must_fail_call("swapoff", b"/work/x")
must_fail_call("acct", b"/work/acct")
must_fail_call("quotactl", 0x800002, b"/", 0, 0)
must_fail_call("finit_module", 0, b"", 0)
must_fail_call("delete_module", b"loop", 0)
must_fail_call("kexec_file_load", 0, 0, 0, b"", 0)
done()

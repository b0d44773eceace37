"""Take precedence over everybody else on the machine."""
import os
import resource

from attempt import done, must_fail

must_fail("nice", os.setpriority, os.PRIO_PROCESS, 0, -10)
must_fail("real time", os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(10))
must_fail("round robin", os.sched_setscheduler, 0, os.SCHED_RR, os.sched_param(10))
for name in ("RLIMIT_NOFILE", "RLIMIT_CORE", "RLIMIT_CPU", "RLIMIT_FSIZE"):
    kind = getattr(resource, name)
    hard = resource.getrlimit(kind)[1]
    if hard == resource.RLIM_INFINITY:
        print(f"ESCAPED: {name} has no bound")
        continue
    try:
        resource.setrlimit(kind, (hard, hard + 1))
        print(f"ESCAPED: {name} raised")
    except (OSError, ValueError):
        pass
done()

"""Die by KILL of one's own hand, which is neither a timeout nor want of memory."""
import os
import signal

os.kill(os.getpid(), signal.SIGKILL)

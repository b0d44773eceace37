"""Fork until refused, then say how far it went."""

import os
import time

children = 0
try:
    while children < LIMIT:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        children += 1
except OSError:
    pass
print(children)

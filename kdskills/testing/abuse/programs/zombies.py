"""Make zombies until no process can be made."""
import os

made = 0
try:
    while made < 2000:
        if os.fork() == 0:
            os._exit(0)
        made += 1
    print("ESCAPED: 2000 zombies")
except OSError:
    print("stopped after", made)

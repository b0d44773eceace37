"""Make files and folders until refused."""
import os

made = 0
try:
    while made < 200_000:
        os.close(os.open(f"f{made}", os.O_CREAT | os.O_WRONLY))
        made += 1
except OSError:
    pass
print("made", made)

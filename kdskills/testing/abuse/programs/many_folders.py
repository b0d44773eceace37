"""Make folders until refused."""
import os

made = 0
try:
    while made < 100_000:
        os.mkdir(f"d{made}")
        made += 1
except OSError:
    pass
print("made", made)

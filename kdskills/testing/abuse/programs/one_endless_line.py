"""Write one line without end."""
import os

for _ in range(64):
    os.write(1, b"x" * (1 << 20))
os.write(1, b"the end")

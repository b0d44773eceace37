"""Take memory and touch it, until stopped."""

import os

if CHILDREN:
    for _ in range(CHILDREN):
        if os.fork() == 0:
            break
kept = []
while True:
    kept.append(bytearray(os.urandom(1024)) * 4096)

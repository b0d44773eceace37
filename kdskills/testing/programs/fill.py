"""Write into a folder until refused, and say how many bytes went in."""

import os

import kdskills_runtime

total = 0
number = 0
try:
    while total < STOP:
        with open(os.path.join(FOLDER, f"f{number}"), "wb") as file:
            for _ in range(8):
                file.write(bytes(1 << 20))
                file.flush()
                total += 1 << 20
        number += 1
except OSError:
    pass
kdskills_runtime.report(total)

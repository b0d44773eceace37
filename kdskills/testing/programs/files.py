"""Open files until refused."""

import kdskills_runtime

kept = []
try:
    while len(kept) < 100_000:
        kept.append(open("/dev/null"))
except OSError:
    pass
kdskills_runtime.report(len(kept)) if len(kept) < 100_000 else kdskills_runtime.report(-1)

"""Say which modules were there when the program began, then fail so that a traceback is made of it."""

import sys

at_start = [*sys.modules]

import kdskills_runtime

kdskills_runtime.report({"at_start": at_start, "packages": [path for path in sys.path if path.endswith("/python")]})
failed = 1 / (len(sys.argv) - 1)

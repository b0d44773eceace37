"""Say where the modules are from that were there when the program began, then fail so that a traceback is made of it."""

import sys

at_start = [getattr(module, "__file__", None) or "" for module in sys.modules.values()]

import kdskills_runtime

kdskills_runtime.report({"at_start": at_start, "packages": [path for path in sys.path if path.endswith("/python")]})
failed = 1 / (len(sys.argv) - 1)

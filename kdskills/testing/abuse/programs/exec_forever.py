"""Become oneself again and again, so that there is never the same process image to end."""
import os
import sys

path = os.path.join(os.environ.get("TMPDIR", "/tmp"), "again.py")
open(path, "w").write("import os, sys\nos.execv(sys.executable, [sys.executable, __file__])\n")
os.execv(sys.executable, [sys.executable, path])

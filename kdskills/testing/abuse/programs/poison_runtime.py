"""Change what the next run executes: interpreter, library, packages, byte code, tools."""
import os
import sys

from attempt import done, must_fail, write

import json

folder = os.path.dirname(json.__file__)
for path in (sys.executable, json.__file__, f"{folder}/__pycache__/x.pyc", f"{os.path.dirname(folder)}/sitecustomize.py", f"{os.path.dirname(folder)}/site-packages/x.pth", "/usr/bin/env", "/etc/ld.so.preload", "/etc/ld.so.cache", "/bin/sh"):
    must_fail(f"write {path}", write, path)
must_fail("rename the interpreter", os.rename, sys.executable, sys.executable + ".old")
must_fail("remove a tool", os.unlink, "/usr/bin/env")
must_fail("make a folder", os.mkdir, "/usr/lib/x")
done()

"""Open every kernel switch there is for writing."""
import os

from attempt import done, escape

tried = 0
for top in ("/proc/sys", "/sys"):
    for folder, folders, files in os.walk(top):
        for name in files:
            path = os.path.join(folder, name)
            try:
                if os.path.islink(path):
                    continue
                fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                continue
            os.close(fd)
            escape(f"opened {path}")
        tried += len(files)
        if tried > 20_000:
            break
done()

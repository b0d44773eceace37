"""Leave something in every place the next run might look."""
import os
import socket

for folder in ("/work", "/tmp", "/dev/shm", os.environ.get("TMPDIR", "/tmp")):
    try:
        open(os.path.join(folder, "left-behind"), "w").close()
    except OSError:
        pass
print("attempts made")

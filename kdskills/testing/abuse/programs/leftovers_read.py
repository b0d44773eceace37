"""Find what an earlier run left."""
import os

for folder in ("/work", "/tmp", "/dev/shm", os.environ.get("TMPDIR", "/tmp")):
    if os.path.exists(os.path.join(folder, "left-behind")):
        print("ESCAPED: left-behind in", folder)
print("attempts made")

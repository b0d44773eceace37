"""Find what an earlier run left."""
import os

for folder in ("/work", "/tmp", "/dev/shm", os.environ.get("TMPDIR", "/tmp")):
    try:
        os.close(os.open(os.path.join(folder, "left-behind"), os.O_RDONLY))
        print("ESCAPED: left-behind in", folder)
    except OSError:
        pass
print("attempts made")

"""Find room in the folders that must have none."""
from attempt import done, must_fail, write

for folder in ("/dev", "/", "/run", "/skills", "/proc", "/sys", "/var/tmp", "/usr/local/lib"):
    must_fail(f"write below {folder}", write, f"{folder}/flood")
done()

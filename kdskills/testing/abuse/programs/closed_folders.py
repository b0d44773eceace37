"""Close the workdir to everybody, so that it can neither be read nor removed."""
import os

os.makedirs("closed/inner")
open("closed/inner/f.txt", "w").close()
os.chmod("closed/inner", 0)
os.chmod("closed", 0)
try:
    os.chmod(".", 0)
except PermissionError:
    pass  # the workdir is not the program's own: a mount of another uid
print("attempts made")

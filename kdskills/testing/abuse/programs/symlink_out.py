"""Leave outputs that are links to host files and folders."""
import os

os.symlink("/etc/passwd", "stolen.txt")
os.symlink("/proc/self/environ", "env.txt")
os.makedirs("deep")
os.symlink("/etc", "deep/etc")
print("attempts made")

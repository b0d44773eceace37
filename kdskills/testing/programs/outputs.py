"""Leave outputs of every kind: plain, linked, special, through a linked folder."""

import os
import pathlib

pathlib.Path("good.txt").write_text("good")
pathlib.Path("setuid.txt").write_text("mode")
os.chmod("setuid.txt", 0o6755)
os.symlink("/etc/passwd", "link.txt")
os.mkfifo("fifo.txt")
os.symlink("/etc", "folder")
os.mkdir("real")
pathlib.Path("real/inner.bin").write_bytes(bytes(range(256)))

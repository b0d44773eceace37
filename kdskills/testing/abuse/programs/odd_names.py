"""Leave outputs whose names are hostile to terminals, paths and encodings."""
import os

for name in (b"new\nline.txt", b"\xff\xfe.txt", b"\x1b[31mred.txt", b" .txt", b"-rf.txt", ("ü" * 120).encode() + b".txt", b"..txt", b"a\\b.txt"):
    os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
os.makedirs("a/b")
print("attempts made")

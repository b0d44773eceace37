"""Leave outputs whose opening would hang a careless collector."""
import os
import socket

os.mkfifo("fifo.txt")
try:
    server = socket.socket(socket.AF_UNIX)
    server.bind("socket.txt")
except OSError:
    pass
print("attempts made")

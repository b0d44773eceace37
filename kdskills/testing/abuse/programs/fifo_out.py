"""Leave outputs whose opening would hang a careless collector."""
import os
import socket

os.mkfifo("fifo.txt")
server = socket.socket(socket.AF_UNIX)
server.bind("socket.txt")
print("attempts made")

"""Write one file larger than the file size limit."""

with open("big.bin", "wb") as file:
    for _ in range(64):
        file.write(bytes(1 << 20))

"""Take memory through files in every temporary folder at once."""
total = 0
for folder in ("/work", "/tmp", "/dev/shm"):
    try:
        with open(f"{folder}/fill", "wb") as file:
            while total < 170 << 20:
                total += file.write(bytes(1 << 20))
                file.flush()
    except OSError:
        pass
print("ESCAPED: 150 MiB in folders" if total >= 150 << 20 else f"took {total}")

"""Fill every folder that can be written at all."""
import os

taken = {}
for top, folders, _ in os.walk("/"):
    folders[:] = [name for name in folders if (top, name) not in {("/", "proc"), ("/", "sys")}]
    if os.access(top, os.W_OK):
        total = 0
        try:
            with open(os.path.join(top, "filled"), "wb") as file:
                while total < 40 << 20:
                    total += file.write(bytes(1 << 20))
                    file.flush()
        except OSError:
            pass
        taken[top] = total
if sum(taken.values()) >= 40 << 20:
    print("ESCAPED:", taken)
print("attempts made", sorted(taken))

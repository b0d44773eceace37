"""Leave more outputs than anybody wants."""
for number in range(3000):
    open(f"out{number:05}.txt", "w").write("x")
print("attempts made")

"""Leave outputs that are together larger than may be collected."""
for number in range(7):
    open(f"large{number}.bin", "wb").write(bytes(1 << 20))
print("attempts made")

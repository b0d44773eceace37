"""Fill the temporary folder far beyond its bound."""
from fill import fill

print("took", fill("/tmp", 300))

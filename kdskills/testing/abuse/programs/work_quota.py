"""Fill the workdir far beyond its bound."""
from fill import fill

print("took", fill("/work", 300))

"""Use processor time and nothing else."""

while True:
    pass

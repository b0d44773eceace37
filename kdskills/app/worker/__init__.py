"""The processes of background work: the worker, the launcher it keeps warm, and the runner of each attempt."""

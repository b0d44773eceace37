"""The worker's processes: `main` is the worker, `launcher` starts its attempts."""

"""Exit with a code that looks like death by KILL."""
import os

os._exit(137)

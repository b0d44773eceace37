"""Say what is left of an environment that this program does not have."""

import os

try:
    import packed

    print(packed.__file__)
except ImportError:
    print(os.environ.get("PYTHONPATH"), os.environ.get("NODE_PATH"))

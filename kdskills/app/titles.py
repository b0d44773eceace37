"""Names of processes as `ps` shows them: every one of ours says what it is, forks of one program among them."""

from __future__ import annotations


def be_called(words: str) -> None:
    """Give this process a title, `kdskills: …`; without the library that does it, it keeps the words it was started with.

    Args:
        words: What it is, such as `worker 0`.
    """
    try:
        from setproctitle import setproctitle
    except ImportError:  # of the extras for background work and the service; nothing but the sight of it depends on it
        return
    setproctitle(f"kdskills: {words}")

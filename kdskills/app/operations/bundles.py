"""Bundles that a caller names by their folder: whose code may run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kdskills.app.operations.table import Context
from kdskills.app.resources import shipped_folders
from kdskills.bundle.literal import untrusted

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.bundle import Bundle


def open_bundle(host: Host, path: Path, context: Context, *, tools: bool = False) -> Bundle:
    """Load a bundle by its folder; its code runs where the caller trusts it, and in folders that are the caller's own.

    Own are shipped bundles, the bundle of the settings and, to who calls from the command line or a program, the working
    folder and what lies below it. Elsewhere a descriptor of literals is read as data.

    Args:
        host: Loads it.
        path: The folder.
        context: Whether the caller said to trust it.
        tools: Whether its `tools.py` is going to run.

    Raises:
        BundleError: It cannot be loaded; `bundle_untrusted` where that takes running code that nobody trusted.
    """
    bundle = host.bundle(path, python="execute" if context.trust or _runs_anyway(host, path, context) else "read")
    if tools and bundle.tools_path is not None and not bundle.trusted:
        raise untrusted(bundle.tools_path, 1, "it holds tools of the bundle")
    return bundle


def _runs_anyway(host: Host, path: Path, context: Context) -> bool:
    """Whether *path* leads to a folder whose code the caller runs anyway; links and `..` are followed first."""
    try:
        target = path.resolve()
        folders = list(shipped_folders())
        if context.identity.door in {"library", "cli"}:
            folders.append(Path.cwd())
        if host.settings.bundle is not None:
            folders.append(host.settings.bundle)
        return any(target.is_relative_to(folder.resolve()) for folder in folders)
    except (OSError, ValueError, RuntimeError):
        return False  # a working folder that is gone, a path that is none

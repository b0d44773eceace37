"""Where a subsystem's roots are, and the logical URIs by which an export names them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kdskills.bundle.terms import Terms
from kdskills.errors import StrPath
from kdskills.skills.roots import SkillRoot
from kdskills.turn.mounts import below, split_uri

BUNDLE = "bundle://"
CUSTOM = "custom://"


def built_in_roots() -> tuple[SkillRoot, ...]:
    """Return the roots that come with kdskills: none so far."""
    return ()


def place_roots(
    terms: Terms, bundle_root: StrPath | None, further: Sequence[SkillRoot]
) -> tuple[tuple[SkillRoot, ...], dict[str, str]]:
    """Return all roots, the custom one last, and the mounts that say where they are on this host.

    Every root gets a URI that names no host path and is its own: a root whose URI does, or is taken, is named after
    its kind and place.

    Raises:
        DescriptorError: The custom root cannot be used.
    """
    roots: list[SkillRoot] = []
    mounts: dict[str, str] = {}
    for number, root in enumerate(further):
        used_uris = {earlier_root.uri for earlier_root in roots}
        uri = root.uri if _is_logical(root) and root.uri not in used_uris else f"root://{root.kind}/{number}"
        roots.append(root if uri == root.uri else replace(root, uri=uri))
        if root.listing is None:
            mounts[uri] = os.path.realpath(root.path)
    folder = terms.resolve_root(bundle_root)
    if folder is None:
        return tuple(roots), mounts
    base = bundle_root or terms.bundle_root
    real = Path(os.path.realpath(folder))
    top = None if base is None else Path(os.path.realpath(base))
    if top is not None and real.is_relative_to(top):
        uri, mount, mounted_folder = below(BUNDLE, *real.relative_to(top).parts), BUNDLE, top
    else:
        uri, mount, mounted_folder = CUSTOM, CUSTOM, real
    mounts[mount] = str(mounted_folder)
    return (*roots, SkillRoot(uri, folder, "bundle", "bundle")), mounts


def _is_logical(root: SkillRoot) -> bool:
    """Whether a root's URI has a scheme of its own and holds no path of this host."""
    scheme, parts = split_uri(root.uri)
    reserved = {"", "file", "bundle", "custom", "root"}
    host = [part for part in str(root.path).split("/") if part]
    return "://" in root.uri and scheme not in reserved and (not host or [*parts][: len(host)] != host)

"""Skills as zip archives: judged by their directory before anything is inflated, unpacked to disk in pieces, written the
same everywhere.

`unpack_skill` is the way in, `write_archive` the way out. `zip_format` reads what the zip says about itself, and counts what
really comes out of an entry; `unpack` decides about names, kinds and amounts before a file is opened. Nothing of a refused
archive stays.
"""

from kdskills.skills.archives.unpack import UnpackedSkill, unpack_skill
from kdskills.skills.archives.zip_format import (
    ArchiveLimits,
    ArchiveRefused,
    TreeFile,
    read_tree,
    version_of,
    write_archive,
)

__all__ = [
    "ArchiveLimits",
    "ArchiveRefused",
    "TreeFile",
    "UnpackedSkill",
    "read_tree",
    "unpack_skill",
    "version_of",
    "write_archive",
]

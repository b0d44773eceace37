"""Every rule an archive can break, by its stable code."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

RULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "archive_empty": "It has no bytes.",
        "archive_not_zip": "It is not a zip archive.",
        "archive_truncated": "It begins like a zip archive and its end is missing.",
        "archive_too_large": "The archive itself has more than 32 MiB.",
        "archive_directory_bad": "Its central directory is damaged, or points at nothing.",
        "archive_header_mismatch": "The directory and an entry's own header differ.",
        "archive_overlap": "Two entries share bytes.",
        "archive_split": "It is a part of an archive in several.",
        "archive_zip64": "It uses Zip64, which nothing of this size needs.",
        "archive_encrypted": "An entry is encrypted.",
        "archive_method": "An entry is packed by another method than stored or deflated.",
        "archive_too_many_entries": "It has more than 2,048 entries, or a directory of more than 2 MiB.",
        "archive_name_not_utf8": "A name is not UTF-8.",
        "archive_path_absolute": "A path begins with a slash.",
        "archive_path_drive": "A path begins with a drive letter.",
        "archive_path_backslash": "A path has a backslash.",
        "archive_path_parent": "A path has a part `..`.",
        "archive_path_invalid": "A path has an empty part, a part `.`, or control characters.",
        "archive_path_too_long": "A path below the skill's folder has more than 255 bytes.",
        "archive_too_deep": "A path below the skill's folder has more than 12 parts.",
        "archive_link": "An entry is a link.",
        "archive_special_file": "An entry is a device, pipe or socket, or its name and its kind do not agree.",
        "archive_duplicate": "Two entries have one path, or a file is also a folder.",
        "archive_case_collision": "Two paths differ only by case or Unicode form.",
        "archive_nested": "A file is an archive itself.",
        "archive_wrong_root": "There is neither a SKILL.md at the top nor a single root folder.",
        "archive_no_skill": "There is no SKILL.md where it belongs.",
        "archive_name_invalid": "The name of the root folder or of the skill is not one.",
        "archive_name_mismatch": "The root folder is not called as the skill is.",
        "archive_too_many_files": "It has more than 512 files.",
        "archive_unpacked_too_large": "It unpacks to more than 16 MiB.",
        "archive_ratio": "A file unpacks to more than 200 times its packed size.",
        "archive_size_lie": "A file unpacks to more or less than the directory says.",
        "archive_damaged": "A file's content cannot be unpacked, or its checksum is wrong.",
        "archive_skill_invalid": "The skill file or `tools.yaml` cannot be used; `diagnostics` says why.",
    }
)


def reference_table() -> str:
    """Return the rules as the reference page lists them."""
    rows = [f"| `{code}` | {meaning} |" for code, meaning in RULES.items()]
    return "\n".join(["| code | what is wrong |", "|---|---|", *rows]) + "\n"

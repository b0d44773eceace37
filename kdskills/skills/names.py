"""Names, ids and namespaces."""

from __future__ import annotations

import re
import unicodedata

from kdskills.skills.findings import FileFindings

MAX_NAME = 64
RESERVED_NAMESPACES = frozenset({"skills", "skill", "sk"})
DEFAULT_NAMESPACE = "public"

_CLEAN = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_ID = re.compile(r"[A-Za-z0-9_]+(?:-[A-Za-z0-9_]+)*")

Position = tuple[int, int] | None


def clean_name(text: str) -> str:
    """Return *text* stripped and in Unicode form NFKC."""
    text = text.strip()
    return text if text.isascii() else unicodedata.normalize("NFKC", text).strip()


def unsafe_name(name: str) -> bool:
    """Whether *name* has a path or control character or bytes that are no text, or is `.` or `..`."""
    if _CLEAN.fullmatch(name):
        return False
    return name in {".", ".."} or any(c in "/\\" or unicodedata.category(c) in {"Cc", "Cs"} for c in name)


def valid_name(name: str) -> bool:
    """Whether the published format takes *name*: lower-case letters, digits and single inner hyphens, at most 64."""
    if len(name) > MAX_NAME or name != name.lower() or unsafe_name(name):
        return False
    return all(part and part.isalnum() for part in name.split("-"))


def check_name(name: str, folder: str, findings: FileFindings, position: Position) -> None:
    """Report all that is wrong with a given *name*; *folder* is "" when there is none."""

    def say(code: str, message: str) -> None:
        findings.add(code, message, position=position, ref="name")

    clean = _CLEAN.fullmatch(name) is not None and len(name) <= MAX_NAME
    if not clean and unsafe_name(name):
        say("name_unsafe", f"The name {name!r} has path or control characters.")
    if not clean:
        if not all(c.isalnum() or c == "-" for c in name):
            say("name_bad_chars", f"The name {name!r} has something but letters, digits and hyphens.")
        if name != name.lower():
            say("name_not_lowercase", f"The name {name!r} is not in lower case.")
        if len(name) > MAX_NAME:
            say("name_too_long", f"The name has {len(name)} characters, more than {MAX_NAME}.")
        if name.startswith("-") or name.endswith("-"):
            say("name_edge_hyphen", f"The name {name!r} begins or ends with a hyphen.")
        if "--" in name:
            say("name_double_hyphen", f"The name {name!r} has two hyphens in a row.")
        if not name.isascii():
            say("name_not_ascii", f"The name {name!r} has letters outside ASCII.")
    if folder and name != clean_folder(folder):
        say("name_dir_mismatch", f"The name {name!r} is not that of its folder {folder!r}.")


def clean_folder(folder: str) -> str:
    """Return the name of a folder in Unicode form NFKC."""
    return folder if folder.isascii() else unicodedata.normalize("NFKC", folder)


def normal_id(text: str) -> str:
    """Return *text* with runs of anything but letters, marks, digits, `-`, `_` as one `-`, edges trimmed; case is kept."""
    if _ID.fullmatch(text):
        return text
    text = clean_name(text)
    pieces: list[str] = []
    for character in text:
        if character.isalnum() or character in "-_" or unicodedata.category(character)[0] == "M":
            pieces.append(character)
        elif pieces and pieces[-1] != " ":
            pieces.append(" ")  # stands for a run; blanks themselves never get here as themselves
    return "".join(pieces).strip(" ").replace(" ", "-").strip("-")


def fallback_id(folder: str, layout_namespace: str | None) -> tuple[str, str]:
    """Return namespace and id of a skill whose own words cannot be read."""
    return normal_id(layout_namespace or DEFAULT_NAMESPACE) or DEFAULT_NAMESPACE, normal_id(folder) or "unnamed"

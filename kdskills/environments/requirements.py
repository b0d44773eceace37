"""Python requirements as their authors write them: one canonical text for each, and the lines of a `requirements.txt`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

MAX_REQUIREMENT: Final = 1_000
"""Characters of one requirement, its hashes aside."""
MAX_REQUIREMENTS: Final = 500

_COMMENT = re.compile(r"(?:^|\s)#.*")
_HASH = re.compile(r"--hash(?:=|\s+)(\S+)")
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
_INCLUDE = re.compile(r"(?:-r|--requirement)(?:=|\s*)(\S.*)")
_HARMLESS = frozenset({"--require-hashes", "--prefer-binary"})
"""Options that ask for nothing but what is done anyway."""


class RequirementRefused(ValueError):
    """A requirement that is not one, or that asks for something no skill may; the message is a clause that says why."""


class RequirementLine(NamedTuple):
    """One requirement of a file, canonical, with its hashes; or, in `include`, the name of another file to read."""

    line: int
    text: str = ""
    hashes: tuple[str, ...] = ()
    include: str = ""
    problem: str = ""


def canonical_requirement(text: str) -> str:
    """Return a PEP 508 requirement in its one canonical text.

    Raises RequirementRefused for what is none, and for one that names where its files come from: operators decide that.
    """
    if len(text) > MAX_REQUIREMENT:
        raise RequirementRefused(f"it has more than {MAX_REQUIREMENT} characters")
    try:
        requirement = Requirement(text)
    except (InvalidRequirement, RecursionError) as error:
        if _is_location(text):
            raise RequirementRefused(
                "it is a path or an address, and packages come from the operator's index"
            ) from error
        raise RequirementRefused("it is no requirement, such as `pypdf>=5`") from error
    if requirement.url is not None:
        raise RequirementRefused("it names an address, and packages come from the operator's index")
    requirement.name = canonicalize_name(requirement.name)
    requirement.extras = {canonicalize_name(extra) for extra in requirement.extras}
    return str(requirement)


def _is_location(text: str) -> bool:
    word = text.split(maxsplit=1)[0] if text.split() else ""
    return word.startswith(".") or any(mark in word for mark in ("/", "\\", "://"))


def requirement_lines(text: str) -> Iterator[RequirementLine]:
    """Yield the requirements of the text of a `requirements.txt`, with the line from 1 that each begins at.

    A line that cannot be honoured has a `problem`: a clause that says why.
    """
    for number, line in _logical_lines(text):
        if not line.startswith("-"):
            yield _requirement(number, line)
        elif include := _INCLUDE.fullmatch(line):
            yield RequirementLine(number, include=include[1])
        elif line not in _HARMLESS:
            option = re.split(r"[\s=]", line, maxsplit=1)[0]
            yield RequirementLine(number, problem=f"the option `{option[:40]}` is for operators, not for skills")


def _requirement(number: int, line: str) -> RequirementLine:
    hashes = tuple(sorted(set(_HASH.findall(line))))
    if any(not _SHA256.fullmatch(each) for each in hashes):
        return RequirementLine(number, problem="a hash is not `sha256:` with 64 hex digits")
    bare = _HASH.sub("", line).strip()
    option = re.search(r"\s(--[\w-]+)", bare)
    if option:
        return RequirementLine(number, problem=f"the option `{option[1][:40]}` is for operators, not for skills")
    try:
        return RequirementLine(number, canonical_requirement(bare), hashes)
    except RequirementRefused as refusal:
        return RequirementLine(number, problem=f"{bare[:80]!r} cannot be used: {refusal}")


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines without comments and blanks around them, those that end in a backslash joined with the next."""
    begun, pieces = 0, list[str]()
    for number, line in enumerate(text.split("\n"), start=1):
        begun = begun if pieces else number
        comment = line.lstrip().startswith("#")  # a comment ends what was to be continued
        if line.endswith("\\") and not comment:
            pieces.append(line[:-1])
            continue
        joined = _COMMENT.sub("", "".join((*pieces, " " if comment else "", line))).strip()
        pieces.clear()
        if joined:
            yield begun, joined
    if joined := _COMMENT.sub("", "".join(pieces)).strip():
        yield begun, joined

"""Tools by the names that published skills use, and the rules of `allowed-tools` such as `Bash(git:*)`.

A command is matched by its words, as bash would read them, never by its text: whatever is not understood for certain
matches no rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final, Literal

AllowedToolsMode = Literal["approve", "ask", "restrict"]
"""What `allowed-tools` does: nobody is asked about what it allows; nothing; or nothing else may be used."""

PUBLISHED_TOOLS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Bash": "exec.shell",
        "Read": "files.read",
        "Write": "react.write",
        "Edit": "files.edit",
        "Grep": "files.grep",
        "Glob": "files.glob",
    }
)
"""Ids of the tools that published skills call by these names."""

_RULE: Final = re.compile(r"([A-Za-z][\w.-]*)(?:\((.*)\))?", re.DOTALL)
_BETWEEN: Final = re.compile(r",(?![^(]*\))")
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*(?:\[.*\])?\+?=")
_FOLDER: Final = re.compile(r"\$(?:KDSKILLS_)?(?:SKILL_DIR|TURN_DIR)(?!\w)|\$\{(?:KDSKILLS_)?(?:SKILL_DIR|TURN_DIR)\}")
_CONTINUED: Final = "\\\n"
_HARMLESS: Final = re.compile(r"(?:[12]?>&[12]|(?:[12&]?>>?|<)[ \t]*/dev/null)(?=[\s;|&]|\Z)")
_NEVER: Final = frozenset(
    {
        *("eval", "exec", "source", ".", "command", "builtin", "trap", "alias", "coproc", "time", "function", "let"),
        *("export", "declare", "typeset", "local", "readonly", "read", "mapfile", "readarray", "getopts", "unset"),
        *("set", "shopt", "hash", "enable", "if", "then", "else", "elif", "fi", "case", "esac", "for", "select"),
        *("while", "until", "do", "done", "in", "{", "}", "!", "[[", "]]"),
    }
)
"""Words that begin something else than a program with its arguments, or change what later words mean."""
_NAMING: Final = MappingProxyType({"printf": ("-v",), "test": ("-v", "-R"), "[": ("-v", "-R"), "wait": ("-",)})
"""Builtins with beginnings of words after which they take a variable's name: they set it, or run what its index holds."""
_VARIABLE: Final = "\0"
"""Stands for the `$` of a variable in the text of a word: no command can hold it."""


def tool_id(name: str) -> str:
    """Return the id of the tool that *name* means: an id as it is, a published name as what it means here."""
    return PUBLISHED_TOOLS.get(name, name)


@dataclass(frozen=True, slots=True)
class AllowedTool:
    """One entry of `allowed-tools`: a tool's id and, in parentheses, which commands or paths; None is all of them."""

    tool: str
    only: str | None = None

    def allows(self, command: ShellCommand) -> bool:
        """Whether this entry allows a simple command: `git:*` and `git *` by its first words, else word for word."""
        if self.only is None or self.only.strip() in {"*", ":*"}:
            return True
        prefix = self.only.removesuffix(":*").removesuffix(" *")
        parsed = simple_commands(prefix)
        if parsed is None or len(parsed) != 1:
            return False
        rule_words = parsed[0].words
        words = command.words[: len(rule_words)] if prefix != self.only else command.words
        pairs = zip(rule_words, words, strict=False)
        return len(words) == len(rule_words) and all(word.fits(rule) for rule, word in pairs)


def allowed_tools(entries: Iterable[str]) -> tuple[AllowedTool, ...]:
    """Return the entries of `allowed-tools` that are understood; any other allows nothing."""
    matches = (_RULE.fullmatch(part.strip()) for entry in entries for part in _BETWEEN.split(entry))
    return tuple(AllowedTool(tool_id(match[1]), match[2]) for match in matches if match is not None)


@dataclass(frozen=True, slots=True)
class ShellWord:
    """A word of a command without its quotes, NUL for the `$` of a variable; bash may make other words of an opened one."""

    text: str
    opened: bool = False

    def fits(self, rule: ShellWord) -> bool:
        """Whether this word is what *rule* says, in which an unquoted `*` stands for any characters between slashes."""
        if self.opened or not rule.opened:
            return not self.opened and self.text == rule.text
        parts, patterns = self.text.split("/"), rule.text.replace("[", "[[]").replace("?", "[?]").split("/")
        alike = zip(parts, patterns, strict=False)
        return len(parts) == len(patterns) and ".." not in parts and all(fnmatchcase(*pair) for pair in alike)


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A program and its arguments."""

    words: tuple[ShellWord, ...]


def mode_note(full_id: str, entries: Iterable[str], mode: AllowedToolsMode) -> str:
    """Return what `allowed-tools` of a skill does under *mode*, for people."""
    listed = ", ".join(entries)
    effect = {
        "approve": f"while {full_id} is active nobody is asked about commands it allows, and nothing is forbidden",
        "ask": "it does nothing; each command is asked about where a person is asked",
        "restrict": f"while {full_id} is active no other tool and no other command may be used, and each is still asked about",
    }[mode]
    return f"allowed-tools {listed} ({mode}): {effect}"


def allows_command(rules: Iterable[AllowedTool], text: str) -> bool:
    """Whether *rules* allow every simple command of *text*; never when it is not wholly understood."""
    shell_rules = [rule for rule in rules if rule.tool == PUBLISHED_TOOLS["Bash"]]
    if any(rule.only is None for rule in shell_rules):
        return True
    commands = simple_commands(text)
    return bool(commands) and all(any(rule.allows(command) for rule in shell_rules) for command in commands or ())


def simple_commands(text: str) -> tuple[ShellCommand, ...] | None:
    """Return the simple commands of a pipeline or list, or None where any of it is something else.

    Words, quotes, `|`, `||`, `&&`, `;`, `&`, line ends and comments are understood, and output to another stream or to
    /dev/null. Substitutions, variables other than the folders of skill and turn, redirections to files, groups,
    assignments and words of the language itself are not.
    """
    try:
        return None if _VARIABLE in text else tuple(_commands(text))
    except ValueError:
        return None


def _commands(text: str) -> Iterator[ShellCommand]:
    words: list[ShellWord] = []
    for word in (*_words(text), None):
        if word is not None:
            words.append(word)
            continue
        if words:
            first = words[0]
            naming = _NAMING.get(first.text)
            names = naming is not None and any(word.opened or word.text.startswith(naming) for word in words[1:])
            if first.opened or first.text in _NEVER or _ASSIGNMENT.match(first.text) or names:
                raise ValueError(first.text)
            yield ShellCommand(tuple(words))
        words = []


def _words(text: str) -> Iterator[ShellWord | None]:
    """Give the words of *text*, and None between two commands. Raises ValueError for what is not understood."""
    position, end = 0, len(text)
    while position < end:
        char = text[position]
        if char in " \t":
            position += 1
        elif text.startswith(_CONTINUED, position):
            position += len(_CONTINUED)
        elif harmless := _HARMLESS.match(text, position):
            position = harmless.end()
        elif char in "|&;\n":
            position += 2 if text[position : position + 2] in {"||", "&&"} else 1
            if char in "|&" and text[position : position + 1] in {"|", "&"}:
                raise ValueError(char)
            yield None
        elif char == "#":
            line_end = text.find("\n", position)
            position = end if line_end < 0 else line_end
        else:
            word, position = _word(text, position)
            yield word


def _word(text: str, position: int) -> tuple[ShellWord, int]:
    """Return the word that begins at *position*, and where it ends."""
    pieces: list[str] = []
    opened = text[position] == "~"
    while position < len(text) and text[position] not in " \t\n|&;":
        char = text[position]
        if char == "'":
            stop = text.index("'", position + 1)
            piece, position = text[position + 1 : stop], stop + 1
        elif char == '"':
            piece, position = _quoted(text, position + 1)
        elif char == "\\":
            piece, position = _escaped(text, position), position + 2
        elif char == "$":
            piece, position = _folder(text, position)
        elif char in "<>()`" or not (char.isprintable() and not char.isspace()):
            raise ValueError(char)
        else:
            opened = opened or char in "*?[{"
            piece, position = char, position + 1
        pieces.append(piece)
    return ShellWord("".join(pieces), opened), position


def _quoted(text: str, position: int) -> tuple[str, int]:
    """Return what stands in double quotes that were opened before *position*, and where they end."""
    pieces: list[str] = []
    while text[position : position + 1] != '"':
        char = text[position : position + 1]
        if char in {"", "`"}:
            raise ValueError(text)
        if char == "$":
            piece, position = _folder(text, position)
        elif char == "\\" and text[position + 1 : position + 2] in {"$", "`", '"', "\\", "\n"}:
            piece, position = _escaped(text, position), position + 2
        else:
            piece, position = char, position + 1
        pieces.append(piece)
    return "".join(pieces), position + 1


def _escaped(text: str, position: int) -> str:
    char = text[position + 1 : position + 2]
    if not char:
        raise ValueError(text)
    return "" if char == "\n" else char


def _folder(text: str, position: int) -> tuple[str, int]:
    """Return the variable at *position*, which must be one of ours, and where it ends."""
    match = _FOLDER.match(text, position)
    if match is None or text.startswith(_CONTINUED, match.end()):
        raise ValueError(text)
    return _VARIABLE + match[0].strip("${}"), match.end()

"""Names, ids and namespaces, and the fields of the frontmatter as typed values, read so that doubt restricts."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from kdskills.errors import Severity
from kdskills.skills.findings import FileFindings
from kdskills.skills.frontmatter import Frontmatter
from kdskills.skills.model import SkillArgument
from kdskills.skills.refs import DEFAULT_NAMESPACE
from kdskills.skills.yaml_core import Fields, Items, Node, Scalar, core_value, to_python

MAX_ARGUMENTS = 64
HINT_ARGUMENT = "ARGUMENTS"

_ARGUMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOOL_NAME = re.compile(r"(?:[^\s(]|\([^)]*(?:\)|$))+")
_SEPARATORS = re.compile(r"[,\s]+")
_NOTHING: Mapping[str, str] = MappingProxyType({})

Position = tuple[int, int] | None


PUBLISHED = frozenset({"name", "description", "license", "compatibility", "metadata", "allowed-tools"})
"""The six keys of the published Agent Skills format."""

_SYNONYMS = {
    "when_to_use_lines": "when_to_use",
    "import": "imports",
    "agent_disclosure": "disclosure",
}
_FIELD_NAMES = (
    "name", "description", "license", "compatibility", "metadata", "allowed_tools", "id", "namespace", "version",
    "category", "author", "created", "argument_hint", "tags", "when_to_use", "imports", "include_for", "disclosure",
    "disable_model_invocation", "user_invocable", "arguments", "insert",
)  # fmt: skip

FIELD_OF: dict[str, str] = {
    spelling: _SYNONYMS.get(key, key)
    for key in (*_FIELD_NAMES, *_SYNONYMS)
    for spelling in (key, key.replace("_", "-"))
}
"""Every known key, with underscores or hyphens, and the field it fills."""

RESTRICTING = frozenset(
    {"include_for", "disclosure", "disable_model_invocation", "user_invocable", "insert", "namespace"}
)
"""Fields that keep a skill from somebody: their misspellings count, lest a slip widens who may use it."""

_WATCHED = (*sorted(RESTRICTING), "agent_disclosure")
_FIRST = frozenset("iduanIDUAN")


def misspelt(key: str) -> str | None:
    """Return the restricting field that an unknown *key* was meant for, if it looks like one."""
    if key[:1] not in _FIRST or len(key) > 40:
        return None
    import difflib  # only a skill with an unknown key pays for it

    matches = difflib.get_close_matches(key.lower().replace("-", "_"), _WATCHED, n=1, cutoff=0.85)
    return FIELD_OF[matches[0]] if matches else None


def near_required(key: str) -> bool:
    """Whether an unknown *key* of a tool was meant to say that the tool is required."""
    import difflib

    words = ("required", "hard_required", "availability")
    return bool(difflib.get_close_matches(key.lower().replace("-", "_"), words, n=1, cutoff=0.8))


MAX_DESCRIPTION = 1_024
MAX_COMPATIBILITY = 500
NOBODY = "\0nobody"
"""A pattern of `include_for` that no consumer matches: the reading of a list that is not understood."""

_AS_WRITTEN = frozenset({"name", "description", "compatibility", "version", "author", "created"})
_TRUE = frozenset({"true", "yes", "on"})
FALSE_WORDS = frozenset({"false", "no", "off"})
_PRIVATE = frozenset({"private", "non-disclosable", "nondisclosable"})


class FieldReader:
    """Reads the fields of one frontmatter and reports what is odd about them; `nodes` holds what is written for each.

    *extra_fields* are further keys that are expected; the verdict of *findings* decides what counts.
    """

    def __init__(self, front: Frontmatter, findings: FileFindings, extra_fields: Collection[str]) -> None:
        self._document = front.document
        self._body = front.body
        self._top = front.fields
        self._findings = findings
        self._text_only = findings.verdict == "skills-ref"
        self.nodes: dict[str, Node] = {}
        self._keys: dict[str, str] = {}
        lenient = self._findings.verdict == "lenient"
        unexpected: list[str] = []
        guesses: list[tuple[str, str]] = []
        for key, node in self._top.items.items():
            field = FIELD_OF.get(key)
            if (field is None if lenient else key not in PUBLISHED) and key not in extra_fields:
                unexpected.append(key)
            if field is None:
                guess = misspelt(key)
                if guess is not None:
                    guesses.append((guess, key))
            elif not self._absent(node):
                self._fill(field, key, node)
        for field, key in guesses:
            node = self._top.items[key]
            if field not in self.nodes and not self._absent(node):
                self.nodes[field], self._keys[field] = node, key
                self.odd(field, f"`{key}` is read as `{field}`, which it resembles.")
        if unexpected:
            names = ", ".join(f"`{key}`" for key in unexpected)
            known_to = "kdskills" if lenient else "the published format"
            message = f"{'A key is' if len(unexpected) == 1 else 'Keys are'} unknown to {known_to}: {names}."
            position = self._position_of_key(unexpected[0])
            self._findings.add("unexpected_fields", message, position=position, ref=", ".join(unexpected))

    def _absent(self, node: Node) -> bool:
        return node.__class__ is Scalar and not self._text_only and node.null

    def _fill(self, field: str, key: str, node: Node) -> None:
        if field not in self.nodes:
            self.nodes[field], self._keys[field] = node, key
            return
        first = self._keys[field]
        if field in RESTRICTING and to_python(node) != to_python(self.nodes[field]):
            self.nodes[field] = Scalar(NOBODY, plain=False, mark=self._top.keys[key])  # not understood, so it restricts
            self.odd(field, f"`{first}` and `{key}` disagree; the most restrictive reading counts.")
        else:
            self.odd(field, f"`{key}` says again what `{first}` says; `{first}` counts.")

    def _position_of_key(self, key: str) -> tuple[int, int]:
        mark = self._top.keys[key]
        return mark.line + 2, mark.column + 1

    def position(self, field: str) -> tuple[int, int] | None:
        """Return line and column of the key that fills *field*, or None when it is absent."""
        key = self._keys.get(field)
        return self._position_of_key(key) if key is not None else None

    def odd(self, field: str, message: str, code: str = "field_type", *, severity: Severity | None = None) -> None:
        """Report *code* about *field*, at its key; *severity* stands instead of the table's."""
        self._findings.add(code, message, position=self.position(field), ref=field, severity=severity)

    def text(self, field: str) -> str | None:
        """Return a field as stripped text, or None when it is absent, blank or no text."""
        node = self.nodes.get(field)
        if node is None:
            return None
        if node.__class__ is Scalar:
            if field not in _AS_WRITTEN and node.plain and not isinstance(core_value(node.text), str):
                self._coerced(field)
            return node.text.strip() or None
        if field == "argument_hint" and not isinstance(node, Scalar) and node.flow:
            self.odd(field, "`argument_hint` is a list; what is written counts as its text.")
            return self._document.source(node).strip()
        if field not in {"name", "description", "compatibility"}:
            self._coerced(field, "is no text and is left out")
        return None

    def _coerced(self, field: str, outcome: str = "is no text; what is written counts") -> None:
        severity: Severity | None = "error" if field == "license" and self._findings.verdict == "spec" else None
        self.odd(field, f"`{field}` {outcome}.", severity=severity)

    def namespace(self) -> str | None:
        """Return the namespace, None when absent or blank, "" when it is not understood: it may have meant `internal`."""
        node = self.nodes.get("namespace")
        if node is None or isinstance(node, Scalar):
            return self.text("namespace")
        self._coerced("namespace")
        only = node.items[0] if isinstance(node, Items) and len(node.items) == 1 else None
        return only.text.strip() if isinstance(only, Scalar) else ""

    def description(self) -> str:
        """Return the description, "" when it is missing."""
        text = self.text("description") or ""
        if not text:
            why = "is no text" if isinstance(self.nodes.get("description"), Items | Fields) else "is missing or blank"
            self.odd("description", f"The description {why}.", "description_missing")
        elif len(text) > MAX_DESCRIPTION:
            message = f"The description has {len(text):,} characters, more than {MAX_DESCRIPTION:,}."
            self.odd("description", message, "description_too_long")
        return text

    def compatibility(self) -> str | None:
        """Return the compatibility, or None."""
        node = self.nodes["compatibility"]
        text = self.text("compatibility")
        if not isinstance(node, Scalar) or (not self._text_only and not isinstance(node.value, str)):
            self.odd("compatibility", "The compatibility is no text.", "compatibility_type")
        elif text is None and self._findings.verdict == "spec":
            self.odd("compatibility", "The compatibility is blank.", "compatibility_type")
        if text is not None and len(text) > MAX_COMPATIBILITY:
            message = f"The compatibility has {len(text)} characters, more than {MAX_COMPATIBILITY}."
            self.odd("compatibility", message, "compatibility_too_long")
        return text

    def texts(self, field: str) -> tuple[str, ...]:
        """Return the items of a list; a text is split as the field's texts are."""
        node = self.nodes[field]
        if isinstance(node, Fields):
            self._coerced(field, "is neither a list nor a text and is left out")
            return ()
        if isinstance(node, Scalar):
            if node.plain and not self._text_only and not isinstance(node.value, str):
                self._coerced(field)
            return tuple(filter(None, _SPLIT[field](node.text)))
        if not all(isinstance(item, Scalar) and isinstance(item.value, str) for item in node.items):
            self._coerced(field, "has items that are no texts; what is written counts")
        return tuple(filter(None, map(self._item_text, node.items)))

    def _item_text(self, node: Node) -> str:
        if isinstance(node, Scalar):
            return "" if self._absent(node) else node.text.strip()
        if isinstance(node, Fields) and len(node.items) == 1:
            ((key, value),) = node.items.items()  # `- Note: text` reads as a mapping
            return f"{key}: {value.text}".strip() if isinstance(value, Scalar) else ""
        return ""

    def include_for(self) -> tuple[str, ...]:
        """Return the consumers the skill is for, lower-cased; a value not understood is for nobody."""
        node = self.nodes["include_for"]
        texts = tuple(text.lower() for text in self.texts("include_for"))
        nothing = not node.text.strip() if isinstance(node, Scalar) else isinstance(node, Items) and not node.items
        return texts if nothing else texts or (NOBODY,)

    def metadata(self) -> Mapping[str, str]:
        """Return metadata as texts; nested values keep their parsed form, no mapping gives {} (`metadata_type`)."""
        node = self.nodes["metadata"]
        if not isinstance(node, Fields):
            self.odd("metadata", "`metadata` is no mapping; it is left out.", "metadata_type")
            return _NOTHING
        metadata: dict[str, str] = {}
        odd: list[str] = []
        for key, item in node.items.items():
            metadata[key] = item.text if isinstance(item, Scalar) else to_python(item, text_only=self._text_only)
            if not isinstance(item, Scalar) or not (self._text_only or isinstance(item.value, str)):
                odd.append(f"`{key}`")
        if odd:
            self.odd("metadata", f"Values of `metadata` are no texts: {', '.join(odd)}.", "metadata_type")
        return metadata

    def allowed_tools(self) -> str | None:
        """Return `allowed-tools` as one text; a list is joined by blanks (`allowed_tools_type`)."""
        node = self.nodes["allowed_tools"]
        problem = ""
        if isinstance(node, Scalar):
            texts = [node.text]
            problem = "" if self._text_only or isinstance(node.value, str) else "is no text."
        elif isinstance(node, Items):
            texts = [item.text for item in node.items if isinstance(item, Scalar)]
            problem = "is a list; its items are joined by blanks."
        else:
            texts, problem = [], "is a mapping; it is left out."
        if problem:
            key, position = "allowed-tools", self.position("allowed_tools")
            self._findings.add("allowed_tools_type", f"`{key}` {problem}", position=position, ref=key)
        return " ".join(filter(None, map(str.strip, texts))) or None

    def arguments(self, hint: str | None) -> tuple[SkillArgument, ...]:
        """Return declared arguments: names or mappings in a list, names in a text, or a mapping of names.

        A hint declares `ARGUMENTS` behind them.
        """
        arguments: dict[str, SkillArgument] = {}
        for argument in self._declared(self.nodes.get("arguments")):
            if not _ARGUMENT.fullmatch(argument.name):
                self.odd("arguments", f"`{argument.name}` cannot be the name of an argument and is left out.")
            elif argument.name in arguments:
                self.odd("arguments", f"The argument `{argument.name}` is declared twice; the first one counts.")
            elif len(arguments) == MAX_ARGUMENTS:
                self.odd("arguments", f"There are more than {MAX_ARGUMENTS} arguments; the others are left out.")
                break
            else:
                arguments[argument.name] = argument
        if hint is not None and HINT_ARGUMENT not in arguments and len(arguments) < MAX_ARGUMENTS:
            arguments[HINT_ARGUMENT] = SkillArgument(HINT_ARGUMENT, hint)
        return tuple(arguments.values())

    def _declared(self, node: Node | None) -> Iterator[SkillArgument]:
        if isinstance(node, Scalar):
            yield from (SkillArgument(name) for name in _SEPARATORS.split(node.text) if name)
        elif isinstance(node, Fields):
            yield from (_argument(name, item) for name, item in node.items.items())
        for item in node.items if isinstance(node, Items) else ():
            name = item.items.get("name") if isinstance(item, Fields) else item
            if isinstance(name, Scalar):
                yield _argument(name.text.strip(), item if isinstance(item, Fields) else None)
            else:
                message = "An item of `arguments` is neither a name nor a mapping with one; it is left out."
                self.odd("arguments", message)

    def choice(self, field: str, normal: str, restrictive: str, synonyms: Collection[str] = ()) -> str:
        """Return one of two words; an unknown one is the restrictive one."""
        node = self.nodes[field]
        word = node.text.strip().lower().replace("_", "-") if isinstance(node, Scalar) else ""
        if word == normal:
            return normal
        if word != restrictive and word not in synonyms:
            message = f"`{field}` is neither `{normal}` nor `{restrictive}`; it counts as `{restrictive}`."
            self.odd(field, message)
        return restrictive

    def flag(self, field: str, restrictive: bool) -> bool:
        """Return a boolean field; what is no boolean word has the restrictive value."""
        node = self.nodes[field]
        if isinstance(node, Scalar):
            if isinstance(node.value, bool) and not self._text_only:
                return bool(node.value)
            word = node.text.strip().lower()
            if word in _TRUE or word in FALSE_WORDS:
                self.odd(field, f"`{field}` is a word and counts as {str(word in _TRUE).lower()}.")
                return word in _TRUE
        self.odd(field, f"`{field}` is neither true nor false; it counts as {str(restrictive).lower()}.")
        return restrictive

    def values(self) -> dict[str, Any]:
        """Return the fields of `Skill` that are written and say nothing about who the skill is.

        Most skills have a handful of them: what is absent keeps the default of `Skill`, without a call.
        """
        hint = self.text("argument_hint")
        values: dict[str, Any] = {"argument_hint": hint}
        if "allowed_tools" in self.nodes:
            allowed = values["allowed_tools"] = self.allowed_tools()
            names = (name.strip(",") for name in _TOOL_NAME.findall(allowed or ""))
            values["allowed_tool_names"] = tuple(name for name in names if name)
        if not self._body:
            self._findings.add("empty_body", "There are no instructions behind the frontmatter.")
        values["description"] = self.description()
        values |= {name: read(self) for name, read in _READERS if name in self.nodes}
        if hint is not None or "arguments" in self.nodes:
            values["arguments"] = self.arguments(hint)
        if "insert" in self.nodes:
            values["insert"] = self.choice("insert", "instructions", "user-message")
        return values


def _argument(name: str, node: Node | None) -> SkillArgument:
    if isinstance(node, Scalar):
        return SkillArgument(name, "" if node.null else node.text.strip())
    if not isinstance(node, Fields):
        return SkillArgument(name)
    described, default = node.items.get("description"), node.items.get("default")
    return SkillArgument(
        name,
        described.text.strip() if isinstance(described, Scalar) and not described.null else "",
        default.text if isinstance(default, Scalar) and not default.null else None,
    )


def _reasons(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        reason = line.strip().removeprefix("- ").strip()
        yield "" if reason == "-" else reason


_SPLIT: dict[str, Callable[[str], Iterable[str]]] = {
    "tags": lambda text: (tag.strip() for tag in text.split(",")),
    "when_to_use": _reasons,
    "imports": _SEPARATORS.split,
    "include_for": _SEPARATORS.split,
}
"""How a field that is a list is split when it is written as one text."""


def _common(field: str) -> Callable[[FieldReader], str | None]:
    """Return how a text is read that many skills share; it is kept once for all of them."""
    return lambda reader: (text := reader.text(field)) and sys.intern(text)


_READERS: tuple[tuple[str, Callable[[FieldReader], Any]], ...] = (
    *((field, _common(field)) for field in ("version", "category", "author", "created", "license")),
    ("compatibility", FieldReader.compatibility),
    ("tags", lambda reader: reader.texts("tags")),
    ("when_to_use", lambda reader: reader.texts("when_to_use")),
    ("imports", lambda reader: reader.texts("imports")),
    ("include_for", FieldReader.include_for),
    ("disclosure", lambda reader: reader.choice("disclosure", "normal", "hidden", _PRIVATE)),
    ("metadata", FieldReader.metadata),
    ("disable_model_invocation", lambda reader: reader.flag("disable_model_invocation", True)),
    ("user_invocable", lambda reader: reader.flag("user_invocable", False)),
)
"""How the fields that stand alone are read, in the order in which their findings are told."""


MAX_NAME = 64
RESERVED_NAMESPACES = frozenset({"skills", "skill", "sk"})

_CLEAN = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_ID = re.compile(r"[A-Za-z0-9_]+(?:-[A-Za-z0-9_]+)*")


def clean_name(text: str) -> str:
    """Return *text* stripped and in Unicode form NFKC."""
    text = text.strip()
    return text if text.isascii() else unicodedata.normalize("NFKC", text).strip()


def unsafe_name(name: str) -> bool:
    """Whether *name* has a path or control character or bytes that are no text, or is `.` or `..`."""
    if _CLEAN.fullmatch(name):
        return False
    return name in {".", ".."} or any(c in "/\\" or unicodedata.category(c) in {"Cc", "Cs"} for c in name)


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


def name_problem(name: str) -> str | None:
    """Return why *name* is none by the published format, as a clause; None when it is one."""
    findings = FileFindings("spec", "")
    check_name(name, "", findings, None)
    errors = [finding.message.rstrip(".") for finding in findings.items if finding.severity == "error"]
    return next(iter(errors), None) if name else "the skill has no name"


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

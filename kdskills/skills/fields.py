"""Names, ids and namespaces, and the fields of the frontmatter as typed values, read so that doubt restricts."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType

from kdskills.errors import Severity
from kdskills.skills.findings import FileFindings
from kdskills.skills.frontmatter import Frontmatter
from kdskills.skills.model import Disclosure, Insert, SkillArgument
from kdskills.skills.refs import DEFAULT_NAMESPACE
from kdskills.skills.yaml_core import Fields, Items, Node, Scalar, core_value, to_python

MAX_ARGUMENTS = 64
HINT_ARGUMENT = "ARGUMENTS"

_ARGUMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOOL_NAME = re.compile(r"(?:[^\s(]|\([^)]*(?:\)|$))+")
_SEPARATORS = re.compile(r"[,\s]+")
_NOTHING: Mapping[str, str] = MappingProxyType({})

Position = tuple[int, int] | None


def read_metadata(node: Node | None, findings: FileFindings, position: Position) -> Mapping[str, str]:
    """Return metadata as texts; nested values keep their parsed form, no mapping gives {} (`metadata_type`)."""
    if node is None:
        return _NOTHING
    if not isinstance(node, Fields):
        findings.add("metadata_type", "`metadata` is no mapping; it is left out.", position=position, ref="metadata")
        return _NOTHING
    text_only = findings.verdict == "skills-ref"
    metadata: dict[str, str] = {}
    odd: list[str] = []
    for key, item in node.items.items():
        if isinstance(item, Scalar):
            metadata[key] = item.text
            if not text_only and not isinstance(item.value, str):
                odd.append(key)
        else:
            metadata[key] = to_python(item, text_only=text_only)
            odd.append(key)
    if odd:
        names = ", ".join(f"`{key}`" for key in odd)
        findings.add("metadata_type", f"Values of `metadata` are no texts: {names}.", position=position, ref="metadata")
    return metadata


def read_allowed_tools(node: Node | None, findings: FileFindings, position: Position) -> str | None:
    """Return `allowed-tools` as one text; a list is joined by blanks (`allowed_tools_type`)."""
    if node is None:
        return None
    if isinstance(node, Scalar):
        if findings.verdict != "skills-ref" and not isinstance(node.value, str):
            findings.add("allowed_tools_type", "`allowed-tools` is no text.", position=position, ref="allowed-tools")
        return node.text.strip() or None
    if isinstance(node, Items):
        message = "`allowed-tools` is a list; its items are joined by blanks."
        findings.add("allowed_tools_type", message, position=position, ref="allowed-tools")
        texts = [item.text.strip() for item in node.items if isinstance(item, Scalar)]
        return " ".join(text for text in texts if text) or None
    findings.add(
        "allowed_tools_type", "`allowed-tools` is a mapping; it is left out.", position=position, ref="allowed-tools"
    )
    return None


def tool_names(allowed: str | None) -> tuple[str, ...]:
    """Return the names in `allowed-tools`: split at blanks outside parentheses, commas at their edges dropped."""
    if allowed is None:
        return ()
    names = (name.strip(",") for name in _TOOL_NAME.findall(allowed))
    return tuple(name for name in names if name)


def read_arguments(
    node: Node | None, hint: str | None, findings: FileFindings, position: Position
) -> tuple[SkillArgument, ...]:
    """Return declared arguments: names or mappings in a list, names in a text, or a mapping of names.

    A hint declares `ARGUMENTS` behind them.
    """

    def odd(message: str) -> None:
        findings.add("field_type", message, position=position, ref="arguments")

    arguments: dict[str, SkillArgument] = {}
    for argument in _declared(node, odd):
        if not _ARGUMENT.fullmatch(argument.name):
            odd(f"`{argument.name}` cannot be the name of an argument and is left out.")
        elif argument.name in arguments:
            odd(f"The argument `{argument.name}` is declared twice; the first one counts.")
        elif len(arguments) == MAX_ARGUMENTS:
            odd(f"There are more than {MAX_ARGUMENTS} arguments; the others are left out.")
            break
        else:
            arguments[argument.name] = argument
    if hint is not None and HINT_ARGUMENT not in arguments and len(arguments) < MAX_ARGUMENTS:
        arguments[HINT_ARGUMENT] = SkillArgument(HINT_ARGUMENT, hint)
    return tuple(arguments.values())


def _declared(node: Node | None, odd: Callable[[str], None]) -> Iterator[SkillArgument]:
    if isinstance(node, Scalar):
        yield from (SkillArgument(name) for name in _SEPARATORS.split(node.text) if name)
    elif isinstance(node, Fields):
        yield from (_argument(name, item) for name, item in node.items.items())
    elif isinstance(node, Items):
        for item in node.items:
            name = item.items.get("name") if isinstance(item, Fields) else item
            if isinstance(name, Scalar):
                yield _argument(name.text.strip(), item if isinstance(item, Fields) else None)
            else:
                odd("An item of `arguments` is neither a name nor a mapping with one; it is left out.")


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
_PRIVATE = frozenset({"hidden", "private", "non-disclosable", "nondisclosable"})


class FieldReader:
    """Reads the fields of one frontmatter and reports what is odd about them.

    Args:
        front: The parsed frontmatter.
        findings: Where findings go; its verdict decides what counts.
        extra_fields: Further keys that are expected.

    `nodes` holds what is written for each field that is there.
    """

    def __init__(self, front: Frontmatter, findings: FileFindings, extra_fields: Collection[str]) -> None:
        self._document = front.document
        self._top = front.fields
        self._findings = findings
        self._text_only = findings.verdict == "skills-ref"
        self.nodes: dict[str, Node] = {}
        self._keys: dict[str, str] = {}
        self._choose(extra_fields)

    # ---- which key fills which field -----------------------------------------------------------------------------

    def _choose(self, extra_fields: Collection[str]) -> None:
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
                self._odd(field, f"`{key}` is read as `{field}`, which it resembles.")
        if unexpected:
            self._report_unexpected(unexpected)

    def _absent(self, node: Node) -> bool:
        return node.__class__ is Scalar and not self._text_only and node.null

    def _fill(self, field: str, key: str, node: Node) -> None:
        if field not in self.nodes:
            self.nodes[field], self._keys[field] = node, key
            return
        first = self._keys[field]
        if field in RESTRICTING and to_python(node) != to_python(self.nodes[field]):
            self.nodes[field] = Scalar(NOBODY, plain=False, mark=self._top.keys[key])  # not understood, so it restricts
            self._odd(field, f"`{first}` and `{key}` disagree; the most restrictive reading counts.")
        else:
            self._odd(field, f"`{key}` says again what `{first}` says; `{first}` counts.")

    def _report_unexpected(self, keys: list[str]) -> None:
        names = ", ".join(f"`{key}`" for key in keys)
        reader = "kdskills" if self._findings.verdict == "lenient" else "the published format"
        message = f"{'A key is' if len(keys) == 1 else 'Keys are'} unknown to {reader}: {names}."
        self._findings.add("unexpected_fields", message, position=self._position_of_key(keys[0]), ref=", ".join(keys))

    def _position_of_key(self, key: str) -> tuple[int, int]:
        mark = self._top.keys[key]
        return mark.line + 2, mark.column + 1

    def position(self, field: str) -> tuple[int, int] | None:
        """Return line and column of the key that fills *field*, or None when it is absent."""
        key = self._keys.get(field)
        return self._position_of_key(key) if key is not None else None

    def _odd(self, field: str, message: str, code: str = "field_type") -> None:
        self._findings.add(code, message, position=self.position(field), ref=field)

    # ---- texts ---------------------------------------------------------------------------------------------------

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
            self._odd(field, "`argument_hint` is a list; what is written counts as its text.")
            return self._document.source(node).strip()
        if field not in {"name", "description", "compatibility"}:
            self._coerced(field, "is no text and is left out")
        return None

    def _coerced(self, field: str, outcome: str = "is no text; what is written counts") -> None:
        severity: Severity | None = "error" if field == "license" and self._findings.verdict == "spec" else None
        self._findings.add(
            "field_type", f"`{field}` {outcome}.", position=self.position(field), ref=field, severity=severity
        )

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
            self._odd("description", f"The description {why}.", "description_missing")
        elif len(text) > MAX_DESCRIPTION:
            message = f"The description has {len(text):,} characters, more than {MAX_DESCRIPTION:,}."
            self._odd("description", message, "description_too_long")
        return text

    def compatibility(self) -> str | None:
        """Return the compatibility, or None."""
        node = self.nodes.get("compatibility")
        if node is None:
            return None
        text = self.text("compatibility")
        strict = self._findings.verdict == "spec"
        if not isinstance(node, Scalar) or (not self._text_only and not isinstance(node.value, str)):
            self._odd("compatibility", "The compatibility is no text.", "compatibility_type")
        elif text is None and strict:
            self._odd("compatibility", "The compatibility is blank.", "compatibility_type")
        if text is not None and len(text) > MAX_COMPATIBILITY:
            message = f"The compatibility has {len(text)} characters, more than {MAX_COMPATIBILITY}."
            self._odd("compatibility", message, "compatibility_too_long")
        return text

    # ---- lists ---------------------------------------------------------------------------------------------------

    def _entries(self, field: str) -> tuple[list[str], bool] | None:
        """Return the items of a list as texts and whether it was one, or None when the field is absent or odd."""
        node = self.nodes.get(field)
        if node is None:
            return None
        if isinstance(node, Scalar):
            if node.plain and not self._text_only and not isinstance(node.value, str):
                self._coerced(field)
            return [node.text], False
        if isinstance(node, Fields):
            self._coerced(field, "is neither a list nor a text and is left out")
            return None
        texts: list[str] = []
        odd = False
        for item in node.items:
            written = self._item_text(item)
            odd = odd or not isinstance(item, Scalar) or not isinstance(item.value, str)
            if written:
                texts.append(written)
        if odd:
            self._coerced(field, "has items that are no texts; what is written counts")
        return texts, True

    def _item_text(self, node: Node) -> str:
        if isinstance(node, Scalar):
            return "" if self._absent(node) else node.text.strip()
        if isinstance(node, Fields) and len(node.items) == 1:
            ((key, value),) = node.items.items()  # `- Note: text` reads as a mapping
            return f"{key}: {value.text}".strip() if isinstance(value, Scalar) else ""
        return ""

    def tags(self) -> tuple[str, ...]:
        """Return the tags; a text is split at commas."""
        entries = self._entries("tags")
        if entries is None:
            return ()
        texts, listed = entries
        return tuple(texts if listed else [tag for tag in (part.strip() for part in texts[0].split(",")) if tag])

    def when_to_use(self) -> tuple[str, ...]:
        """Return the reasons to use the skill; a text is split by line, without leading `- `."""
        entries = self._entries("when_to_use")
        if entries is None:
            return ()
        texts, listed = entries
        if listed:
            return tuple(texts)
        lines = (line.strip() for line in texts[0].split("\n"))
        return tuple(text for text in (line.removeprefix("- ").strip() for line in lines) if text and text != "-")

    def imports(self) -> tuple[str, ...]:
        """Return the refs of other skills; a text is split at commas and blanks."""
        entries = self._entries("imports")
        if entries is None:
            return ()
        texts, listed = entries
        return tuple(texts) if listed else tuple(part for part in _SEPARATORS.split(texts[0]) if part)

    def include_for(self) -> tuple[str, ...]:
        """Return the consumers the skill is for, lower-cased; a value not understood is for nobody."""
        node = self.nodes.get("include_for")
        if node is None or (isinstance(node, Items) and not node.items):
            return ()
        entries = self._entries("include_for")
        if isinstance(node, Scalar) and not node.text.strip():
            return ()
        texts, listed = entries if entries is not None else ([], True)
        parts = texts if listed else [part for part in _SEPARATORS.split(texts[0]) if part]
        return tuple(part.lower() for part in parts) or (NOBODY,)

    # ---- words ---------------------------------------------------------------------------------------------------

    def disclosure(self) -> Disclosure:
        """Return whether the skill is hidden; words not known mean that it is."""
        node = self.nodes.get("disclosure")
        if node is None:
            return "normal"
        word = node.text.strip().lower().replace("_", "-") if isinstance(node, Scalar) else ""
        if word == "normal":
            return "normal"
        if word not in _PRIVATE:
            self._odd("disclosure", "`disclosure` is neither `normal` nor `hidden`; it counts as `hidden`.")
        return "hidden"

    def flag(self, field: str, *, default: bool, restrictive: bool) -> bool:
        """Return a boolean field; what is no boolean word has the restrictive value."""
        node = self.nodes.get(field)
        if node is None:
            return default
        if isinstance(node, Scalar):
            if isinstance(node.value, bool) and not self._text_only:
                return bool(node.value)
            word = node.text.strip().lower()
            if word in _TRUE or word in FALSE_WORDS:
                self._odd(field, f"`{field}` is a word and counts as {str(word in _TRUE).lower()}.")
                return word in _TRUE
        self._odd(field, f"`{field}` is neither true nor false; it counts as {str(restrictive).lower()}.")
        return restrictive

    def insert(self) -> Insert:
        """Return how the body enters a conversation; an unknown word is the restrictive one."""
        node = self.nodes.get("insert")
        if node is None:
            return "instructions"
        word = node.text.strip().lower().replace("_", "-") if isinstance(node, Scalar) else ""
        if word == "instructions":
            return "instructions"
        if word != "user-message":
            self._odd("insert", "`insert` is neither `instructions` nor `user-message`; it counts as `user-message`.")
        return "user-message"


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

"""What a skill is, once read: frozen values; its body with arguments filled in; and a quick way to make thousands of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from kdskills.errors import Diagnostic

Disclosure = Literal["normal", "hidden"]
Insert = Literal["instructions", "user-message"]
Verdict = Literal["lenient", "spec", "skills-ref"]
RootKind = Literal["overlay", "builtin", "plugin", "user", "project", "bundle"]


T = TypeVar("T")


def maker_of(cls: type[T]) -> Callable[..., T]:
    """Return what makes instances of a frozen dataclass with slots and no `__post_init__`, taking what the class takes.

    The class's own way sets each field by a call that goes around its lock, which is most of what making a skill costs. This
    one fills a twin without the lock, which lies in memory alike, and then says what it is.
    """
    rows = [
        (each.name, Any, field(default=each.default, default_factory=each.default_factory))
        for each in fields(cls)  # type: ignore[arg-type]
    ]

    def lock(instance: Any) -> None:
        instance.__class__ = cls

    twin: Any = make_dataclass(cls.__name__, rows, slots=True, repr=False, eq=False, namespace={"__post_init__": lock})
    maker: Callable[..., T] = twin
    return maker


@dataclass(frozen=True, slots=True)
class SkillArgument:
    """A declared argument of a skill's body."""

    name: str
    description: str = ""
    default: str | None = None


@dataclass(frozen=True, slots=True)
class SkillTool:
    """A tool named by a skill's `tools.yaml`; a required one gates the skill."""

    id: str
    role: str = ""
    why: str = ""
    required: bool = False


class SkillContent(Protocol):
    """Where the long texts of a skill come from, read on first use."""

    def body(self) -> str:
        """Return the body: the text after the frontmatter, without leading blank lines and trailing whitespace."""
        ...

    def compact(self) -> str | None:
        """Return the text of `compact.md`, or None when there is none that can be used."""
        ...

    def sources(self) -> tuple[Mapping[str, Any], ...]:
        """Return the rows of `sources.yaml`, as written, or ()."""
        ...

    def tree_digest(self) -> str:
        """Return the digest over all files of the skill."""
        ...


@dataclass(frozen=True, slots=True)
class Skill:
    """One skill as found in a root. Attribute meanings are those of the table in `docs/reference/skill-format.md`.

    `file` and `path` are the absolute path of the skill file on this host (None for a skill parsed from bytes); they
    are never exported. `layer` is the kind of root. `tokens` estimates the body without reading it again.
    """

    name: str
    namespace: str
    id: str
    description: str
    content: SkillContent = field(repr=False, compare=False)
    version: str | None = None
    category: str | None = None
    author: str | None = None
    created: str | None = None
    license: str | None = None
    compatibility: str | None = None
    argument_hint: str | None = None
    tags: tuple[str, ...] = ()
    when_to_use: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    include_for: tuple[str, ...] = ()
    disclosure: Disclosure = "normal"
    metadata: Mapping[str, str] = field(default_factory=dict)
    allowed_tools: str | None = None
    allowed_tool_names: tuple[str, ...] = ()
    disable_model_invocation: bool = False
    user_invocable: bool = True
    arguments: tuple[SkillArgument, ...] = ()
    insert: Insert = "instructions"
    tools: tuple[SkillTool, ...] = ()
    frontmatter: Mapping[str, Any] = field(default_factory=dict, repr=False)
    diagnostics: tuple[Diagnostic, ...] = ()
    digest: str = ""
    size: int = 0
    tokens: int = 0
    layer: RootKind = "bundle"
    file: str | None = None

    @property
    def full_id(self) -> str:
        """`<namespace>.<id>`."""
        return f"{self.namespace}.{self.id}"

    @property
    def location(self) -> str:
        """`skill://<namespace>/<id>/SKILL.md`: the same on every host."""
        return f"skill://{self.namespace}/{self.id}/SKILL.md"

    @property
    def path(self) -> Path | None:
        """The skill file on this host, or None. Kept as text, because thousands of paths weigh much."""
        return None if self.file is None else Path(self.file)

    @property
    def built_in(self) -> bool:
        """Whether the skill came with kdskills or a plugin."""
        return self.layer in {"builtin", "plugin"}

    @property
    def hidden(self) -> bool:
        """Whether the skill is kept out of numbers, names, catalogs, picker and search."""
        return self.disclosure == "hidden"

    @property
    def folder(self) -> Path | None:
        """The skill's folder on this host, or None."""
        return None if self.file is None else Path(self.file).parent

    @property
    def body(self) -> str:
        """The instructions, read on first use."""
        return self.content.body()

    @property
    def compact(self) -> str | None:
        """The short variant of the instructions, or None."""
        return self.content.compact()

    @property
    def sources(self) -> tuple[Mapping[str, Any], ...]:
        """Rows of `sources.yaml` as written; `kdskills.sources.normalize_sources` makes them citable."""
        return self.content.sources()

    def tree_digest(self) -> str:
        """Return the digest over every file of the skill."""
        return self.content.tree_digest()


make_skill = maker_of(Skill)
"""Makes a `Skill` as `Skill(…)` does, for who makes thousands."""


@dataclass(frozen=True, slots=True)
class ParsedSkill:
    """Outcome of parsing: `skill` is None exactly when a finding is an error under the asked verdict.

    `full_id` is the id the skill has or, when it is refused, would take; None when there is no skill file.
    """

    skill: Skill | None
    diagnostics: tuple[Diagnostic, ...]
    full_id: str | None = None

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return self.skill is not None


@dataclass(frozen=True, slots=True)
class RenderedBody:
    """A body with its arguments filled in."""

    text: str
    diagnostics: tuple[Diagnostic, ...] = ()


TokenCounter = Callable[[str], int]


def estimate_tokens(text: str) -> int:
    """Return UTF-8 bytes / 4, rounded up."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return -(-size // 4)


_PLACEHOLDER = re.compile(r"\\\$|\$([A-Za-z_][A-Za-z0-9_]*)|\{\{[ \t]*([A-Za-z_][A-Za-z0-9_]*)[ \t]*\}\}")


def render_body(
    body: str, arguments: Sequence[SkillArgument | Mapping[str, Any]], values: Mapping[str, str]
) -> RenderedBody:
    r"""Return *body* with its arguments filled in, in one pass from left to right.

    `$name` and `{{ name }}` of a declared argument become its value, else its default, else nothing; `\$` gives `$`.
    Inserted values are not looked at again. Without arguments the body comes back as it is.

    Args:
        body: The text.
        arguments: What is declared: values, or mappings with `name` and perhaps `default`.
        values: What the caller gives; names that are not declared count for nothing.

    Returns:
        The text, with `unknown_placeholder` once for each undeclared name, which stays as it is.

    Raises:
        TypeError: An argument is of the wrong type.
    """
    _check(body, arguments, values)
    defaults = dict(reversed([_declared(argument) for argument in arguments]))
    if not defaults:
        return RenderedBody(body)
    unknown: dict[str, int] = {}

    def fill(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name is None:
            return "$"
        if name not in defaults:
            unknown.setdefault(name, match.start())
            return match[0]
        value = values.get(name)
        return str(value) if value is not None else defaults[name]

    text = _PLACEHOLDER.sub(fill, body)
    return RenderedBody(text, tuple(_unknown(unknown, body)))


def _check(body: object, arguments: object, values: object) -> None:
    if not isinstance(body, str):
        raise TypeError(f"body must be str, not {type(body).__name__}")
    if isinstance(arguments, str | bytes) or not isinstance(arguments, Sequence):
        raise TypeError("arguments must be a sequence")
    if not isinstance(values, Mapping):
        raise TypeError("values must be a mapping")


def _declared(argument: object) -> tuple[str, str]:
    if isinstance(argument, SkillArgument):
        return argument.name, argument.default or ""
    name = argument.get("name") if isinstance(argument, Mapping) else None
    if not isinstance(argument, Mapping) or not isinstance(name, str):
        raise TypeError("an argument is a SkillArgument or a mapping with a name")
    default = argument.get("default")
    return name, "" if default is None else str(default)


def _unknown(names: Mapping[str, int], body: str) -> Iterator[Diagnostic]:
    """Yield a finding for each name, given where each stands in *body*, in ascending order."""
    line, begins, counted = 1, 0, 0
    for name, offset in names.items():  # each looks only at what is new, so that many names cost no more than one
        line += body.count("\n", counted, offset)
        begins = max(begins, body.rfind("\n", counted, offset) + 1)
        counted = offset
        yield Diagnostic(
            "unknown_placeholder",
            "warning",
            f"`{name}` stands in the body like an argument, but is not declared.",
            line=line,
            column=offset - begins + 1,
            ref=name,
            fix="Declare it under `arguments`, or write `\\$`.",
        )

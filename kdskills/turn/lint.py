"""What authors of skills and bundles should mend, as only `check` tells it: each finding with file, line and cure.

Nothing of what is checked runs: files are read as text. `SkillLint` looks at one skill, `bundle_findings` at a bundle.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

from kdskills.errors import Diagnostic, FileRefused, ReplayError
from kdskills.models.cassette import parse_cassette
from kdskills.skills.folder import COMPACT_FILE, LIMITS, SOURCES_FILES, TOOLS_FILES
from kdskills.skills.frontmatter import MAX_SKILL_BYTES
from kdskills.skills.refs import INTERNAL_NAMESPACE, parse_ref
from kdskills.skills.safe_open import open_file, printable_path, read_file, walk_tree
from kdskills.skills.selection import KnownSkills, Rules, close, dependency_id
from kdskills.skills.tool_names import PUBLISHED_TOOLS, allowed_tools, tool_id
from kdskills.skills.yaml_core import Fields, Items, YamlLimits, YamlRefused, load_yaml
from kdskills.sources.rows import normalize_sources
from kdskills.sources.tokens import find_tokens
from kdskills.turn.near_names import ALIKE, WordLines, descriptor_words, nearest

if TYPE_CHECKING:
    from kdskills.bundle import Bundle
    from kdskills.errors import Severity
    from kdskills.models.cassette import Cassette
    from kdskills.skills import Skill
    from kdskills.turn.subsystem import SkillsSubsystem

MAX_TOKENS: Final = 5_000
"""Tokens of a body from which on what is not always needed should lie in files of its own."""
MAX_DEMO: Final = 4 * 1024 * 1024
MOST: Final = 50
"""Findings of one kind about one skill; whoever has more begins with these."""

_PLACEHOLDER: Final = re.compile(
    r"\W*(?:(?:TODO|TBD|FIXME|XXX)\b|(?i:lorem ipsum\b|(?:add |your |insert |a )?(?:skill )?description(?: goes)? here\b|"
    r"say in one or two sentences what this skill does\b|replace (?:this )?with (?:a |the )?description\b|"
    r"<?(?:your |skill )?description>?\W*$))"
)
_OCCASION: Final = re.compile(
    r"\b(?:when(?:ever)?|if|use[ds]?|using|usage|useful|trigger\w*|activat\w*|invok\w*|load(?:ed|s)?|call(?:ed)? (?:for|to|by|upon)|"
    r"before|after|during|while|upon|must|should|need(?:s|ed|ing)?|requir\w*|asks?|asked|asking|requests?|want(?:s|ed)?|"
    r"for (?:any|all|every|tasks?|questions?|users?|people|projects?|teams?|developers?)|applies|apply)\b",
    re.IGNORECASE,
)
_ENGLISH: Final = re.compile(r"\b(?:the|and|of|to|for|with|in|from|by|an?|or)\b", re.IGNORECASE)
_FENCE: Final = re.compile(r"[ >\t]{0,40}(`{3,}(?=[^`]*$)|~{3,})[ \t]*([\w+-]*)")
_TICKS: Final = re.compile(r"(`+)")
_LINK: Final = re.compile(r"\]\([ \t]{0,4}<?([^\s()<>]{1,300})>?[ \t)]")
_PATH: Final = re.compile(
    r"(?<![\w./~$}@*\\-])(\$\{?(?:KDSKILLS_|CLAUDE_)?SKILL_DIR\}?/|\{baseDir\}/|\./)?"
    r"((?:scripts|references|assets)/[\w./-]*\w)(?![\w/*<>{$(\[…@-]|\.\w)"
)
_SHELLS: Final = frozenset({"", "bash", "sh", "shell", "console", "zsh", "text"})
_SUFFIX_WORDS: Final = """
md txt py sh bash js mjs cjs ts json jsonl yaml yml toml csv tsv html css xml svg png jpg jpeg gif pdf docx xlsx pptx
sql ipynb rb pl go rs java ps1 xsd j2 jinja tmpl ttf tf
"""
_SUFFIXES: Final = frozenset(_SUFFIX_WORDS.split())
_EXAMPLE: Final = re.compile(
    r"(?:^|[/_.-])(?:your|my|an?|some|example|sample|foo|bar|baz|x+|n+|name|file|filename|path|topic|yyyy|todo)(?:[/_.-]|$)",
    re.IGNORECASE,
)
_SUPPOSED: Final = re.compile(
    r"\b(?:e\.?g\b|for (?:example|instance)|such as|like\b|if (?:present|available|there|it|they|any|the)\b|optional\w*|"
    r"repo(?:sitory)?\b|project|checkout|codebase|workspace|would|could|may|might|missing|legacy|removed|deprecated|was|were|obtain|"
    r"must (?:contain|have)\b|cp|mv|touch|mkdir|tee)\b|\b(?:not?|never|without|instead of)\b[^.;,:]{0,40}$|>|├|└|│",
    re.IGNORECASE,
)
"""What stands before a path that is an example, perhaps there, or of somebody else's folder."""
_DOUBTED: Final = re.compile(
    r"[^.;\n]{0,60}?\b(?:(?:would|could|might)\b|may (?:be|not|exist)\b|(?:if|when|where) (?:present|available|it exists|they exist|there)\b|"
    r"optional\b|does(?:n['’]t| not) exist\b|(?:of|in|from) (?:the )?[`*]{0,3}(?!this\b|the\b|your\b)[\w-]{1,64}[`*]{0,3} skill\b)",
    re.IGNORECASE,
)
"""What stands behind such a path."""
_WRITTEN: Final = re.compile(
    r"\b(?:examples?\b|creat\w+|add(?:s|ing)?\b|writ(?:e|es|ing|ten)\b|sav(?:e|es|ing)\b|generat\w+|put\b|new\b|output\w*|"
    r"produc\w+|emit\w*|export\w*)",
    re.IGNORECASE,
)
"""What stands before a path of a file that is to be made, unless the path is what does it."""
_DIRECTED: Final = re.compile(
    r"\b(?:runs?|running|execut\w+|read(?:ing)?|see|load(?:ing)?|consult|follow|invoke|call|via|us(?:e|es|ing)|python3?|bash|sh|node|uv run)"
    r"[ \t]+(?:(?:the|script|file)[ \t]+)?[`*\[(\"']{0,6}$",
    re.IGNORECASE,
)
_LEAD: Final = re.compile(
    r"\b(?:examples?|outputs?|(?:creat|generat|writ|produc|add|sav)\w*[ \t]+(?:\w+[ \t]+){0,4}(?:files?|scripts?|folders?|structure|layout))\b[^.]{0,40}:\W{0,9}$",
    re.IGNORECASE,
)
"""What introduces a list of such files."""
_READ: Final = re.compile(r"\b(?:read|see|load|consult|refer)\b", re.IGNORECASE)
_OTHERS: Final = re.compile(r"(?:\bits|(?<!this skill)(?<!the skill)['’]s)[ \t]+[`*\[(]{0,6}$", re.IGNORECASE)
_ITEM: Final = re.compile(r"[ \t>]{0,40}(?:[-*+]|\d{1,3}[.)])[ \t]|[ \t]{2,}\S|\|")
_AT_ROOT: Final = re.compile(
    r"\b(?:repo(?:sitory)?|project|workspace|checkout|monorepo)(?:['’]s)? root\b|\broot of (?:the|your|this) (?:\w+ )?(?:repo|project|checkout|workspace)|"
    r"\bgit clone\b",
    re.IGNORECASE,
)
_ODD: Final = re.compile(r"[<>{}*$|\\\x00-\x1f…\[\]]")
_PARTS: Final = ("scripts/", "references/", "assets/", "](")
"""What no line is without that names a file."""
_ITEM_BEGINS: Final = frozenset(("", "-", "+", "|"))
ABOVE: Final = 6
"""How many folders above a skill's a project's files are looked for."""
_SCRIPT_WORDS: Final = """
.rb .pl .php .ps1 .ts .lua .r .jl .zsh .fish .bat .cmd .groovy .tcl .vbs .awk .applescript
"""
_SCRIPTS: Final = frozenset(_SCRIPT_WORDS.split())
_CITES: Final = re.compile(r"[\[\uff3b][^\w\n]{0,9}[\[\uff3b]|<sup")
_ROW: Final = re.compile(r"\brow (\d+)\b")


class NamedFile(NamedTuple):
    """A file that a body names, on which line and column, and whether for sure as one of the skill's own folder."""

    line: int
    column: int
    path: str
    sure: bool


def named_files(body: str) -> Iterator[NamedFile]:
    """Yield files of the skill that *body* names: targets of links, and paths in code spans and in commands.

    Strict about what is a name: placeholders, examples, what is to be written and what lies elsewhere are none.
    """
    if not any(part in body for part in _PARTS):
        return
    fences: list[tuple[str, str]] = []
    lead = ""
    for number, line in enumerate(body.split("\n"), 1):
        mark = _FENCE.match(line) if "```" in line or "~~~" in line else None
        if mark and fences and not mark[2] and mark[1].startswith(fences[-1][0]):
            fences.pop()
        elif mark and (mark[2] or not fences):  # one in another is part of what is shown
            fences.append((mark[1], mark[2].lower()))
        elif not fences:
            if not (line[:1] in _ITEM_BEGINS or line.isspace() or _ITEM.match(line)):
                lead = line if line.rstrip(" *_").endswith(":") else ""
            if any(part in line for part in _PARTS):
                yield from _line_files(number, line, lead)
        elif "/" in line and len(fences) == 1 and fences[0][1] in _SHELLS:
            yield from _paths(number, line, 0, line, lead)


def _line_files(number: int, line: str, lead: str) -> Iterator[NamedFile]:
    """Yield what a line of prose names."""
    prose, spans = _code_spans(line) if "`" in line else (line, [])
    for link in _LINK.finditer(prose):
        path = unquote(link[1].partition("#")[0].partition("?")[0]).removeprefix("./")
        if not re.match(r"[a-zA-Z][\w+.-]*:|[/#.]", path) and _is_name(path):
            yield NamedFile(number, link.start(1) + 1, path, sure=True)
    for start, text in spans:
        yield from _paths(number, line, start, text, lead)


def _paths(number: int, line: str, start: int, text: str, lead: str) -> Iterator[NamedFile]:
    """Yield the paths in *text*, which begins at *start* of a line; *lead* is what introduces its list or code."""
    for match in _PATH.finditer(text):
        in_folder = match[1] not in {None, "./"}
        first = start + match.start()
        if _is_name(match[2]) and (
            in_folder or _is_meant(line[max(first - 200, 0) : first], line[start + match.end() :][:90], lead)
        ):
            yield NamedFile(number, start + match.start(2) + 1, match[2], sure=in_folder)


def _is_meant(before: str, behind: str, lead: str) -> bool:
    """Whether words around a path take it for a file that is in the skill's folder."""
    if _SUPPOSED.search(before) or _DOUBTED.match(behind) or _OTHERS.search(before):
        return False
    if _DIRECTED.search(before):
        return True
    lead = lead[-200:]
    return not (_WRITTEN.search(before) or (_LEAD.search(lead) and not _READ.search(lead)))


def _code_spans(line: str) -> tuple[str, list[tuple[int, str]]]:
    """Return a line with blanks for its code spans, and the spans with where they begin; linear but for odd backticks."""
    parts = _TICKS.split(line)
    prose, spans = [], []
    index = offset = 0
    while index < len(parts):
        part, closing = parts[index], None
        if index % 2:
            closing = next((i for i in range(index + 2, len(parts), 2) if parts[i] == part), None)
        if closing is None:
            prose.append(part)
            offset += len(part)
            index += 1
            continue
        text = "".join(parts[index + 1 : closing])
        spans.append((offset + len(part), text))
        whole = len(text) + 2 * len(part)
        prose.append(" " * whole)
        offset += whole
        index = closing + 1
    return "".join(prose), spans


def _is_name(path: str) -> bool:
    """Whether *path* is one that can be looked for: of a usual suffix, within the folder, and no example."""
    parts = path.split("/")
    stem, _, suffix = parts[-1].rpartition(".")
    return (
        bool(stem)
        and suffix.lower() in _SUFFIXES
        and parts[-1] != "__init__.py"
        and ".." not in parts
        and not _ODD.search(path)
        and not _EXAMPLE.search(path)
    )


@dataclass(frozen=True)
class SkillLint:
    """One skill on this host beside what there is.

    Attributes:
        skill: The skill.
        suffixes: Suffixes that an interpreter is known for.
        tools: Ids of every tool that an agent, the runtime or the bundle has; None where that is not known.
        shown: Whether some model is shown its description.
    """

    skill: Skill
    suffixes: Collection[str]
    tools: Collection[str] | None
    shown: bool = True

    @cached_property
    def folder(self) -> Path:
        """The skill's folder."""
        return self.skill.folder or Path()

    @cached_property
    def file(self) -> str:
        """Name of the skill file."""
        return Path(self.skill.file or "SKILL.md").name

    @cached_property
    def text(self) -> str:
        """The skill file."""
        return self._read(self.file, MAX_SKILL_BYTES)

    @cached_property
    def body_line(self) -> int:
        """The line before the first of the body."""
        return self.text.count("\n", 0, max(self.text.rfind(self.skill.body), 0))

    @cached_property
    def words(self) -> WordLines:
        """The lines of the frontmatter."""
        return WordLines("\n".join(self.text.split("\n")[: self.body_line]))

    def _read(self, name: str, limit: int) -> str:
        if not os.path.lexists(self.folder / name):  # most skills have few of these files
            return ""
        try:
            text = read_file(self.folder, name, limit=limit).data.decode("utf-8-sig", "replace")
        except FileRefused:
            return ""
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def findings(self) -> Iterator[Diagnostic]:
        """Yield everything, paths relative to the skill's folder."""
        parts = (self._of_description, self._of_body, self._of_sources, self._of_tools, self._of_scripts)
        yield from chain.from_iterable(part() for part in parts)

    def _of_body(self) -> Iterator[Diagnostic]:
        if self.skill.tokens > MAX_TOKENS:
            message = (
                f"The body has about {self.skill.tokens:,} tokens, more than {MAX_TOKENS:,}; a model reads all of it."
            )
            fix = "Move what is not always needed into `references/`, and say in the body when to read it."
            yield Diagnostic("body_long", "warning", message, self.file, self.body_line + 1, fix=fix)
        yield from islice(self.missing_files(), MOST)

    def _of_description(self) -> Iterator[Diagnostic]:
        text = self.skill.description
        if _PLACEHOLDER.match(text):
            message = "The description is a placeholder: no model can tell from it what the skill is for."
            fix = "Say what the skill does and when to use it."
            yield Diagnostic(
                "description_placeholder",
                "warning",
                message,
                self.file,
                self.words.after("description"),
                ref="description",
                fix=fix,
            )
            return
        silent = not (self.skill.when_to_use or _OCCASION.search(text))
        if silent and self._is_offered and text.isascii() and len(_ENGLISH.findall(text)) > 1:
            message = "The description says what the skill does, and not when to use it."
            fix = "Add when to use it, in words of those who ask: `Use it when …`; or fill `when_to_use`."
            yield Diagnostic(
                "description_without_when",
                "info",
                message,
                self.file,
                self.words.after("description"),
                ref="description",
                fix=fix,
            )

    @property
    def _is_offered(self) -> bool:
        skill = self.skill
        kept = skill.hidden or skill.disable_model_invocation or skill.namespace == INTERNAL_NAMESPACE
        return self.shown and not kept

    def missing_files(self) -> Iterator[Diagnostic]:
        """Yield files that the body names and that are not there."""
        seen: set[tuple[str, bool]] = set()
        for name in named_files(self.skill.body):
            known = {(name.path, True), (name.path, name.sure)} & seen
            seen.add((name.path, name.sure))
            if known or os.path.lexists(self.folder / name.path):
                continue
            sure = name.sure or os.path.lexists(self.folder / name.path.partition("/")[0])
            if not name.sure and self._is_of_project(name.path):
                continue
            seen.add((name.path, True))
            message = f"The body names {name.path}, which is not in the skill's folder."
            fix = f"Add {name.path}, or take it out of the body" + (
                "." if sure else "; of a file elsewhere, say where it is."
            )
            line = self.body_line + name.line
            severity: Severity = "warning" if sure else "info"
            yield Diagnostic("file_not_there", severity, message, self.file, line, name.column, ref=name.path, fix=fix)

    @cached_property
    def _begins_at_root(self) -> bool:
        return bool(_AT_ROOT.search(self.skill.body))

    def _is_of_project(self, path: str) -> bool:
        """Whether a path that may be the skill's is rather one of the project that is worked on."""
        top, _, below = path.partition("/")
        absent = top == "scripts" and not os.path.lexists((self.folder / path).parent)
        if absent and ("/" in below or self._begins_at_root):
            return True
        for folder in islice(self.folder.absolute().parents, ABOVE):
            if os.path.lexists(folder / path):
                return True
            if os.path.lexists(folder / ".git"):
                break
        return False

    def _of_sources(self) -> Iterator[Diagnostic]:
        rows, findings = normalize_sources(self.skill.sources)
        if findings:
            name, lines = self._source_lines()
            for finding in islice(findings, MOST):
                row = _ROW.search(finding.message) or _ROW.search(finding.ref or "")
                number = int(row[1]) if row else 0
                line = lines[number - 1] if 0 < number <= len(lines) else None
                fix = "Give each row a `url` or `physical_path`, and a `sid` of its own from 1 on."
                yield replace(finding, path=name, line=line, fix=finding.fix or fix)
        sids = {row.sid for row in rows if row.sid is not None}
        for path, text, is_body in (
            (self.file, self.skill.body, True),
            (COMPACT_FILE, self._read(COMPACT_FILE, LIMITS[COMPACT_FILE]), False),
        ):
            unknown: dict[int, int] = {}
            for token in find_tokens(text) if _CITES.search(text) else ():
                for first, last in token.items:
                    wrong = next((sid for sid in (first, last) if sid not in sids), None)
                    if wrong is not None:
                        unknown.setdefault(wrong, token.start)
            for sid, start in islice(unknown.items(), MOST):
                message = f"The text cites [[S:{sid}]], and `sources.yaml` has no row {sid}: the citation is dropped."
                above = self.body_line if is_body else 0
                line, column = above + text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)
                fix = f"Add a row with `sid: {sid}`, or take the citation out."
                yield Diagnostic("citation_dropped", "warning", message, path, line, column, ref=str(sid), fix=fix)

    def _source_lines(self) -> tuple[str, list[int]]:
        """Return the name of the file of sources, and the line each row begins on."""
        name = next((name for name in SOURCES_FILES if os.path.lexists(self.folder / name)), SOURCES_FILES[0])
        try:
            node: Any = load_yaml(self._read(name, LIMITS[name]), YamlLimits(nodes=200_000, size=LIMITS[name])).root
        except YamlRefused:
            return name, []
        if isinstance(node, Fields):
            node = next(
                (node.items[key] for key in ("sources", "items") if isinstance(node.items.get(key), Items | Fields)),
                node,
            )
        if isinstance(node, Fields):
            return name, [node.keys[key].line + 1 for key, row in node.items.items() if isinstance(row, Fields)]
        rows = node.items if isinstance(node, Items) else []
        return name, [row.mark.line + 1 for row in rows if isinstance(row, Fields)]

    def _of_tools(self) -> Iterator[Diagnostic]:
        if self.tools is None:
            return
        name = next((name for name in TOOLS_FILES if os.path.lexists(self.folder / name)), "")
        lines = WordLines(self._read(name, LIMITS[name])) if name else WordLines("")
        for tool in self.skill.tools:
            yield from self.tool_finding(tool.id, name, lines.after(tool.id), required=tool.required)
        for entry in dict.fromkeys(each.tool for each in allowed_tools(self.skill.allowed_tool_names)):
            yield from self.tool_finding(entry, self.file, self.words.after("allowed-tools", entry), required=False)

    def tool_finding(self, name: str, path: str, line: int | None, *, required: bool) -> Iterator[Diagnostic]:
        """Yield what is wrong with a tool's name, written on a line of *path*."""
        known_tools = self.tools or ()
        if tool_id(name) in known_tools or name.startswith(("mcp_", "mcp:", "remote.")):
            return
        nearest_name, ratio = nearest(name, (*known_tools, *PUBLISHED_TOOLS))
        mistyped = ratio >= ALIKE
        outcome = " Where tools are given, no agent gets the skill." if required else ""
        message = f"No agent, runtime or bundle known here has the tool {name!r:.100}.{outcome}"
        advice = "Register the tool, or take it out."
        fix = (
            f"Write {nearest_name!r}."
            if mistyped
            else advice + (f" The name most like it is {nearest_name!r}." if nearest_name else "")
        )
        yield Diagnostic(
            "tool_not_known", "warning" if mistyped or required else "info", message, path, line, ref=name, fix=fix
        )

    def _of_scripts(self) -> Iterator[Diagnostic]:
        try:
            entries = [entry.path for entry in walk_tree(self.folder, "scripts") if entry.kind == "file"]
        except FileRefused:
            return
        stems = {path.rpartition(".")[0] for path in entries if Path(path).suffix.lower() in self.suffixes}
        by_suffix: dict[str, list[str]] = {}
        for path in entries:
            suffix = Path(path).suffix.lower()
            unknown = suffix in _SCRIPTS and suffix not in self.suffixes and path.rpartition(".")[0] not in stems
            if unknown or (not suffix and self._is_program(f"scripts/{path}")):
                by_suffix.setdefault(suffix, []).append(f"scripts/{path}")
        for suffix, paths in by_suffix.items():
            more = f", nor {len(paths) - 1} more like it" if len(paths) > 1 else ""
            kind = f"scripts {suffix}" if suffix else "scripts without a suffix"
            message = f"No interpreter is known for {kind}: {printable_path(paths[0])} cannot be run{more}."
            fix = f"Write it in a language of one of {', '.join(self.suffixes)}, or have a plugin register an interpreter."
            yield Diagnostic(
                "interpreter_unknown", "warning", message, printable_path(paths[0]), 1, ref=suffix or None, fix=fix
            )

    def _is_program(self, path: str) -> bool:
        try:
            with open_file(self.folder, path) as stream:
                return stream.read(2) == b"#!"
        except (FileRefused, OSError):
            return False


def bundle_findings(bundle: Bundle, subsystem: SkillsSubsystem, root: Path) -> Iterator[Diagnostic]:
    """Yield what is wrong with a bundle beyond its skills, whose files lie below *root*."""
    bundle_skills = {
        name: skill for name, skill in subsystem.registry.items() if Path(skill.file or "").is_relative_to(root)
    }
    yield from _import_findings(
        bundle_skills, KnownSkills(subsystem.registry, dict.fromkeys(subsystem.snapshot.invalid, "")), root
    )
    yield from _demo_findings(bundle, {*subsystem.registry, *subsystem.snapshot.invalid})


def tools_of(bundle: Bundle) -> Iterator[str]:
    """Yield what may be ids of tools in a bundle's `tools.py`, which is read and not run: its texts and its functions."""
    try:
        text = read_file(bundle.root, "tools.py", limit=MAX_SKILL_BYTES).data.decode("utf-8", "replace")
    except FileRefused:
        return
    for match in re.finditer(r"[\"']([\w.-]{1,100})[\"']|\bdef[ \t]{1,20}(\w{1,100})", text):
        yield match[1] or f"tools.{match[2]}"


def pointed_at(finding: Diagnostic, bundle: Bundle) -> Diagnostic:
    """Return a finding of discovery or of rules with the descriptor's line it is about, and its cure."""
    cures = {
        "rule_matches_nothing": "Write the full id of a skill of this bundle, or take the rule out.",
        "root_missing": "Make the folder, or name the one that holds the skills.",
        "duplicate_id": "Rename one of the two skills, or move it into another namespace.",
    }
    if finding.code not in cures:
        return finding
    path, line = finding.path, finding.line
    if path is None:
        path, words = descriptor_words(bundle)
        source = finding.message.partition(": ")[0].removeprefix("agents_config.").rpartition(".")[0]
        root = next((key for key in ("custom_skills_root", "CUSTOM_SKILLS_ROOT") if words.after(key)), "")
        line = words.after(root) if finding.code == "root_missing" else words.after(source, finding.ref or "")
    return replace(finding, path=path, line=line, fix=finding.fix or cures[finding.code])


def _import_findings(bundle_skills: Mapping[str, Skill], known_skills: KnownSkills, root: Path) -> Iterator[Diagnostic]:
    """Yield what skills import that is not there, and circles, each at the import."""
    open_skills = {name: replace(skill, include_for=()) for name, skill in known_skills.skills.items() if skill.imports}
    everything = KnownSkills({**known_skills.skills, **open_skills}, known_skills.refused)
    importing = [open_skills[name] for name in bundle_skills if name in open_skills]
    closure = close(everything, Rules(include_internal=True), importing)

    def at(importer: str, ref: str) -> tuple[str, int | None]:
        lint = SkillLint(bundle_skills[importer], (), None)
        path = Path(bundle_skills[importer].file or "").relative_to(root).as_posix()
        return printable_path(path), lint.words.after("imports", ref) or lint.words.after("import", ref)

    for refused in closure.skipped:
        importer = refused.details["chain"][-2]
        if importer in bundle_skills and refused.code in {"unknown_skill", "invalid_ref"}:
            path, line = at(importer, refused.ref)
            nearest_name, ratio = nearest(
                refused.ref, (*everything.skills, *(name.partition(".")[2] for name in everything.skills))
            )
            fix = f"Write {nearest_name!r}." if ratio >= ALIKE else "Add that skill, or take the import out."
            message = f"{importer} imports {refused.ref!r:.100}, which no skill is."
            yield Diagnostic("import_skipped", "warning", message, path, line, ref=importer, fix=fix)
    for importer, message in {
        each.ref or "": each.message for each in closure.diagnostics if each.code == "import_cycle"
    }.items():
        if importer in bundle_skills:
            target, skill = message.rpartition(" -> ")[2], bundle_skills[importer]
            ref = next((ref for ref in skill.imports if dependency_id(everything, skill, ref) == target), target)
            path, line = at(importer, ref)
            fix = "Take one import of the circle out; what all of them need can be a skill of its bundle_skills."
            yield Diagnostic(
                "import_cycle", "warning", message[:1].upper() + message[1:], path, line, ref=importer, fix=fix
            )


def _demo_findings(bundle: Bundle, known_ids: Collection[str]) -> Iterator[Diagnostic]:
    """Yield why `demo.yaml` cannot be replayed, or which skills it names that there are not."""
    if bundle.demo_path is None:
        return
    name = bundle.demo_path.name
    fix = "Mend it by the reference of recordings, or record the demo anew."
    try:
        text = read_file(bundle.root, name, limit=MAX_DEMO).data.decode("utf-8")
        demo = parse_cassette(text, name=name)
    except (FileRefused, UnicodeDecodeError) as error:
        yield Diagnostic("demo_invalid", "error", f"{name} cannot be read: {error}.", name, fix=fix)
        return
    except ReplayError as error:
        line = error.details.get("line")
        try:
            load_yaml(text, YamlLimits(nodes=1_000_000, size=MAX_DEMO))
        except YamlRefused as refusal:
            line = refusal.position[0] + 1 if refusal.repairable and refusal.position else line
        message = " ".join(error.message.split())
        yield Diagnostic("demo_invalid", "error", f"{message}.", name, line, ref=error.details.get("place"), fix=fix)
        return
    words = WordLines(text)
    bare_ids = {full_id.partition(".")[2] for full_id in known_ids}
    for written in dict.fromkeys(_demo_skills(demo)):
        ref = parse_ref(written)
        if ref.kind == "number" or ref.value in known_ids or (ref.kind == "bare" and ref.value in bare_ids):
            continue
        nearest_name, ratio = nearest(ref.value, (*known_ids, *bare_ids))
        cure = f"Write {nearest_name!r}." if ratio >= ALIKE else "Name a skill of this bundle, or record the demo anew."
        message = f"{name} names {written!r:.100}, which no skill of this bundle is."
        yield Diagnostic("demo_skill_unknown", "warning", message, name, words.after(written), ref=written, fix=cure)


def _demo_skills(demo: Cassette) -> Iterator[str]:
    """Yield the skills that a recording expects, has active, or loads; calls recorded as failed may name anything."""
    expected = demo.expect.get("skills")
    yield from (text for text in (expected if isinstance(expected, list) else ()) if isinstance(text, str))
    for entry in demo.replies:
        yield from entry.when.active or ()
    if any(text.startswith("skills.load failed") for entry in demo.replies for text in entry.when.results or ()):
        return
    for call in (call for entry in demo.replies for call in entry.reply.calls):
        names = call.arguments.get("names") if isinstance(call.arguments, dict) and "load" in call.tool else None
        yield from (text for text in (names if isinstance(names, list) else ()) if isinstance(text, str))

"""What scripts of skills need, as `check`, `show` and `why` tell it: what is declared, what seems to be missing, and its cure."""

from __future__ import annotations

import ast
import difflib
import re
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from packaging.utils import canonicalize_name

from kdskills.environments.needs import SkillNeeds, needs_of, node_packages, script_blocks
from kdskills.environments.suggest import (
    MAX_SCRIPT_BYTES,
    MAX_SCRIPTS,
    ScriptFacts,
    SuggestedPackage,
    declared_names,
    first_words,
    install_lines,
    script_block_text,
    skill_facts,
)
from kdskills.errors import Diagnostic, ExecFailed, FileRefused
from kdskills.execution.rootfs import image_programs, image_recipe_dir, image_versions, recipe
from kdskills.skills.private_files import replace_file
from kdskills.skills.safe_open import FileRead, printable_path, read_file, walk_tree

if TYPE_CHECKING:
    from kdskills.execution.protocol import ImageParts
    from kdskills.skills import Skill

_SHEBANG = re.compile(rb"#![^\r\n]*(?:\r\n|\r|\n|$)")
_CODING = re.compile(rb"[ \t\f]*#[^\r\n]*?coding[:=][^\r\n]*(?:\r\n|\r|\n|$)")
_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class ScriptReport:
    """What one script needs: declared, in which files, and what else it seems to need (`suggested`).

    `missing` names the packages and programs of both that the sandbox's image does not have; packages an environment brings.
    """

    path: str
    requirements: tuple[str, ...] = ()
    requires_python: str = ""
    node: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    suggested: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """All of it in one sentence; "" when nothing beyond the image is needed."""
        packages = (*self.requirements, *self.node)
        parts = [f"needs {', '.join(packages)} ({', '.join(self.origins)})"] if packages else []
        parts += [f"seems to need {', '.join(self.suggested)}, which nothing declares"] if self.suggested else []
        parts += [f"the sandbox's image lacks {', '.join(self.missing)}"] if self.missing else []
        return f"{self.path}: {'; '.join(parts)}" if parts else ""


class ImageContent(NamedTuple):
    """What the sandbox's image has: canonical names of distributions, names of programs; `runs` is the program of a suffix."""

    packages: frozenset[str]
    programs: frozenset[str]
    runs: Mapping[str, str]

    @classmethod
    def collect(cls, image: ImageParts, interpreters: Mapping[str, Sequence[str]]) -> ImageContent:
        """Return what an *image* with these further parts has; *interpreters* are commands by suffix."""
        try:
            names = [*image_versions(**image)]
        except ExecFailed:  # it cannot be built on this machine; what it would have counts
            names = [*(name for name, _ in recipe(image_recipe_dir() / "packages.txt")), *image["packages"]]
        runs = {suffix: command[0] for suffix, command in interpreters.items()}
        return cls(frozenset(map(canonicalize_name, names)), image_programs(image["profiles"]), runs)


class BlockPlan(NamedTuple):
    """A script with its inline metadata written into it; `reason` says why that is not done."""

    path: str
    before: FileRead
    after: bytes
    block: str
    reason: str = ""

    @property
    def diff(self) -> str:
        """The edit as a unified diff."""
        name = printable_path(self.path)
        was, will = (data.decode("utf-8", "replace").split("\n") for data in (self.before.data, self.after))
        diff = difflib.unified_diff(was, will, f"a/{name}", f"b/{name}", lineterm="")
        return "".join(each.rstrip("\r") + "\n" for each in diff)


@dataclass(frozen=True)
class SkillScripts:
    """The scripts of one skill beside what the image has; files are read when they are asked about."""

    skill: Skill
    image: ImageContent

    @cached_property
    def folder(self) -> Path | None:
        """The skill's folder on this host, or None."""
        return self.skill.folder

    @cached_property
    def scripts(self) -> tuple[str, ...]:
        """Paths of the programs in `scripts/` that a runtime starts, at most `MAX_SCRIPTS`."""
        try:
            tree = walk_tree(self.folder, "scripts") if self.folder else []
        except FileRefused:
            return ()
        files = (f"scripts/{entry.path}" for entry in tree if entry.kind == "file")
        return tuple(path for path in files if Path(path).suffix.lower() in self.image.runs)[:MAX_SCRIPTS]

    @cached_property
    def needs(self) -> Mapping[str, SkillNeeds]:
        """What each script declares; "" is the skill itself."""
        return {path: needs_of(self.skill, path or None) for path in ("", *self.scripts)}

    @cached_property
    def facts(self) -> Mapping[str, ScriptFacts]:
        """What the text of each Python file of the skill shows."""
        return skill_facts(self.folder) if self.folder else {}

    @cached_property
    def programs(self) -> list[str]:
        """The scripts that are no mere modules of others."""
        modules = {module for facts in self.facts.values() for module in facts.modules}
        starting = {path for path, facts in self.facts.items() if facts.starts}
        return [path for path in self.scripts if path not in modules or path in starting]

    @cached_property
    def installs(self) -> tuple[SuggestedPackage, ...]:
        """What code blocks of the instructions install."""
        return install_lines(self.folder, Path(self.skill.file or "").name) if self.folder else ()

    @cached_property
    def first_words(self) -> frozenset[str]:
        """What commands in code blocks of the instructions begin with."""
        return first_words(self.folder, Path(self.skill.file or "").name) if self.folder else frozenset()

    def imported_packages(self, path: str) -> list[SuggestedPackage]:
        """Return the packages that a script cannot do without, declared or not."""
        certain_names = {each.name for each in self.installs if not each.node} | self.image.packages
        packages = self.facts[path].packages if path in self.facts else ()
        return [
            each._replace(certain=each.certain or each.name in certain_names) for each in packages if not each.optional
        ]

    def undeclared(self, path: str) -> list[SuggestedPackage]:
        """Return those of them that nothing declares and the image does not have."""
        present = declared_names(self.needs[path].spec) | self.image.packages
        return [package for package in self.imported_packages(path) if package.name not in present]

    def suggested_requirements(self, path: str) -> frozenset[str]:
        """Return the packages, no guesses among them, that a script imports and that neither anything declares nor the image has."""
        packages = self.undeclared(path) if path in self.needs else []
        return frozenset(package.requirement for package in packages if package.certain)

    def findings(self) -> Iterator[Diagnostic]:
        """Yield what an author should mend or declare: all that `check` says of needs."""
        declared = {finding: None for needs in self.needs.values() for finding in needs.diagnostics}
        yield from declared
        for path in self.programs:
            if not self.needs[path].diagnostics and (packages := self.undeclared(path)):
                yield _undeclared(path, packages, self.imported_packages(path), self.needs[path].python_origin)
        if not declared:
            yield from self.uncovered()
        yield from self.unknown_programs()

    def uncovered(self) -> Iterator[Diagnostic]:
        """Yield what the instructions install and no file declares; it may be meant for another machine, so it only informs."""
        specs = [needs.spec for needs in self.needs.values()]
        present = self.image.packages.union(*map(declared_names, specs))
        present |= {package.name for path in self.scripts for package in self.undeclared(path)}
        node = {name for spec in specs if spec.node for name in node_packages(spec.node)}
        for key, packages in (
            ("python", [each for each in self.installs if not each.node and each.name not in present]),
            ("node", [each for each in self.installs if each.node and each.name not in node]),
        ):
            if packages:
                # Words of the field are parted by blanks, which stand in a requirement only before a marker.
                names = [each.name if " " in each.requirement else each.requirement for each in packages]
                message = f"The instructions install {', '.join(names)}, which no file of the skill declares."
                fix = f'Add to the frontmatter:\nmetadata:\n  kdskills.{key}: "{" ".join(names)}"'
                yield Diagnostic("dependency_undeclared", "info", message, packages[0].path, packages[0].line, fix=fix)

    def unknown_programs(self) -> Iterator[Diagnostic]:
        """Yield a warning for each program that is named, or runs a script, and that the image does not have."""
        declared = self.needs[""]
        rows = [(program, declared.program_origin) for program in declared.spec.programs]
        rows += [(self.image.runs[Path(path).suffix.lower()], path) for path in self.scripts]
        for program, origin in dict.fromkeys(rows):
            if program not in self.image.programs:
                message = f"The sandbox's image has no program {program}, so that what needs it fails there."
                fix = "Whoever runs the skill adds it to the image; say in the skill how to go on without it."
                yield Diagnostic("program_unknown", "warning", message, printable_path(origin), ref=program, fix=fix)

    def rows(self) -> tuple[ScriptReport, ...]:
        """Return what each script needs."""
        return tuple(map(self._row, self.scripts))

    def _row(self, path: str) -> ScriptReport:
        spec = self.needs[path].spec
        packages = self.undeclared(path)
        programs = {self.image.runs[Path(path).suffix.lower()], *spec.programs}
        programs |= set(self.facts[path].programs) if path in self.facts else set()
        absent = (declared_names(spec) | {package.name for package in packages}) - self.image.packages
        return ScriptReport(
            path=printable_path(path),
            requirements=spec.requirements,
            requires_python=spec.requires_python,
            node=tuple(node_packages(spec.node)) if spec.node else (),
            programs=tuple(sorted(programs)),
            origins=spec.origins,
            suggested=tuple(
                package.requirement if package.certain else f"{package.requirement}?" for package in packages
            ),
            missing=(*sorted(absent), *sorted(programs - self.image.programs)),
        )

    def declare(self, *, dry_run: bool = False) -> Iterator[BlockPlan]:
        """Write blocks that declare what scripts import, where nothing else speaks for them and nothing is a guess.

        Yields what was done, or, with *dry_run*, would be; a plan with a `reason` was not carried out.
        """
        for path in self.programs:
            if self.folder and not self.needs[path].diagnostics and self.undeclared(path):
                plan = _planned(self.folder, path, self.imported_packages(path), self.needs[path].python_origin)
                try:
                    if not (plan.reason or dry_run):
                        _write_block(self.folder, plan)
                except FileRefused as refusal:
                    plan = plan._replace(reason=refusal.message)
                yield plan


def _undeclared(
    path: str, packages: list[SuggestedPackage], imported: list[SuggestedPackage], origin: str
) -> Diagnostic:
    names = ", ".join(f"{each.name}{'' if each.certain else f' (a guess, for {each.module})'}" for each in packages)
    message = f"The script imports what nothing declares and the sandbox's image does not have: {names}."
    fix = f"Add them to {origin!r}." if origin else "Put at the beginning of the script:\n"
    fix += "" if origin else script_block_text(package.requirement for package in imported).rstrip("\n")
    line = next((package.line for package in packages if package.path == path), None)
    return Diagnostic("dependency_undeclared", "warning", message, printable_path(path), line, fix=fix)


def _planned(folder: Path, path: str, packages: list[SuggestedPackage], origin: str) -> BlockPlan:
    before = read_file(folder, path, limit=MAX_SCRIPT_BYTES)
    block = script_block_text(package.requirement for package in packages)
    guesses = [package.name for package in packages if not package.certain]
    if origin:
        return BlockPlan(path, before, b"", block, f"{origin!r} speaks for it; add what it lacks there")
    if guesses:
        return BlockPlan(path, before, b"", block, f"{', '.join(guesses)} would be a guess")
    after = with_block(before.data, block)
    if after is None:
        return BlockPlan(path, before, b"", block, "the block would change what the script does")
    return BlockPlan(path, before, after, block)


def with_block(data: bytes, block: str) -> bytes | None:
    """Return a Python script with inline metadata after its first lines for the system; None where that would change the program."""
    offset = len(_BOM) if data.startswith(_BOM) else 0
    for pattern in (_SHEBANG, _CODING):
        match = pattern.match(data, offset)
        offset = match.end() if match else offset
    ends = _LINE_END.search(data)
    end = ends[0] if ends else b"\n"
    head = data[:offset] + (end if offset and not data[:offset].endswith((b"\r", b"\n")) else b"")
    separator = b"" if _LINE_END.match(data, offset) or offset == len(data) else end
    after = head + block.encode().replace(b"\n", end) + separator + data[offset:]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            unchanged = ast.dump(ast.parse(data)) == ast.dump(ast.parse(after))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    blocks, _ = script_blocks(after.decode("utf-8", "replace"))
    return after if unchanged and len(blocks) == 1 else None


def _write_block(folder: Path, plan: BlockPlan) -> None:
    """Carry *plan* out in one step; the file keeps its mode. Raises FileRefused when it is not the one planned for."""
    current = read_file(folder, plan.path, limit=MAX_SCRIPT_BYTES)
    if current.data != plan.before.data:
        raise FileRefused(f"{plan.path} has changed since the plan was made", code="changed", path=plan.path)
    try:
        replace_file(folder / plan.path, plan.after, mode=stat.S_IMODE(current.stat.st_mode), durable=True)
    except OSError as error:
        reason = error.strerror or "the system refused"
        raise FileRefused(f"{plan.path} cannot be mended: {reason}", path=plan.path) from error


# ---- whether it started ----

_MODULE: Final = re.compile(
    r"No module named '?([\w.]+)'?|Cannot find (?:module|package) '([^'\n]{1,200})'|cannot import name '(\w+)' from '[\w.]+'"
)
_PROGRAM: Final = re.compile(
    r"(?:^|[\s:])([\w.+-]{1,100}): (?:command )?not found\s*$"
    r"|env: [‘'\"]?([\w.+-]{1,100})[’'\"]?: No such file or directory"
    r"|No such file or directory: '([\w.+-]{1,100})'\s*$",
    re.MULTILINE,
)
_INSTALL: Final = re.compile(
    r"\b(?:pip3?|npm|apt(?:-get)?|brew) (?:install|i) +(?:-[\w-]+ +)*([@\w][\w./@\[\]-]{0,100})"
)
_IMPORT_ERROR: Final = re.compile(
    r"^(?:ImportError|ModuleNotFoundError|OSError: (?:no library called|cannot load library))\b", re.MULTILINE
)
_UNREADABLE: Final = re.compile(r"^(SyntaxError|IndentationError|TabError)\b.*", re.MULTILINE)
_NOT_FOUND: Final = 127
_USAGE: Final = 2
_LOST: Final = {"oom": "it ran out of memory", "limit": "it hit a limit", "cancelled": "it was ended"}


class StartVerdict(NamedTuple):
    """Whether a program started; `missing` names modules, packages or programs it lacks, `reason` is for people.

    It did when it got past everything it imports: it ended with 0, with 2 and its usage, or with anything else that does not say
    that a package, a module or a program is missing; or its time was up. One that ran out of memory, or that its
    interpreter cannot read, did not.
    """

    started: bool
    missing: tuple[str, ...] = ()
    reason: str = ""


def judge_start(status: str, exit_code: int | None, stdout: str, stderr: str) -> StartVerdict:
    """Return the verdict on a program that ended with *exit_code*; *status* is that of its `ExecResult`."""
    if status in _LOST:
        return StartVerdict(started=False, reason=_LOST[status])
    words = f"{stdout}\n{stderr}"
    if exit_code == 0 or status == "timeout" or (exit_code == _USAGE and "usage" in words.lower()):
        return StartVerdict(started=True)
    unreadable = _UNREADABLE.search(stderr)
    if unreadable is not None:
        return StartVerdict(started=False, reason=unreadable[0][:200])
    modules = _matched(_MODULE, words)
    if modules or _IMPORT_ERROR.search(stderr):
        last_line = stderr.rstrip().rpartition("\n")[2]
        return StartVerdict(started=False, missing=modules, reason=last_line[:200])
    programs = _matched(_PROGRAM, stderr) if exit_code == _NOT_FOUND or "subprocess.py" in stderr else ()
    missing = programs or _matched(_INSTALL, words)
    return StartVerdict(started=not missing, missing=missing, reason=f"{', '.join(missing)} missing" if missing else "")


def _matched(pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
    """Return what a pattern's groups match, each once."""
    return tuple(dict.fromkeys(group for match in pattern.finditer(text) for group in match.groups() if group))

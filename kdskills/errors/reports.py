"""Findings as other programs read them: which of them are told, as SARIF 2.1.0, and as workflow commands of GitHub.

Messages and paths are those of strangers: nothing in them becomes a link, a placeholder, or a command of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from kdskills.errors import Diagnostic

EVERY_CODE: Final = "all"
"""Selects every code."""
LEVELS: Final = MappingProxyType({"error": "error", "warning": "warning", "info": "note"})
COMMANDS: Final = MappingProxyType({"error": "error", "warning": "warning", "info": "notice"})
BUNDLE_CODES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "body_long": "The body has more than 5,000 tokens.",
        "bundle_file_ignored": "A file of the bundle is no regular file, and is not used.",
        "bundle_without_skills": "The bundle has no skill.",
        "check_code_unknown": "`check` in the descriptor names a code that no finding has.",
        "citation_dropped": "A text cites a source that `sources.yaml` has no row for.",
        "consumer_unknown": "Rules name a consumer that no agent is.",
        "demo_invalid": "`demo.yaml` cannot be replayed.",
        "demo_skill_unknown": "`demo.yaml` names a skill that is not there.",
        "dependency_undeclared": "A script needs a package that nothing declares and the image does not have.",
        "description_placeholder": "The description is a placeholder.",
        "description_without_when": "The description does not say when to use the skill.",
        "descriptor_key_ignored": "A key of the descriptor counts only from the caller.",
        "descriptor_unknown_key": "A key of the descriptor is not known; it is kept and ignored.",
        "duplicate_id": "Two folders of one root have one full id.",
        "duplicate_sid": "Two rows of sources have one number.",
        "entries_unreadable": "The entries of a root cannot be read.",
        "entry_invalid": "A skill of a root of entries cannot be written as files.",
        "environment_invalid": "What a script declares that it needs cannot be honoured.",
        "file_not_there": "The body names a file that is not in the skill's folder.",
        "import_cycle": "Skills import one another in a circle.",
        "import_skipped": "A skill imports one that cannot be used.",
        "index_ignored": "An index file is not believed, and will be rebuilt.",
        "index_not_written": "The index folder cannot be written.",
        "indistinguishable_skills": "Two skills that one model is shown cannot be told apart.",
        "interpreter_unknown": "No interpreter is known for a script.",
        "nested_skill": "A skill file lies inside another skill.",
        "network_asked": "A skill asks for hosts, which only an operator grants.",
        "network_invalid": "A host that a skill asks for is no rule.",
        "overlay_shadows": "A skill of an overlay hides one of the bundle.",
        "overlay_unreadable": "An overlay cannot be read.",
        "plugin_failed": "A plugin that checks skills failed.",
        "program_unknown": "A program that a skill names is not in the image.",
        "root_is_skill": "A skill file lies directly in a root, and is not loaded.",
        "root_missing": "The root of the skills is not there.",
        "root_untrusted": "A project root that nobody trusts.",
        "rule_ignored": "A part of the rules for everybody means nothing.",
        "rule_matches_nothing": "A rule matches no skill.",
        "scan_limit": "A root has more folders or skills than are read.",
        "skill_large": "A skill has more files or bytes than it may.",
        "skill_overridden": "A stronger root replaces a skill.",
        "skill_too_deep": "A skill lies deeper than `<namespace>/<skill>`, so that no agent gets it.",
        "source_bad_row": "A row of sources is no mapping.",
        "source_bad_sid": "The number of a row of sources is none.",
        "source_bad_url": "The URL of a row of sources does not parse.",
        "source_field_too_large": "A field of a row of sources is over 64 KiB.",
        "source_field_type": "A field of a row of sources is of another type.",
        "source_without_identity": "A row of sources has neither URL nor path.",
        "sources_not_rows": "`sources.yaml` has no rows.",
        "stale": "A text has changed since it was looked at.",
        "symlink_skipped": "A linked folder is not entered.",
        "tool_not_known": "A skill names a tool that no agent, runtime or bundle has.",
        "trust_namespace_unknown": "A policy of trust is for a namespace of which there is no skill.",
        "url_scheme_added": "A URL of a row of sources got `https`.",
    }
)
"""Codes that `kdskills check` has beside those of skill files (`kdskills.skills.findings.CODES`), and what each says."""


class ReportRule(NamedTuple):
    """What findings of one code have in common: `level` is SARIF's, `facts` goes into its property bag."""

    id: str
    meaning: str
    cure: str = ""
    level: str = "warning"
    facts: Mapping[str, str] = MappingProxyType({})


class ReportRow(NamedTuple):
    """One finding, whose path is relative to the reader's folder, or absolute; `accepted` is why somebody lets it be."""

    finding: Diagnostic
    accepted: str | None = None


class Selection(NamedTuple):
    """Codes, or how they begin, of findings that are told and that are left out; no code selected means every code."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def unknown(self, codes: Iterable[str]) -> list[str]:
        """Return what is the beginning of none of *codes*."""
        every = (EVERY_CODE, *codes)
        return [entry for entry in (*self.select, *self.ignore) if not any(c.startswith(entry or "\0") for c in every)]

    def tells(self, code: str, *, unusable: bool) -> bool:
        """Whether findings of *code* are told; one that makes something *unusable* goes by its whole code alone."""
        if unusable:
            return code not in self.ignore
        selected = not self.select or EVERY_CODE in self.select or code.startswith(self.select)
        return selected and not (EVERY_CODE in self.ignore or code.startswith(self.ignore))


def sarif_log(tool: str, rules: Iterable[ReportRule], rows: Iterable[ReportRow]) -> dict[str, Any]:
    """Return a SARIF 2.1.0 log of what *tool* found; what somebody accepted is suppressed. Unknown codes become rules."""
    rows = tuple(rows)
    by_id = {rule.id: rule for rule in rules}
    by_id |= {row.finding.code: ReportRule(row.finding.code, "") for row in rows if row.finding.code not in by_id}
    numbers = {code: number for number, code in enumerate(by_id)}
    results = [_result(row, numbers[row.finding.code]) for row in rows]
    driver = {"name": tool, "rules": [_descriptor(rule) for rule in by_id.values()]}
    run = {"tool": {"driver": driver}, "results": results, "columnKind": "unicodeCodePoints"}
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}


def _descriptor(rule: ReportRule) -> dict[str, Any]:
    facts: dict[str, Any] = {"id": rule.id, "defaultConfiguration": {"level": rule.level}}
    facts |= {"shortDescription": {"text": _plain(rule.meaning)}} if rule.meaning else {}
    facts |= {"help": {"text": _plain(rule.cure)}} if rule.cure else {}
    return facts | ({"properties": dict(rule.facts)} if rule.facts else {})


def _result(row: ReportRow, number: int) -> dict[str, Any]:
    finding = row.finding
    text = _plain(_sentence(finding))
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": number,
        "level": LEVELS.get(finding.severity, "warning"),
    }
    result["message"] = {"text": text}
    if finding.path is not None:
        address = quote(finding.path, errors="replace")
        location: dict[str, Any] = {"artifactLocation": {"uri": f"file://{address}" if address[:1] == "/" else address}}
        region = {"startLine": finding.line, "startColumn": finding.column if finding.line else None}
        region = {name: value for name, value in region.items() if value}
        result["locations"] = [{"physicalLocation": location | ({"region": region} if region else {})}]
    if row.accepted is not None:
        result["suppressions"] = [{"kind": "external", "justification": row.accepted}]
    return result


def _sentence(finding: Diagnostic) -> str:
    return f"{finding.message} {finding.fix}" if finding.fix else finding.message


def _plain(text: str) -> str:
    """Return *text* as SARIF writes it: braces would be placeholders, and brackets before a parenthesis a link."""
    return text.replace("{", "{{").replace("}", "}}").replace("](", "] (")


def github_commands(rows: Iterable[ReportRow]) -> Iterator[str]:
    """Yield a workflow command of GitHub for each finding that nobody accepted, each on one line."""
    for finding in (row.finding for row in rows if row.accepted is None):
        facts = {"file": finding.path, "line": finding.line, "col": finding.column if finding.line else None}
        words = ",".join(f"{key}={_property(value)}" for key, value in facts.items() if value)
        command = (
            f"{COMMANDS.get(finding.severity, 'warning')} {words}{',' if words else ''}title={_property(finding.code)}"
        )
        yield f"::{command}::{_data(_sentence(finding))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: object) -> str:
    return _data(str(value)).replace(":", "%3A").replace(",", "%2C")

"""Fuzzes descriptors, as values and as files of a bundle, and the rules in them."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(os.fspath(Path(__file__).parent))
from draw import Draw, scratch

from kdskills import SkillsDescriptor, load_bundle
from kdskills.errors import BundleError, DescriptorError
from kdskills.skills.folder import LazyContent
from kdskills.skills.model import Skill
from kdskills.skills.refs import compile_rules, is_pattern
from kdskills.skills.selection import KnownSkills, broken_imports, close, refuse

WORDS = (
    "custom_skills_root", "CUSTOM_SKILLS_ROOT", "agents_config", "AGENTS_CONFIG", "bundle_root", "version", "extra",
    "allow_outside_bundle", "enabled", "disabled", "imports", "strict", "listed", "private", '"*"', "true", "false",
    "null", "a.*", "*.b", "internal.*", "sk:a.b", "skills.a.b", "SK1", "[!a]*", "[![a]", "[a-", "[z-a]", "[]]", "[&&]",
    "..", "../x", "\\ud800", "\\u0000", "0x", "1e999", "NaN", "{", "}", "[", "]", ": ", ", ", "- ", "\n",
)  # fmt: skip
KEYS = (
    "custom_skills_root", "CUSTOM_SKILLS_ROOT", "agents_config", "AGENTS_CONFIG", "bundle_root", "version", "extra",
    "allow_outside_bundle", "agent_config", "note", 7, None,
)  # fmt: skip
RULE_KEYS = ("disabled", "enabled", "imports", "disable", 3)
CONSUMERS = ("writer", "*", "solver.react", "w*", "", "Writer")
RULES = (
    "public.b", "a.*", "*", "b", "sk:a.c", "internal.*", "SK1", "[!p]*", "[![a]*", "[a-", "[z-a].*", "?.c", "x.y.z",
    " a.b ", "skills.skills.a.b", "[]", "[!]", "**", "[[]", "a.[b--c]", "[a||b]*", "a\nb",
)  # fmt: skip


@cache
def _skills() -> dict[str, Skill]:
    rows = (
        ("public", "b", ("a.c", "internal.x")), ("public", "SK1", ()), ("a", "b", ("a.c",)), ("a", "c", ("a.b",)),
        ("internal", "x", ("public.gone",)), ("p-q", "c", ("internal.x",)), ("a", "d", ("b",)),
    )  # fmt: skip
    content = LazyContent.of_text("", 0, "")
    made = [Skill(i, n, i, "Text.", content, imports=imports) for n, i, imports in rows]
    return {skill.full_id: skill for skill in made}


@cache
def _place() -> Path:
    place = scratch() / "bundle"
    (place / "skills").mkdir(parents=True)
    return place


def check(data: bytes) -> None:
    """Only DescriptorError and BundleError come out; JSON gives the same descriptor; a denial never shows more."""
    draw = Draw(data)
    kind = draw.number(4)
    found = _read(kind, draw)
    if isinstance(found, DescriptorError):
        assert found.code.startswith("descriptor_")
        assert "key" in found.details
    elif isinstance(found, BundleError):
        assert found.code in {"bundle_unreadable", "bundle_file_refused"}, found
    else:
        _travels(found)
        _denies(found, Draw(data[::-1]) if kind < 2 else draw)


def _read(kind: int, draw: Draw) -> SkillsDescriptor | DescriptorError | BundleError:
    try:
        if kind == 0:
            return _from_file("skills_descriptor.yaml", draw)
        if kind == 1:
            return _from_file("skills_descriptor.json", draw)
        return SkillsDescriptor.model_validate(_descriptor(draw))
    except (DescriptorError, BundleError) as error:
        return error


def _from_file(name: str, draw: Draw) -> SkillsDescriptor:
    path = _place() / name
    path.write_bytes(draw.pumped(200_000))
    try:
        return load_bundle(path.parent, python="refuse").descriptor
    finally:
        path.unlink()


def _descriptor(draw: Draw) -> Any:
    if draw.number(16) == 15:
        return _value(draw, 0)
    found: dict[Any, Any] = {}
    for _ in range(draw.number(6)):
        key = draw.choice(KEYS)
        if key in {"agents_config", "AGENTS_CONFIG"} and draw.number(8) != 7:
            found[key] = {draw.choice(CONSUMERS): _rules(draw) for _ in range(draw.number(4))}
        else:
            found[key] = _value(draw, 0)
    return found


def _rules(draw: Draw) -> Any:
    if draw.number(16) == 15:
        return _value(draw, 0)
    found: dict[Any, Any] = {}
    for _ in range(draw.number(4)):
        key = draw.choice(RULE_KEYS[: 3 + 2 * (draw.number(8) == 7)])
        found[key] = draw.choice(("private", "listed", "strict")) if key == "imports" else _entries(draw)
    return found


def _entries(draw: Draw) -> Any:
    how = draw.number(8)
    if how == 7:
        return _value(draw, 0)
    if how == 6:
        return draw.flag()
    return [_rule(draw) for _ in range(draw.number(5))]


def _rule(draw: Draw) -> str:
    return draw.text(12) if draw.number(3) == 2 else draw.choice(RULES)


def _value(draw: Draw, depth: int) -> Any:
    kind = draw.number(12)
    if kind == 0:
        return None
    if kind == 1:
        return draw.flag()
    if kind == 2:
        return draw.number(1 << 70) - (1 << 69)
    if kind == 3:
        return 1 << (1 << draw.number(18))
    if kind == 4:
        return draw.choice((0.5, float("nan"), float("inf"), -0.0, 1e300))
    if kind == 5:
        return {draw.text(4), draw.text(4)}
    if kind == 6:
        return Path(draw.text(8))
    if kind == 7 and depth < 25:
        return [_value(draw, depth + 1) for _ in range(draw.number(4))]
    if kind == 8 and depth < 25:
        return {draw.text(6): _value(draw, depth + 1) for _ in range(draw.number(4))}
    if kind == 9:
        return draw.rest()[:4]
    return draw.text()


def _travels(found: SkillsDescriptor) -> None:
    written = json.dumps(found.to_json(), allow_nan=False)
    again = SkillsDescriptor.from_json(json.loads(written))
    assert again == found
    assert again.to_json() == found.to_json()
    assert again.content_hash == found.content_hash
    assert again.root_omitted == found.root_omitted
    assert pickle.loads(pickle.dumps(found)) == found
    assert all(entry.code for entry in found.diagnostics)


def _denies(found: SkillsDescriptor, draw: Draw) -> None:
    denied = [_rule(draw) for _ in range(1 + draw.number(2))]
    try:
        narrowed = found.narrow(denied)
    except DescriptorError:
        narrowed = found.narrow("a.b")
    for consumer in (None, *CONSUMERS, *list(found.agents_config)[:4]):
        before, after = _seen(found, consumer), _seen(narrowed, consumer)
        assert after[0] <= before[0], (consumer, denied)
        assert after[1] <= before[1], (consumer, denied)
    for rule in denied:
        matcher = compile_rules((rule,), bare="anywhere")
        for full_id in _skills():
            matched = matcher.match(full_id) is not None
            assert matched == (not matcher.unmatched({full_id}))
            if is_pattern(rule):
                assert matched == fnmatchcase(full_id, rule.strip())


def _seen(found: SkillsDescriptor, consumer: str | None) -> tuple[set[str], set[str]]:
    """Return what a consumer may use, and that with all that is imported by it."""
    policy = found.rules(consumer)
    known = KnownSkills(_skills())
    policy.findings(known.ids())
    passed: Iterable[Skill] = [skill for skill in known.skills.values() if refuse(policy, skill) is None]
    if policy.imports == "strict":
        broken = broken_imports(known, policy, passed)
        passed = [skill for skill in passed if skill.full_id not in broken]
    return {skill.full_id for skill in passed}, {skill.full_id for skill in close(known, policy, passed).order}

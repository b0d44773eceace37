"""The figures of the contract for skills stand in the code as published: changing one is a decision, not a slip."""

from __future__ import annotations

import inspect

import pytest

from kdskills.bundle import AgentRules
from kdskills.skills import discovery, fields, folder, frontmatter, index, refs
from kdskills.skills.refs import MOST_SAID
from kdskills.skills.yaml_core import YamlLimits
from kdskills.sources import rows, tokens
from kdskills.turn import SkillsSubsystem

KIB, MIB = 1024, 1024 * 1024


@pytest.mark.parametrize(
    ("found", "published"),
    [
        (frontmatter.MAX_SKILL_BYTES, 2 * MIB),
        ((YamlLimits().depth, YamlLimits().nodes, YamlLimits().size), (20, 2_000, 64 * KIB)),
        ((fields.MAX_NAME, fields.MAX_DESCRIPTION, fields.MAX_COMPATIBILITY), (64, 1_024, 500)),
        (fields.RESERVED_NAMESPACES, {"skills", "skill", "sk"}),
        ((folder.MAX_COMPACT_BYTES, folder.MAX_SOURCES_BYTES), (256 * KIB, MIB)),
        (folder.MAX_SOURCES_ROWS, 2_000),
        ((discovery.ScanLimits().folders, discovery.ScanLimits().skills), (50_000, 20_000)),
        ((discovery.MAX_FILES, discovery.MAX_BYTES), (512, 16 * MIB)),
        (discovery.DEEPEST, 6),
        (folder.CACHE_BYTES, 16 * MIB),
        (discovery.RACY_NS, 2_000_000_000),
        (refs.DEFAULT_NAMESPACE, "public"),
        (rows.MAX_FIELD, 64 * KIB),
        ((tokens.MAX_ITEMS, tokens.MAX_INLINE_CODE, tokens.MAX_FREE_RANGE), (200, 2_000, 1_000)),
        (AgentRules().imports, "private"),
        (MOST_SAID, 200),
    ],
)
def test_a_figure_is_as_published(found: object, published: object) -> None:
    """Bounds, defaults and reserved words are those of the reference pages."""
    assert found == published


def test_defaults_of_the_subsystem() -> None:
    """Views look again after a second, the index is on, roots are the built-in ones."""
    given = inspect.signature(SkillsSubsystem).parameters
    assert {name: given[name].default for name in ("auto_refresh", "index_dir", "roots", "bundle_root", "filters")} == {
        "auto_refresh": 1.0,
        "index_dir": "default",
        "roots": None,
        "bundle_root": None,
        "filters": (),
    }
    assert index.IndexStore("default").folder == index.default_index_dir()

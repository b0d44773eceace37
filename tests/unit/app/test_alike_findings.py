"""What `check` says of two skills that cannot be told apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kdskills.app import Host, Settings

SAME = "Drafts newsletters, posts and press releases for a product, with headlines that fit the channel."


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A Host without plugins of others, whose index folder may be written to."""
    return Host(Settings(index_dir=tmp_path / "index"), entry_points=False)


def write(bundle: Path, full_id: str, front: str = "", description: str = SAME) -> None:
    """Write a skill of a bundle."""
    namespace, _, name = full_id.partition(".")
    folder = bundle / "skills" / namespace / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "SKILL.md").write_text(f"---\nname: {name}\ndescription: {description}\n{front}---\nAsk first.\n")


def rules(bundle: Path, agents: dict[str, Any]) -> None:
    """Write the bundle's descriptor."""
    (bundle / "skills_descriptor.yaml").write_text(json.dumps({"consumers": ["one", "two"], "agents_config": agents}))


async def alike(host: Host, path: Path) -> list[Any]:
    """Return what `check` finds of skills that are alike."""
    found = (await host.call("skills.check", path=path)).diagnostics
    return [finding for finding in found if finding.code == "indistinguishable_skills"]


def search_files(folder: Path) -> list[Path]:
    """Return the kept indexes of a search below *folder*."""
    return list(folder.rglob("*.search"))


@pytest.mark.parametrize("below", ["", "skills"], ids=["bundle", "folder"])
async def test_a_pair_is_one_warning_with_a_cure(host: Host, tmp_path: Path, below: str) -> None:
    """Both are named, with words they share and a cure, at the first of them; nothing is written."""
    write(tmp_path / "b", "a.writer")
    write(tmp_path / "b", "b.drafter")
    (finding,) = await alike(host, tmp_path / "b" / below)
    assert (finding.severity, finding.path) == ("warning", "a/writer/SKILL.md")
    assert "a/writer and b/drafter cannot be told apart" in finding.message
    assert "newsletters" in finding.message
    assert "when to use which" in finding.fix
    assert search_files(tmp_path) == []


@pytest.mark.parametrize(
    ("front", "agents", "count"),
    [
        ("", {}, 1),
        ("", {"one": {"enabled": ["a.*"]}, "two": {"enabled": ["b.*"]}}, 0),
        ("", {"one": {"enabled": ["a.*"]}, "two": {}}, 1),
        ("", {"*": {"disabled": ["b.drafter"]}}, 0),
        ("agent_disclosure: hidden\n", {}, 0),
        ("disable-model-invocation: true\n", {}, 0),
        ("include_for: [two]\n", {"one": {}, "two": {"disabled": ["a.writer"]}}, 0),
    ],
    ids=["all", "one each", "both for one", "denied", "hidden", "for people", "for another"],
)
async def test_only_what_one_model_is_shown_together_is_told(
    host: Host, tmp_path: Path, front: str, agents: dict[str, Any], count: int
) -> None:
    """Two that no consumer is shown side by side confuse nobody."""
    write(tmp_path, "a.writer")
    write(tmp_path, "b.drafter", front)
    rules(tmp_path, agents)
    assert len(await alike(host, tmp_path)) == count


async def test_a_linked_bundle_is_the_same(host: Host, tmp_path: Path) -> None:
    """A bundle reached by a link says what it says by its own path."""
    for full_id in ("a.writer", "b.drafter"):
        write(tmp_path / "b", full_id)
    (tmp_path / "link").symlink_to("b")
    assert await alike(host, tmp_path / "link") == await alike(host, tmp_path / "b") != []


async def test_shipped_bundles_have_no_warning(host: Host, repo: Path) -> None:
    """Nothing that ships is alike, nor warned of otherwise."""
    for bundle in sorted((repo / "bundles").iterdir()):
        assert (await host.call("skills.check", path=bundle)).diagnostics == ()

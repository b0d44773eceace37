"""What `check` and `why` say of skills that ask for the network: who asks gets nothing by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdskills.app import Host, Settings


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Return a bundle whose one skill asks for two hosts, one of which cannot be."""
    folder = tmp_path / "bundle/skills/public/fetch"
    folder.mkdir(parents=True)
    metadata = 'metadata:\n  kdskills.network: "pypi.org localhost"\n'
    (folder / "SKILL.md").write_text(f"---\nname: fetch\ndescription: Fetches pages.\n{metadata}---\nFetch them.\n")
    return tmp_path / "bundle"


async def test_check_says_what_a_skill_asks_for(bundle: Path, tmp_path: Path) -> None:
    """The author reads that asking grants nothing, and which host is none."""
    host = Host(Settings(index_dir=tmp_path / "index"), entry_points=False)
    found = (await host.call("skills.check", path=bundle)).diagnostics
    rows = [(one.code, one.severity, one.ref) for one in found if one.code.startswith("network_")]
    assert rows == [("network_asked", "info", "metadata"), ("network_invalid", "warning", "metadata")]
    assert any("'localhost' is no rule" in one.message for one in found)


async def test_why_says_what_is_granted(bundle: Path, tmp_path: Path) -> None:
    """The operator reads what a skill asks for, and what its programs may reach by the settings."""
    for grants, granted in (({}, False), ({"public.fetch": ("pypi.org",)}, True)):
        host = Host(Settings(index_dir=tmp_path / "index", network=grants), entry_points=False)
        notes = (await host.call("skills.why", bundle=bundle, ref="public.fetch")).notes
        assert "it asks for the network: pypi.org, localhost; only the setting network grants it" in notes
        assert ("its programs may reach pypi.org, by the setting network" in notes) is granted

"""`kdskills publish` writes a site of static files, and says what of the marked skills is not in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kdskills.skills.safe_open import bytes_digest
from kdskills.supply.index import read_index

Run = Callable[..., Any]
FOLDER = ".well-known/agent-skills"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with a public skill and one that is not."""
    top = tmp_path / "bundle"
    for name in ("brief", "draft"):
        folder = top / "skills" / "acme" / name
        folder.mkdir(parents=True)
        (folder / "SKILL.md").write_text(f"---\nname: {name}\ndescription: Makes a {name}.\n---\n\nRead.\n")
    (top / "skills_descriptor.yaml").write_text("public: acme.brief\n")
    return top


def site_of(out: Path) -> dict[str, bytes]:
    """Return every file of a site."""
    return {path.name: path.read_bytes() for path in (out / FOLDER).iterdir()}


def test_a_site_is_written(run: Run, bundle: Path, tmp_path: Path) -> None:
    """The index and what it promises are there, the other skill is not, and a second run writes the same bytes."""
    out = tmp_path / "site"
    done = run("publish", bundle, "--out", out, "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["ok"], [row["full_id"] for row in answer["skills"]]) == (0, True, ["acme.brief"])
    files = site_of(out)
    (entry,) = read_index(files["index.json"], f"https://a.net/{FOLDER}/index.json").entries
    assert bytes_digest(files[entry.url.rpartition("/")[2]]) == entry.digest
    assert len(files) == 2
    (bundle / "skills/acme/brief/SKILL.md").touch()
    run("publish", bundle, "--out", out)
    assert site_of(out) == files


def test_what_is_left_out_is_told(run: Run, bundle: Path, tmp_path: Path) -> None:
    """A mark without a skill ends with 1, and the rest is written; a bundle without marks publishes nothing."""
    (bundle / "skills_descriptor.yaml").write_text("public: [acme.brief, acme.none]\n")
    done = run("publish", bundle, "--out", tmp_path / "site")
    assert (done.returncode, "rule_matches_nothing" in done.stdout) == (1, True)
    assert len(site_of(tmp_path / "site")) == 2
    (bundle / "skills_descriptor.yaml").write_text("custom_skills_root: skills\n")
    assert run("publish", bundle, "--out", tmp_path / "site").returncode == 0
    assert list(site_of(tmp_path / "site")) == ["index.json"]


def test_where_no_site_can_be_written(run: Run, bundle: Path, tmp_path: Path) -> None:
    """A file in the way, or no bundle, is one clear sentence with a code."""
    (tmp_path / "file").write_text("x")
    done = run("publish", bundle, "--out", tmp_path / "file", "--json")
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (2, "path_unwritable")
    done = run("publish", tmp_path / "nothing", "--json")
    assert (done.returncode, "error" in json.loads(done.stdout)) == (3, True)


def test_no_site_among_the_bundles_own_files(run: Run, bundle: Path, tmp_path: Path) -> None:
    """The bundle's folder, that of its skills, and links to either are refused before anything is written there."""
    (tmp_path / "link").symlink_to(bundle / "skills")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/.well-known").symlink_to(bundle / "skills/acme")
    before = sorted(bundle.rglob("*"))
    for out in (bundle, bundle / "skills", bundle / "skills/acme/brief", tmp_path / "link", tmp_path / "linked"):
        done = run("publish", bundle, "--out", out, "--json")
        assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (2, "site_in_bundle")
    assert sorted(bundle.rglob("*")) == before
    assert run("publish", bundle, "--out", bundle / "site").returncode == 0


def test_code_of_a_bundle_runs_only_where_it_is_trusted(run: Run, bundle: Path, tmp_path: Path) -> None:
    """A descriptor that is a program is not run to be published unless somebody says so."""
    (bundle / "skills_descriptor.yaml").unlink()
    (bundle / "skills_descriptor.py").write_text("PUBLIC = [''.join(['acme.', 'brief'])]\n")
    done = run("publish", bundle, "--out", tmp_path / "site", "--json")
    assert json.loads(done.stdout)["error"]["code"] == "bundle_untrusted"
    assert not (tmp_path / "site").exists()
    assert run("publish", bundle, "--out", tmp_path / "site", "--trust").returncode == 0
    assert len(site_of(tmp_path / "site")) == 2

"""Known faults of packages: told by the ranges of advisories, whatever form the file has, and never for the wrong version."""

from __future__ import annotations

import json
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.environments import advisories as room
from kdskills.environments.advisories import PackageVersion, audit, base_score, semantic_version
from kdskills.environments.codes import ENVIRONMENT_CODES, EnvironmentFailed


def advisory(name: str = "one", *events: dict[str, str], ecosystem: str = "PyPI", **facts: object) -> dict[str, object]:
    """Return an advisory on a package with one range of *events*."""
    affected = {
        "package": {"ecosystem": ecosystem, "name": name},
        "ranges": [{"type": "ECOSYSTEM", "events": list(events)}] if events else [],
    }
    return {"id": "X-1", "summary": "It leaks.", "affected": [affected], **facts}


def found(folder: Path, data: object, version: str = "1.5", name: str = "one", ecosystem: str = "PyPI"):
    """Return what a file with *data* knows of one package."""
    path = folder / "advisories.json"
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    package = PackageVersion(ecosystem, name, version)
    return audit(path, [package]).get(package, ())


UP_TO_2 = ({"introduced": "0"}, {"fixed": "2.0"})


@pytest.mark.parametrize(
    ("events", "version", "fixed"),
    [
        (UP_TO_2, "1.5", "2.0"),
        (UP_TO_2, "2.0rc1", "2.0"),
        (UP_TO_2, "2.0", None),
        (UP_TO_2, "2.0.post1", None),
        (({"introduced": "1.0"}, {"fixed": "1.2"}, {"introduced": "1.4"}, {"fixed": "1.6"}), "1.5", "1.6"),
        (({"introduced": "1.4"}, {"fixed": "1.6"}, {"introduced": "1.0"}, {"fixed": "1.2"}), "1.1", "1.2"),
        (({"introduced": "1.0"}, {"fixed": "1.2"}, {"introduced": "1.4"}, {"fixed": "1.6"}), "1.3", None),
        (({"introduced": "0"}, {"last_affected": "1.5"}), "1.5", ""),
        (({"introduced": "0"}, {"last_affected": "1.5"}), "1.5.1", None),
        (({"introduced": "0"}, {"limit": "1.5"}), "1.5", None),
        (({"introduced": "0"}, {"limit": "1.6"}), "1.5", ""),
        (({"introduced": "1.6"},), "1.5", None),
        (({"introduced": "0"}, {"fixed": "1.10"}), "1.9", "1.10"),
        (({"introduced": "what"}, {"fixed": "ever"}), "1.5", ""),
    ],
)
def test_ranges_decide(tmp_path, events, version, fixed):
    """A version is affected by the ranges' rules, with the next fix; a range that cannot be read counts as one it is in."""
    faults = found(tmp_path, advisory("One", *events), version)
    assert [fault.fixed for fault in faults] == ([] if fixed is None else [fixed])


@pytest.mark.parametrize(
    ("version", "affected"), [("1.0.0-alpha.1", True), ("1.0.0-alpha.2", True), ("1.0.0", False), ("0.9.9", True)]
)
def test_versions_of_node_are_semantic(tmp_path, version, affected):
    """Ranges of npm compare semantic versions; the name is exact, and a package of PyPI is another."""
    data = advisory("@a/One", {"introduced": "0"}, {"fixed": "1.0.0"}, ecosystem="npm")
    assert bool(found(tmp_path, data, version, "@a/One", "npm")) is affected
    assert not found(tmp_path, data, version, "@a/one", "npm")
    assert not found(tmp_path, data, "0.1", "@a/One", "PyPI")


def test_semantic_versions_have_their_order():
    """The order of the published rule, from the earliest pre-release to the release after it."""
    texts = ["1.0.0-alpha", "1.0.0-alpha.1", "1.0.0-alpha.beta", "1.0.0-beta.2", "1.0.0-beta.11", "1.0.0-rc.1", "1.0.0"]
    assert sorted(set(texts), key=semantic_version) == texts
    assert semantic_version("1.10.0") > semantic_version("1.9.9+build")


@pytest.mark.parametrize("form", ["one", "list", "lines", "zip", "pretty"])
def test_every_form_of_the_file_is_read(tmp_path, form):
    """One object, a list, one a line and a zip say the same."""
    rows = [advisory("other", *UP_TO_2), advisory("one", *UP_TO_2)]
    texts = [json.dumps(row) for row in rows]
    data = {
        "one": texts[1].encode(),
        "list": json.dumps(rows).encode(),
        "lines": "\n".join(texts).encode(),
        "pretty": json.dumps(rows[1], indent=2).encode(),
        "zip": b"",
    }[form]
    if form == "zip":
        with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
            for number, text in enumerate(texts):
                archive.writestr(f"{number}.json", text)
        data = (tmp_path / "zip").read_bytes()
    assert [fault.id for fault in found(tmp_path, data)] == ["X-1"]


def test_a_fault_under_two_ids_is_one(tmp_path):
    """Advisories that name each other are one fault, with what either knows; withdrawn ones are none; the worst comes first."""
    rows = [
        advisory("one", {"introduced": "0"}, aliases=["CVE-1"], id="P-1", summary=""),
        advisory("one", *UP_TO_2, aliases=["CVE-1"], id="G-1", database_specific={"severity": "MODERATE"}),
        advisory("one", *UP_TO_2, id="G-2", withdrawn="2024-01-01T00:00:00Z"),
        advisory("one", *UP_TO_2, id="G-3", severity=[{"type": "CVSS_V3", "score": "CVSS:3.1/AV:N/AC:L/PR:N/UI:N/S:U/C:H/I:H/A:H"}]),
    ]  # fmt: skip
    faults = found(tmp_path, rows)
    assert [(fault.id, fault.severity, fault.fixed) for fault in faults] == [
        ("G-3", "critical", "2.0"),
        ("P-1", "medium", "2.0"),
    ]
    assert (faults[1].aliases, faults[1].summary) == (("CVE-1", "G-1"), "It leaks.")


@pytest.mark.parametrize(
    ("vector", "score"),
    [
        ("CVSS:3.1/AV:N/AC:L/PR:N/UI:N/S:U/C:H/I:H/A:H", 9.8),
        ("CVSS:3.0/AV:N/AC:L/PR:N/UI:N/S:C/C:H/I:H/A:H", 10.0),
        ("CVSS:3.1/AV:N/AC:H/PR:N/UI:R/S:U/C:L/I:N/A:N", 3.1),
        ("CVSS:3.1/AV:N/AC:L/PR:N/UI:R/S:C/C:L/I:L/A:N", 6.1),
        ("CVSS:3.1/AV:L/AC:L/PR:L/UI:N/S:U/C:N/I:N/A:N", 0.0),
        ("7.5", 7.5),
        ("CVSS:4.0/AV:N/AC:L/AT:N/PR:N/UI:N/VC:H/VI:H/VA:H/SC:N/SI:N/SA:N", None),
        ("CVSS:3.1/AV:Q", None),
        ("nan", None),
    ],
)
def test_scores_are_those_of_the_vectors(vector, score):
    """A vector of CVSS 3 has its published base score; what is none has no score."""
    assert base_score(vector) == score


@pytest.mark.parametrize(
    "data",
    [
        *(
            b"",
            b"x",
            b"[1]",
            b"{}",
            b'{"id": 1}',
            b"PK\x03\x04 no zip",
            b'{"id": "a", "affected": [1]}',
            b"[" * 100_000,
        ),
        b'{"id": "a", "affected": 1}',
    ],
)
def test_what_is_no_file_of_advisories_is_refused(tmp_path, data):
    """A damaged or hostile file ends in one code; it never reads as one without faults."""
    with pytest.raises(EnvironmentFailed) as caught:
        found(tmp_path, data)
    assert caught.value.code == "environment_advisories_invalid"
    assert caught.value.code in ENVIRONMENT_CODES


def test_amounts_are_bounded(tmp_path, monkeypatch):
    """A file, an advisory of a zip, and all of a zip together have bounds."""
    with zipfile.ZipFile(tmp_path / "zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.json", json.dumps(advisory("one", summary="x" * 100_000)))
    data = (tmp_path / "zip").read_bytes()
    for name, bound in (("MAX_ADVISORIES", 1000), ("MAX_ADVISORY", 1000), ("MAX_ADVISORIES", 100)):
        with monkeypatch.context() as patch:
            patch.setattr(room, name, bound)
            with pytest.raises(EnvironmentFailed) as caught:
                found(tmp_path, data)
            assert caught.value.code == "environment_advisories_invalid"


@given(st.recursive(st.none() | st.text(max_size=5) | st.integers(), lambda inner: st.lists(inner, max_size=3)))
def test_any_values_end_in_findings_or_the_code(tmp_path_factory, value):
    """Whatever stands where ranges, versions, severity and aliases belong, there are findings or the one error."""
    folder = tmp_path_factory.mktemp("any")
    for name in ("affected", "aliases", "severity", "summary", "database_specific", "withdrawn"):
        with suppress(EnvironmentFailed):
            found(folder, advisory("one", *UP_TO_2) | {name: value})

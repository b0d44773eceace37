"""The probe on emulated and real servers, its cache, and what it does with servers that misbehave."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from kdskills.remote.client import AsyncAppServerClient
from kdskills.remote.labmodel import FakeResponses
from kdskills.remote.ports import AppServerGone
from kdskills.remote.probe import find_binary, probe, probes_dir, profile_for
from kdskills.testing import AppServerEmulator

NEW = {
    "native": False,
    "reload": True,
    "namespaces": True,
    "materialise": ("name_set", "inject_items", "bootstrap"),
    "rewind": "revert",
    "context": True,
    "extra_roots": True,
    "unsubscribe": True,
    "probed": True,
}
OLD = {
    "native": False,
    "reload": False,
    "namespaces": False,
    "materialise": ("bootstrap",),
    "rewind": "rollback",
    "context": False,
    "extra_roots": False,
    "unsubscribe": False,
    "probed": True,
}


def facts(profile) -> dict:
    """What a profile says, without names."""
    return {name: getattr(profile, name) for name in NEW}


def real_codex() -> str:
    """The installed launcher."""
    folder = Path(os.environ.get("KDSKILLS_CODEX_DIR") or "/tmp/kdskills-codex")
    installed = folder / "node_modules" / ".bin" / "codex"
    found = str(installed) if installed.exists() else shutil.which("codex")
    assert found is not None
    return found


def native_copy(folder: Path) -> Path:
    """A native program of our own."""
    copy = folder / "native"
    shutil.copy(Path("/bin/sleep").resolve(), copy)
    return copy


def there(path: str) -> bool:
    """Whether a path exists."""
    return Path(path).exists()


@pytest.fixture
def script(tmp_path):
    """Makes an executable shell script, a stand-in for a program that is no app-server."""

    def make(body: str) -> str:
        path = tmp_path / "codex-like"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.mark.parametrize(("version", "expected"), [("0.169", NEW), ("0.105", OLD)])
async def test_emulated_versions(tmp_path, version, expected):
    """Each emulated version is found out for what it is."""
    with AppServerEmulator(version) as emulator:
        report = await probe(str(emulator.binary), state=tmp_path)
    assert (report.complete, report.cached, report.profile.name) == (True, False, version)
    assert facts(report.profile) == expected
    assert {"exec_command", "apply_patch"} <= report.profile.built_ins


@pytest.mark.needs("codex")
@pytest.mark.codex_real
async def test_the_real_binary_agrees_with_the_emulator(tmp_path):
    """The real server is found to do what the emulated one does, without a login and without tokens."""
    report = await probe(real_codex(), state=tmp_path)
    assert (report.complete, report.profile.name) == (True, "0.169")
    assert facts(report.profile) == NEW


async def test_cached_until_the_program_changes(tmp_path):
    """A kept answer is used; `force` asks again; a changed launcher is another program."""
    with AppServerEmulator() as emulator:
        first = await probe(str(emulator.binary), state=tmp_path)
        second = await probe(str(emulator.binary), state=tmp_path)
        forced = await probe(str(emulator.binary), state=tmp_path, force=True)
        emulator.binary.write_text(emulator.binary.read_text() + "# changed\n")
        changed = await probe(str(emulator.binary), state=tmp_path)
    assert [one.cached for one in (first, second, forced, changed)] == [False, True, False, False]
    assert second.profile == first.profile == forced.profile
    assert second.findings == first.findings
    assert changed.fingerprint != first.fingerprint


async def test_the_child_counts_too(tmp_path):
    """The executables that really run are part of the fingerprint, not only the launcher."""
    with AppServerEmulator() as emulator:
        copy = native_copy(tmp_path)
        plain = emulator.binary.read_text()
        emulator.binary.write_text(plain.replace("#!/bin/sh\n", f"#!/bin/sh\n{copy} 60 & trap 'kill $!' EXIT\n"))
        first = await probe(str(emulator.binary), state=tmp_path / "state")
        with copy.open("ab") as file:
            file.write(b"\0")  # the launcher is the same, what it starts is not
        second = await probe(str(emulator.binary), state=tmp_path / "state")
    assert (first.cached, second.cached) == (False, False)
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: "",
        lambda kept: "[]",
        lambda kept: json.dumps({**kept, "profile": {**kept["profile"], "reload": "yes"}}),
        lambda kept: json.dumps({**kept, "profile": {**kept["profile"], "rewind": "both"}}),
        lambda kept: json.dumps({**kept, "profile": {"name": "x"}}),
        lambda kept: json.dumps({**kept, "fingerprint": "other"}),
        lambda kept: json.dumps({**kept, "findings": None}),
    ],
    ids=["empty", "list", "type", "value", "members", "other", "findings"],
)
async def test_a_damaged_cache_is_no_answer(tmp_path, damage):
    """A damaged or foreign file is as good as none: the server is asked again, and the file made whole."""
    with AppServerEmulator() as emulator:
        first = await probe(str(emulator.binary), state=tmp_path)
        path = probes_dir(tmp_path) / f"{first.fingerprint}.json"
        path.write_text(damage(json.loads(path.read_text())))
        again = await probe(str(emulator.binary), state=tmp_path)
    assert (again.cached, again.profile) == (False, first.profile)
    assert json.loads(path.read_text())["fingerprint"] == first.fingerprint


async def test_profile_for_a_running_server(tmp_path):
    """A server that runs is looked up by what runs; only a miss starts a probe."""
    with AppServerEmulator() as emulator, FakeResponses() as model:
        home = tmp_path / "home"
        async with await AsyncAppServerClient.spawn(
            home=home, binary=str(emulator.binary), config=model.config
        ) as client:
            found = await profile_for(client.server, str(emulator.binary), state=tmp_path / "state")
            kept = list(probes_dir(tmp_path / "state").glob("*.json"))
            stamps = {path: path.stat().st_mtime_ns for path in kept}
            again = await profile_for(client.server, str(emulator.binary), state=tmp_path / "state")
    assert (facts(found), again) == (NEW, found)
    assert {path: path.stat().st_mtime_ns for path in kept} == stamps
    assert model.requests == []


async def test_missing_programs(tmp_path):
    """A program that is not there is said to be missing, with a code of its own."""
    with pytest.raises(AppServerGone) as caught:
        await probe(str(tmp_path / "nothing"), state=tmp_path)
    assert caught.value.code == "codex_missing"
    with pytest.raises(AppServerGone):
        find_binary("codex", path=str(tmp_path))


@pytest.mark.parametrize("body", ["exit 3", "echo garbage; exit 0", "exec cat >/dev/null </dev/null"])
async def test_programs_that_are_no_app_server(tmp_path, script, body):
    """A program that ends at once, or talks garbage, is not probed and nothing is kept."""
    with pytest.raises(AppServerGone):
        await probe(script(body), state=tmp_path / "state")
    assert list((tmp_path / "state").rglob("*.json")) == []


async def test_a_relative_path(tmp_path, monkeypatch):
    """A path relative to the present folder means the same program in the server's own folder."""
    with AppServerEmulator() as emulator:
        monkeypatch.chdir(emulator.binary.parent)
        report = await probe("./codex", state=tmp_path)
    assert (report.complete, report.binary.is_absolute()) == (True, True)


async def test_out_of_time(tmp_path):
    """A probe that is out of time reports what it has, claims nothing else, and is not kept."""
    with AppServerEmulator() as emulator:
        report = await probe(str(emulator.binary), state=tmp_path, timeout_s=0.0)
        again = await probe(str(emulator.binary), state=tmp_path)
    assert (report.complete, report.profile.reload, report.profile.probed) == (False, False, False)
    assert report.findings[-1].name == "time"
    assert (again.cached, again.complete) == (False, True)


async def test_nothing_of_the_user_is_seen(tmp_path, script, monkeypatch):
    """The probed program gets an empty home and none of the user's variables; the home is removed."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("CODEX_HOME", str(tmp_path / "mine"))
    seen = tmp_path / "seen"
    with pytest.raises(AppServerGone):
        await probe(script(f'env > {seen}; ls -A "$CODEX_HOME" | wc -l >> {seen}'), state=tmp_path / "state")
    told = dict(line.partition("=")[::2] for line in seen.read_text().splitlines())
    assert "OPENAI_API_KEY" not in told
    assert told["CODEX_HOME"] == told["HOME"] != str(tmp_path / "mine")
    assert "0" in told
    assert not there(told["HOME"])


def test_report_as_json(tmp_path):
    """The report is JSON with profile and findings."""
    import asyncio

    with AppServerEmulator() as emulator:
        report = asyncio.run(probe(str(emulator.binary), state=tmp_path)).to_json()
    assert json.loads(json.dumps(report)) == report
    assert report["profile"]["rewind"] == "revert"
    assert {one["name"] for one in report["findings"]} == {
        "unsubscribe",
        "namespaces",
        "built_ins",
        "materialise",
        "context",
        "rewind",
        "extra_roots",
        "native",
        "reload",
    }

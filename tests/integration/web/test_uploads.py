"""Uploads over HTTP: streamed to disk, refused with a code, and nothing kept of what was refused."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import httpx
import pytest

from kdskills.skills.archives import RULES

SKILL = b"---\nname: brief\ndescription: Makes one page.\n---\nRead.\n"
BOMB = 600 * 1024 * 1024


def zipped(*entries, method=zipfile.ZIP_DEFLATED):
    """Return a zip of (name or ZipInfo, bytes) pairs, after a good SKILL.md."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as out:
        out.writestr("brief/SKILL.md", SKILL)
        for name, data in entries:
            out.writestr(name, data)
    return made.getvalue()


def special(kind, data=b"/etc/passwd"):
    """Return an entry of a kind that is no file."""
    info = zipfile.ZipInfo("brief/entry")
    info.create_system, info.external_attr = 3, (kind | 0o777) << 16
    return info, data


def bare(*entries):
    """Return a zip of (name, bytes) pairs and nothing else."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as out:
        for name, data in entries:
            out.writestr(name, data)
    return made.getvalue()


def encrypted():
    """Return a zip whose entry says it is encrypted."""
    data = bytearray(zipped())
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


def broken_directory():
    """Return a zip whose directory begins elsewhere than it says."""
    data = bytearray(zipped())
    at = data.rindex(b"PK\x05\x06") + 16
    data[at : at + 4] = (7).to_bytes(4, "little")
    return bytes(data)


def backslashes():
    """Return a zip with a path of Windows, which the library that writes zips would mend."""
    return zipped(("brief/a#b.txt", b"x")).replace(b"brief/a#b.txt", b"brief/a\\b.txt")


def huge():
    """Return a zip with one entry that is packed piece by piece, so that the test's own memory stays flat."""
    made, piece = io.BytesIO(), b"\0" * (1024 * 1024)
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        out.writestr("brief/SKILL.md", SKILL)
        with out.open("brief/zeros.bin", "w", force_zip64=True) as entry:
            for _ in range(BOMB // len(piece)):
                entry.write(piece)
    return made.getvalue()


HOSTILE = {
    "traversal": lambda: zipped(("brief/../../evil.txt", b"x")),
    "absolute": lambda: zipped(("/etc/evil.txt", b"x")),
    "drive": lambda: zipped(("C:/evil.txt", b"x")),
    "backslash": backslashes,
    "link": lambda: zipped(special(stat.S_IFLNK)),
    "device": lambda: zipped(special(stat.S_IFCHR, b"")),
    "fifo": lambda: zipped(special(stat.S_IFIFO, b"")),
    "duplicate": lambda: zipped(("brief/one.txt", b"1"), ("brief/two.txt", b"2")).replace(b"two.txt", b"one.txt"),
    "case": lambda: zipped(("brief/a.txt", b"1"), ("brief/A.txt", b"2")),
    "count": lambda: zipped(*((f"brief/{n}.txt", b"") for n in range(513))),
    "size": lambda: zipped(("brief/big.bin", os.urandom(17 * 1024 * 1024))),
    "ratio": lambda: zipped(("brief/zeros.bin", b"\0" * 4_000_000)),
    "deep": lambda: zipped(("brief/" + "d/" * 13 + "x", b"")),
    "long": lambda: zipped(("brief/" + "n" * 256, b"")),
    "encrypted": encrypted,
    "directory": broken_directory,
    "nested": lambda: bare(("brief.zip", zipped())),
    "zero": lambda: b"",
    "no-zip": lambda: b"GIF89a" + b"\0" * 500,
    "root": lambda: bare(("other/SKILL.md", SKILL)),
    "two-roots": lambda: zipped(("another/SKILL.md", SKILL)),
    "yaml": lambda: bare(("brief/SKILL.md", b"---\nname: [\n---\nx\n")),
    "no-skill": lambda: bare(("brief/readme.txt", b"x")),
    "cut": lambda: zipped()[:-30],
}


def post(client, data, **fields):
    """Upload *data*."""
    return client.post("/projects/local/skills:upload", files={"file": ("skill.zip", data)}, data=fields)


def left_behind(host):
    """Return every file below the state folder that is none of the database's or the index's."""
    top = host.settings.state_dir
    return sorted(str(path.relative_to(top)) for path in top.rglob("*") if path.is_file() and ".db" not in path.name)


@pytest.mark.parametrize("kind", sorted(HOSTILE))
def test_hostile_archives_are_refused(service, kind):
    """Each is refused with a 4xx and a code of the table, and leaves neither row nor file."""
    with service.client(service.token()) as client:
        before = left_behind(service.host)
        found = post(client, HOSTILE[kind]())
        problem = found.json()
        assert (found.status_code, found.headers["content-type"]) == (400, "application/problem+json")
        assert problem["code"] in RULES, problem
        assert client.get("/projects/local/skills").json()["skills"] == []
        assert left_behind(service.host) == before


def test_uploads_become_versions(service, archive):
    """The answer names the version; the same content again is the same version, whatever the archive's times."""
    with service.client(service.token()) as client:
        first = post(client, archive("brief").read_bytes())
        assert first.status_code == 201
        again = post(client, archive("brief").read_bytes())
        assert (again.json()["version"], again.json()["created"]) == (first.json()["version"], False)
        other = post(client, archive("brief", body="Write.").read_bytes(), activate="false").json()
        assert (other["created"], other["active"]) == (True, False)
        shown = client.get("/projects/local/skills/brief").json()
        assert shown["active"] == first.json()["version"]
        done = client.post("/projects/local/skills/brief:activate", json={"version_hash": other["version"]})
        assert done.json()["active"] == other["version"]
        versions = client.get("/projects/local/skills/brief/versions").json()["versions"]
        assert {row["version"] for row in versions} == {first.json()["version"], other["version"]}


def test_uploads_never_enable(service, archive):
    """A disabled skill stays disabled, whatever is uploaded over it."""
    with service.client(service.token()) as client:
        post(client, archive("brief").read_bytes())
        assert client.patch("/projects/local/skills/brief", json={"enabled": False}).json()["enabled"] is False
        assert post(client, archive("brief", body="More.").read_bytes()).json()["enabled"] is False
        assert client.delete("/projects/local/skills/brief").json() == {"skill": "brief", "deleted": True}
        assert client.get("/projects/local/skills/brief").status_code == 404


def test_downloads_are_bytes_to_keep(service, archive):
    """What others uploaded comes back byte for byte, and no browser shows it as a page of the service."""
    page = "<script>alert(1)</script>"
    with service.client(service.token()) as client:
        post(client, archive("brief", **{"a b/é.html": page}).read_bytes())
        found = client.get("/projects/local/skills/brief/files/a b/é.html")
        assert found.text == page
        assert found.headers["content-type"] == "application/octet-stream"
        assert found.headers["x-content-type-options"] == "nosniff"
        assert found.headers["content-disposition"] == "attachment; filename*=UTF-8''%C3%A9.html"
        packed = client.get("/projects/local/skills/brief/archive")
        with zipfile.ZipFile(io.BytesIO(packed.content)) as read:
            assert sorted(read.namelist()) == ["brief/SKILL.md", "brief/a b/é.html"]
        assert post(client, packed.content).json()["version"] == packed.headers["x-skill-version"]


@pytest.mark.parametrize(
    "path", ["../../../etc/passwd", "..%2f..%2fSKILL.md", "/etc/passwd", "a\x00b", "SKILL.md/", "x" * 2000, "."]
)
def test_downloads_do_not_leave_the_version(service, archive, path):
    """Only what a version lists is read; any other path is not found or out of shape."""
    with service.client(service.token()) as client:
        post(client, archive("brief").read_bytes())
        raw = httpx.URL(service.url).copy_with(raw_path=b"/projects/local/skills/brief/files/" + _quoted(path))
        assert client.get(raw).status_code in {400, 404}


def _quoted(path):
    return path.replace("\x00", "%00").encode()


@pytest.mark.parametrize(
    ("told", "status", "code"),
    [
        ({"data": {"activate": "true"}}, 415, "unsupported_media_type"),
        ({"files": {"other": b"x"}}, 400, "bad_request"),
        ({"files": {"file": b"x"}, "data": {"activate": "perhaps"}}, 400, "bad_request"),
        ({"files": {"file": b"x"}, "data": {"more": "x"}}, 400, "bad_request"),
        ({"files": [("file", b"x"), ("file", b"y")]}, 400, "bad_request"),
        ({"json": {"file": "x"}}, 415, "unsupported_media_type"),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data"}}, 400, "bad_request"),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data; boundary=b"}}, 400, "bad_request"),
        ({"content": b"--b\r\nx", "headers": {"Content-Type": "multipart/form-data; boundary=b"}}, 400, "bad_request"),
        ({"content": b"--b\r\n\r\n--b--", "headers": {"Content-Type": "multipart/form-data; boundary=b"}}, 400, None),
    ],
)
def test_broken_forms_are_refused(service, told, status, code):
    """A form that is none is the caller's problem, never the service's."""
    with service.client(service.token()) as client:
        found = client.post("/projects/local/skills:upload", **told)
        assert found.status_code == status, found.text
        assert code in {None, found.json()["code"]}


def test_the_query_says_activate_too(service, archive):
    """`?activate=false` is the field of that name, for callers who send the file alone."""
    with service.client(service.token()) as client:
        url = "/projects/local/skills:upload"
        found = client.post(url, params={"activate": "false"}, files={"file": archive("brief").read_bytes()})
        assert found.json()["active"] is False


def _peak_kib(pid):
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])


def test_a_bomb_costs_little_memory(tmp_path, archive):
    """A bomb of 600 KiB that would be 600 MiB costs the service less than 20 MiB."""
    data = huge()
    assert 500 * 1024 < len(data) < 700 * 1024
    env = {**os.environ, "KDSKILLS_STATE_DIR": str(tmp_path / "state"), "KDSKILLS_INDEX_DIR": str(tmp_path / "index")}
    command = [Path(sys.executable).with_name("kdskills"), "serve", "--listen", "127.0.0.1:0", "--no-auth"]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, env=env, stderr=log) as process:
        try:
            url = listening(process, tmp_path / "log")
            with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
                assert post(client, archive("brief").read_bytes()).status_code == 201
                assert post(client, HOSTILE["ratio"]()).status_code == 400
                before = _peak_kib(process.pid)
                for _ in range(3):
                    assert post(client, data).status_code == 400
                assert _peak_kib(process.pid) - before < 20 * 1024
        finally:
            process.terminate()
            process.wait(60)


def listening(process, log):
    """Return the address that the service says it listens on."""
    for _ in range(600):
        for line in log.read_text(encoding="utf-8").splitlines():
            if "Uvicorn running on " in line:
                return line.partition("Uvicorn running on ")[2].split()[0]
        assert process.poll() is None, log.read_text(encoding="utf-8")
        time.sleep(0.1)
    raise AssertionError(log.read_text(encoding="utf-8"))

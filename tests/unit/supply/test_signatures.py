"""Verdicts of signatures: those of the package's own verifier, one by one; anchors, keys and certificates that are none."""

from __future__ import annotations

import base64
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from kdskills.errors import MissingExtra
from kdskills.skills.safe_open import read_tree
from kdskills.supply import signatures
from kdskills.supply.signatures import (
    MAX_SIGNATURE,
    SIGNATURE_FILE,
    TrustAnchors,
    TrustFailed,
    make_anchor,
    sign_folder,
    signature_of,
)
from tests.unit.supply.signing_lab import Publisher, certificate, make_skill, private_key, write_key


@pytest.fixture(scope="module")
def publishers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Publisher]:
    """One who signs by a key, one by a certificate, and strangers."""
    top = tmp_path_factory.mktemp("publishers")
    return {
        "key": Publisher.with_key(top / "key"),
        "certificate": Publisher.with_certificate(top / "certificate"),
        "other key": Publisher.with_key(top / "other-key"),
        "other certificate": Publisher.with_certificate(top / "other-certificate"),
    }


def _write(path: str, text: str = "other\n") -> Callable[[Path], object]:
    def change(skill: Path) -> None:
        (skill / path).parent.mkdir(parents=True, exist_ok=True)
        (skill / path).write_text(text)

    return change


def _bundle(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def rewrite(skill: Path) -> None:
        bundle = json.loads((skill / SIGNATURE_FILE).read_text())
        change(bundle)
        (skill / SIGNATURE_FILE).write_text(json.dumps(bundle))

    return rewrite


def _statement(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def rewrite(bundle: dict[str, Any]) -> None:
        statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
        change(statement)
        bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()

    return _bundle(rewrite)


def _signature(data: bytes | Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def rewrite(skill: Path) -> None:
        path = skill / SIGNATURE_FILE
        path.write_bytes(data(path.read_bytes()) if callable(data) else data)

    return rewrite


def _link_signature(skill: Path) -> None:
    aside = skill.parent / "aside.sig"
    (skill / SIGNATURE_FILE).rename(aside)
    (skill / SIGNATURE_FILE).symlink_to(aside)


def _move(old: str, new: str) -> Callable[[Path], object]:
    return lambda skill: (skill / old).rename(skill / new)


VARIANTS: dict[str, Callable[[Path], object]] = {
    "as signed": lambda _: None,
    "changed byte": lambda skill: (skill / "scripts/run.py").write_text("print('run')\n"),
    "changed SKILL.md": _write("SKILL.md"),
    "emptied file": _write("references/deep/notes.md", ""),
    "longer file": _write("references/deep/notes.md", "notes\n\n"),
    "added file": _write("scripts/more.py"),
    "added dot file": _write(".hidden"),
    "added file deep": _write("a/b/c/d/e.txt"),
    "removed file": lambda skill: (skill / "scripts/run.py").unlink(),
    "removed folder": lambda skill: shutil.rmtree(skill / "references"),
    "renamed file": _move("scripts/run.py", "scripts/ran.py"),
    "renamed folder": _move("scripts", "scripte"),
    "other case": _move("scripts/run.py", "scripts/Run.py"),
    "swapped files": lambda skill: (
        (skill / "scripts/run.py").write_text("notes\n"),
        (skill / "references/deep/notes.md").write_text("print('ran')\n"),
    ),
    ".github file": _write(".github/workflows/run.yml"),
    ".git file": _write(".git/config"),
    ".gitignore": _write(".gitignore"),
    ".gitattributes": _write(".gitattributes"),
    "deeper .gitignore": _write("scripts/.gitignore"),
    "mode bits": lambda skill: (skill / "references/deep/notes.md").chmod(0o777),
    "no execute bit": lambda skill: (skill / "scripts/run.py").chmod(0o644),
    "empty folder": lambda skill: (skill / "empty").mkdir(),
    "other times": lambda skill: os.utime(skill / "SKILL.md", (1, 1)),
    "link to a file": lambda skill: (skill / "link").symlink_to("SKILL.md"),
    "file became a link": lambda skill: (
        (skill / "scripts/run.py").rename(skill.parent / "aside.py"),
        (skill / "scripts/run.py").symlink_to(skill.parent / "aside.py"),
    ),
    "broken link": lambda skill: (skill / "link").symlink_to("nowhere"),
    "link to a folder": lambda skill: (skill / "link").symlink_to("scripts"),
    "link under .github": lambda skill: (
        (skill / ".github").mkdir(),
        (skill / ".github/link").symlink_to("../SKILL.md"),
    ),
    "fifo": lambda skill: os.mkfifo(skill / "pipe"),
    "signature is a link": _link_signature,
    "signature leads nowhere": lambda skill: (
        (skill / SIGNATURE_FILE).unlink(),
        (skill / SIGNATURE_FILE).symlink_to("nowhere"),
    ),
    "signature is a folder": lambda skill: (
        (skill / SIGNATURE_FILE).unlink(),
        (skill / SIGNATURE_FILE).mkdir(),
    ),
    "no signature": lambda skill: (skill / SIGNATURE_FILE).unlink(),
    "empty signature": _signature(b""),
    "truncated": _signature(lambda data: data[: len(data) // 2]),
    "last byte lost": _signature(lambda data: data[:-1]),
    "trailing blanks": _signature(lambda data: data + b" \n" * 1000),
    "byte order mark": _signature(lambda data: b"\xef\xbb\xbf" + data),
    "no UTF-8": _signature(b"\xff\xfe{}"),
    "JSON list": _signature(b"[]"),
    "JSON null": _signature(b"null"),
    "JSON bomb": _signature(b"[" * 1_000_000),
    "JSON bomb of objects": _signature(b'{"a":' * 500_000),
    "many keys": _signature(json.dumps({str(number): number for number in range(50_000)}).encode()),
    "huge signature": _signature(b"{}" + b" " * (MAX_SIGNATURE + 1)),
    "huge number": _signature(b'{"verificationMaterial": {}, "dsseEnvelope": {"payload": ' + b"9" * 5000 + b"}}"),
    "empty object": _signature(b"{}"),
    "empty parts": _signature(b'{"verificationMaterial": {}, "dsseEnvelope": {}}'),
    "further key": _bundle(lambda bundle: bundle.update(note="hello")),
    "other media type": _bundle(lambda bundle: bundle.update(mediaType="application/json")),
    "no media type": _bundle(lambda bundle: bundle.pop("mediaType")),
    "no material": _bundle(lambda bundle: bundle.pop("verificationMaterial")),
    "no envelope": _bundle(lambda bundle: bundle.pop("dsseEnvelope")),
    "no log entries": _bundle(lambda bundle: bundle["verificationMaterial"].pop("tlogEntries", None)),
    "no signatures": _bundle(lambda bundle: bundle["dsseEnvelope"].update(signatures=[])),
    "signature of zeros": _bundle(lambda bundle: bundle["dsseEnvelope"]["signatures"][0].update(sig="AAAA")),
    "signature no base64": _bundle(lambda bundle: bundle["dsseEnvelope"]["signatures"][0].update(sig="%%%")),
    "payload no base64": _bundle(lambda bundle: bundle["dsseEnvelope"].update(payload="%%%")),
    "payload no JSON": _bundle(lambda bundle: bundle["dsseEnvelope"].update(payload="AAAA")),
    "other payload type": _bundle(lambda bundle: bundle["dsseEnvelope"].update(payloadType="text/plain")),
    "other predicate type": _statement(lambda statement: statement.update(predicateType="https://example.net/v1")),
    "other statement type": _statement(lambda statement: statement.update(_type="https://example.net/v1")),
    "other subject": _statement(lambda statement: statement["subject"][0].update(name="other")),
    "one file less signed": _statement(lambda statement: statement["predicate"]["resources"].pop()),
    "everything left out": _statement(
        lambda statement: statement["predicate"]["serialization"].update(ignore_paths=["scripts"])
    ),
    "other key or chain": _bundle(lambda bundle: bundle.update(verificationMaterial={"publicKey": {"hint": "0" * 64}})),
    "material of both kinds": _bundle(lambda bundle: bundle["verificationMaterial"].update(publicKey={})),
    "material is a list": _bundle(lambda bundle: bundle.update(verificationMaterial=[])),
    "no hint or chain": _bundle(lambda bundle: [each.clear() for each in bundle["verificationMaterial"].values()]),
}


@pytest.mark.parametrize("by", ["key", "certificate"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_reference(tmp_path: Path, publishers: dict[str, Publisher], by: str, variant: str) -> None:
    """Of every variant of a signed skill the verdict is that of the package's own verifier, and `ok` names the anchor."""
    publisher = publishers[by]
    skill = make_skill(tmp_path / "brief")
    publisher.sign(skill)
    VARIANTS[variant](skill)
    verdict = signature_of(skill, [publisher.anchor])
    assert (verdict.kind == "ok") == publisher.reference_accepts(skill), verdict
    assert verdict.kind == "ok" or verdict.reason
    assert (verdict.signer == publisher.anchor.name) == (verdict.kind in {"ok", "bad_signature"})


EXPECTED = {
    "changed byte": ("bad_signature", ("scripts/run.py",)),
    "added file": ("bad_signature", ("scripts/more.py",)),
    "renamed file": ("bad_signature", ("scripts/ran.py", "scripts/run.py")),
    "one file less signed": ("bad_signature", ("scripts/run.py",)),
    "no signature": ("unsigned", ()),
    "truncated": ("unreadable", ()),
    "JSON bomb": ("unreadable", ()),
    "huge signature": ("unreadable", ()),
    "signature is a folder": ("unreadable", ()),
    ".github file": ("ok", ()),
    "mode bits": ("ok", ()),
    "empty folder": ("ok", ()),
}


@pytest.mark.parametrize("variant", EXPECTED)
def test_kinds(tmp_path: Path, publishers: dict[str, Publisher], variant: str) -> None:
    """A verdict says what is wrong, and which files differ from what was signed."""
    skill = make_skill(tmp_path / "brief")
    publishers["key"].sign(skill)
    VARIANTS[variant](skill)
    verdict = signature_of(skill, [publishers["key"].anchor])
    assert (verdict.kind, verdict.files) == EXPECTED[variant]


@pytest.mark.parametrize(("by", "other"), [("key", "other key"), ("certificate", "other certificate")])
def test_other_signer(tmp_path: Path, publishers: dict[str, Publisher], by: str, other: str) -> None:
    """What another one signed is by an untrusted signer, as it is for the reference; one anchor of several is enough."""
    skill = make_skill(tmp_path / "brief")
    publishers[other].sign(skill)
    strangers = [publishers[by].anchor, publishers["key"].anchor, publishers["certificate"].anchor]
    assert not publishers[by].reference_accepts(skill)
    assert signature_of(skill, strangers).kind == "untrusted_signer"
    assert signature_of(skill, []).kind == "untrusted_signer"
    assert signature_of(skill, [*strangers, publishers[other].anchor]).kind == "ok"


def test_whole_other_skill(tmp_path: Path, publishers: dict[str, Publisher]) -> None:
    """A whole other skill's folder with its own signature is accepted, as the reference does: the name is the lock's."""
    publisher = publishers["key"]
    other = make_skill(tmp_path / "other", "Delete the brief.")
    publisher.sign(other)
    moved = other.rename(tmp_path / "brief")
    assert publisher.reference_accepts(moved)
    assert signature_of(moved, [publisher.anchor]).kind == "ok"
    signature = make_skill(tmp_path / "third") / SIGNATURE_FILE
    signature.write_bytes((moved / SIGNATURE_FILE).read_bytes())
    assert not publisher.reference_accepts(signature.parent)
    assert signature_of(signature.parent, [publisher.anchor]).kind == "bad_signature"


@pytest.mark.parametrize(
    ("days", "for_signing"), [((-20, -10), True), ((10, 20), True), ((-4000, -3500), True), ((-30, 30), False)]
)
def test_certificates_over_time(tmp_path: Path, days: tuple[int, int], for_signing: bool) -> None:
    """Expired, early, older than their root, and not for signing: of certificates the reference's word counts, too."""
    publisher = Publisher.with_certificate(tmp_path / "publisher", days=days, for_signing=for_signing)
    skill = make_skill(tmp_path / "brief")
    publisher.sign(skill)
    verdict = signature_of(skill, [publisher.anchor])
    assert (verdict.kind == "ok") == publisher.reference_accepts(skill)
    assert verdict.kind == ("ok" if days[0] > -3000 and for_signing else "untrusted_signer")


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_signing(tmp_path: Path, curve: ec.EllipticCurve) -> None:
    """What is signed here, the package's own verifier accepts; signing again replaces the signature."""
    publisher = Publisher.with_key(tmp_path / "publisher", curve=curve)
    skill = make_skill(tmp_path / "brief")
    publisher.sign(skill)
    assert publisher.reference_accepts(skill)
    (skill / "SKILL.md").write_text("---\nname: brief\ndescription: Other.\n---\n")
    assert not publisher.reference_accepts(skill)
    assert publisher.sign(skill) == skill / SIGNATURE_FILE
    assert publisher.reference_accepts(skill)


def test_changed_while_checked(tmp_path: Path, publishers: dict[str, Publisher]) -> None:
    """An accepted signature counts for the files that the caller read, not for those that were put there meanwhile."""
    skill = make_skill(tmp_path / "brief")
    publishers["key"].sign(skill)
    digests = {file.path: file.sha256 for file in read_tree(skill)}
    anchors = [publishers["key"].anchor]
    assert signature_of(skill, anchors, digests=digests).kind == "ok"
    verdict = signature_of(skill, anchors, digests={**digests, "scripts/run.py": "0" * 64})
    assert (verdict.kind, verdict.files) == ("bad_signature", ("scripts/run.py",))


def test_nothing_printed(tmp_path: Path, publishers: dict[str, Publisher], capsys: pytest.CaptureFixture[str]) -> None:
    """A bundle of old that names no key is judged without a word on standard output, where answers in JSON go."""
    skill = make_skill(tmp_path / "brief")
    publishers["key"].sign(skill)
    _bundle(lambda bundle: bundle["verificationMaterial"]["publicKey"].clear())(skill)
    assert signature_of(skill, [publishers["key"].anchor]).kind == "ok"
    assert capsys.readouterr().out == ""


def test_without_package(tmp_path: Path, publishers: dict[str, Publisher], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra a signed skill is one clear sentence, and an unsigned one is still unsigned."""
    skill = make_skill(tmp_path / "brief")
    assert signature_of(skill, []).kind == "unsigned"
    publishers["key"].sign(skill)
    monkeypatch.setitem(__import__("sys").modules, "OpenSSL", None)
    with pytest.raises(MissingExtra, match=r"kdskills\[trust\]"):
        signature_of(skill, [])


def test_too_large(tmp_path: Path, publishers: dict[str, Publisher], monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder beyond the bounds is not hashed for its signature, and is no crash either."""
    skill = make_skill(tmp_path / "brief")
    publishers["key"].sign(skill)
    monkeypatch.setattr(signatures, "MAX_BYTES", 10)
    assert signature_of(skill, [publishers["key"].anchor]).kind == "unreadable"


def _pem_files(folder: Path) -> dict[str, Path]:
    """Write what people hand in by mistake."""
    key = private_key(folder / "ours.pem")
    write_key(folder / "rsa.pem", rsa.generate_private_key(65537, 2048))
    private_key(folder / "other.pem", ec.SECP256K1())
    old = certificate(folder / "old.pem", key, days=(-20, -10), authority=True)
    certificate(folder / "root.pem", key, authority=True)
    (folder / "two.pem").write_bytes((folder / "root.pem").read_bytes() * 2)
    (folder / "huge.pem").write_bytes(b"x" * 100_000)
    (folder / "link.pem").symlink_to("root.pem")
    assert old.subject
    return {path.name: path for path in folder.iterdir()} | {"none.pem": folder / "none.pem"}


@pytest.mark.parametrize(
    ("option", "file", "code"),
    [
        ("key", "ours.pub", ""),
        ("key", "ours.pem", "key_invalid"),
        ("key", "rsa.pub", "key_invalid"),
        ("key", "other.pub", "key_invalid"),
        ("key", "root.pem", "key_invalid"),
        ("key", "huge.pem", "anchor_unreadable"),
        ("key", "none.pem", "anchor_unreadable"),
        ("certificate", "root.pem", ""),
        ("certificate", "old.pem", "certificate_expired"),
        ("certificate", "ours.pub", "certificate_invalid"),
        ("certificate", "two.pem", "certificate_invalid"),
        ("certificate", "huge.pem", "anchor_unreadable"),
        ("certificate", "link.pem", "anchor_unreadable"),
    ],
)
def test_anchor_files(tmp_path: Path, option: str, file: str, code: str) -> None:
    """A file that is no public key or root certificate of today is refused with its code."""
    path = _pem_files(tmp_path)[file]
    if not code:
        assert make_anchor("acme", **{option: path}).kind == option
        return
    with pytest.raises(TrustFailed) as refused:
        make_anchor("acme", **{option: path})
    assert refused.value.code == code


@pytest.mark.parametrize("name", ["", "A", "a/b", "../x", "a" * 65, "a\n", "-a"])
def test_anchor_names(name: str) -> None:
    """A name that could be a path or an option is none; an identity needs its issuer."""
    with pytest.raises(TrustFailed):
        make_anchor(name, identity="a@example.net", issuer="https://example.net")
    with pytest.raises(TrustFailed):
        make_anchor("acme", identity="a@example.net")
    with pytest.raises(TrustFailed):
        make_anchor("acme")


def test_anchors_stay(tmp_path: Path, publishers: dict[str, Publisher]) -> None:
    """Anchors are kept by name, added at once by many, never replaced silently, and removed one by one."""
    anchors = TrustAnchors(tmp_path / "state")
    assert anchors.read() == ()
    adders = [
        threading.Thread(target=anchors.add, args=(make_anchor(f"a{number}", identity="a@b", issuer="https://i"),))
        for number in range(8)
    ]
    for adder in adders:
        adder.start()
    for adder in adders:
        adder.join()
    assert [anchor.name for anchor in anchors.read()] == [f"a{number}" for number in range(8)]
    anchors.add(publishers["key"].anchor)
    anchors.add(publishers["key"].anchor)
    with pytest.raises(TrustFailed) as taken:
        anchors.add(publishers["other key"].anchor)
    assert taken.value.code == "anchor_taken"
    assert anchors.remove("acme") == publishers["key"].anchor
    with pytest.raises(TrustFailed) as unknown:
        anchors.remove("acme")
    assert unknown.value.code == "anchor_unknown"
    assert anchors.path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("text", ["", "[]", '{"anchors": 1}', '{"anchors": [{}]}', '{"anchors": [1]}', "[" * 100_000])
def test_broken_anchors(tmp_path: Path, text: str) -> None:
    """A file of anchors that cannot be understood trusts nobody, and says so."""
    (tmp_path / "trust.json").write_text(text)
    with pytest.raises(TrustFailed) as refused:
        TrustAnchors(tmp_path).read()
    assert refused.value.code == "anchors_unreadable"


def test_signing_refusals(tmp_path: Path, publishers: dict[str, Publisher]) -> None:
    """A key that is missing, locked, of another type or not the certificate's, and a link in the folder: nothing is signed."""
    skill = make_skill(tmp_path / "brief")
    private_key(tmp_path / "locked.pem", password=b"secret")
    write_key(tmp_path / "rsa.pem", rsa.generate_private_key(65537, 2048))
    leaf = publishers["certificate"].folder / "leaf.pem"
    for key, leaf_path in [
        (tmp_path / "none.pem", None),
        (tmp_path / "locked.pem", None),
        (tmp_path / "rsa.pem", None),
        (publishers["key"].folder / "key.pem", leaf),
    ]:
        with pytest.raises(TrustFailed):
            sign_folder(skill, key, certificate=leaf_path)
    (skill / "link").symlink_to("SKILL.md")
    with pytest.raises(TrustFailed) as refused:
        publishers["key"].sign(skill)
    assert refused.value.code == "signing_failed"
    assert not (skill / SIGNATURE_FILE).exists()

"""Signatures of skills in the format OpenSSF Model Signing: anchors that an operator trusts, verdicts, and signing.

A signature is `skill.oms.sig` in the skill's folder: a statement over every file, signed by a key or by a certificate's key.
The package `model-signing` makes and checks it, so that others' verifiers and this one say the same. It is imported when a
signature is to be checked, and says nothing about modes, empty folders, `.git*` paths and the name of the skill: those are
the lock's.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from ssl import PEM_cert_to_DER_cert
from typing import Any, Final, Literal

from kdskills.errors import CallerMustAct, FileRefused, MissingExtra
from kdskills.execution.dirs import locked
from kdskills.skills.private_files import private_folder, replace_file
from kdskills.skills.safe_open import read_descriptor, read_file, walk_tree

SIGNATURE_FILE: Final = "skill.oms.sig"
MAX_SIGNATURE: Final = 4 * 1024 * 1024
MAX_PEM: Final = 64 * 1024
MAX_FILES: Final = 20_000
MAX_BYTES: Final = 512 * 1024 * 1024
CURVES: Final = ("secp256r1", "secp384r1", "secp521r1")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_IGNORED = (".git", ".gitattributes", ".github", ".gitignore")

VerdictKind = Literal["ok", "unsigned", "untrusted_signer", "bad_signature", "unreadable"]


class TrustFailed(CallerMustAct, code="anchor_invalid"):
    """An anchor, a key, a certificate or a policy of trust cannot be used; codes are in `docs/reference/trust.md`."""


@dataclass(frozen=True, slots=True)
class SignatureVerdict:
    """What a signature says of a folder.

    `signer` names the anchor that it leads to, for `ok` and `bad_signature`; `files` are paths that differ from what was
    signed, sorted; `reason` is a clause for people, empty for `ok`.
    """

    kind: VerdictKind
    signer: str = ""
    files: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TrustAnchor:
    """Who an operator trusts to sign: a public key, a root certificate (both as PEM), or an identity of Sigstore."""

    name: str
    kind: Literal["key", "certificate", "identity"]
    pem: str = ""
    identity: str = ""
    issuer: str = ""

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex: of a key as signatures name it, of a certificate over its DER; empty for an identity."""
        data = PEM_cert_to_DER_cert(self.pem) if self.kind == "certificate" else self.pem.encode()
        return hashlib.sha256(data).hexdigest() if self.pem else ""


class TrustAnchors:
    """The anchors of one operator, in `trust.json` of the state folder *folder*; never anything of a bundle."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "trust.json"

    def read(self) -> tuple[TrustAnchor, ...]:
        """Return the anchors by name. Raises TrustFailed, `anchors_unreadable`: nobody is trusted then."""
        try:
            data = read_file(self.path.parent, self.path.name, limit=MAX_SIGNATURE).data
            rows = json.loads(data)["anchors"]
            return tuple(TrustAnchor(**{key: str(value) for key, value in row.items()}) for row in rows)  # type: ignore[arg-type]
        except FileRefused as error:
            if error.code == "file_missing":
                return ()
            raise self._unreadable(error.message) from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._unreadable("it is not what `kdskills trust` writes") from error

    def add(self, anchor: TrustAnchor) -> None:
        """Keep *anchor*, once.

        Raises TrustFailed: `anchor_taken` when another one has the name, `anchors_unreadable`; OSError.
        """
        private_folder(self.path.parent)
        with locked(self.path.with_name(".trust.lock")):
            anchors = {each.name: each for each in self.read()}
            if anchors.setdefault(anchor.name, anchor) != anchor:
                message = f"{anchor.name} is another anchor already: `kdskills trust remove {anchor.name}` first"
                raise TrustFailed(message, code="anchor_taken", name=anchor.name)
            self._write(anchors)

    def remove(self, name: str) -> TrustAnchor:
        """Forget an anchor and return it. Raises TrustFailed: `anchor_unknown`, `anchors_unreadable`; OSError."""
        anchors = {each.name: each for each in self.read()}
        if name not in anchors:
            raise TrustFailed(f"there is no anchor {name!r:.80}", code="anchor_unknown", names=sorted(anchors))
        with locked(self.path.with_name(".trust.lock")):
            anchors = {each.name: each for each in self.read()}
            anchor = anchors.pop(name)
            self._write(anchors)
        return anchor

    def _write(self, anchors: Mapping[str, TrustAnchor]) -> None:
        rows = [asdict(anchors[name]) for name in sorted(anchors)]
        replace_file(self.path, json.dumps({"anchors": rows}, indent=1).encode(), durable=True)

    def _unreadable(self, reason: str) -> TrustFailed:
        message = f"{self.path} cannot be used: {reason}"
        return TrustFailed(message, code="anchors_unreadable", who="operator", path=str(self.path))


def make_anchor(
    name: str, *, key: Path | None = None, certificate: Path | None = None, identity: str = "", issuer: str = ""
) -> TrustAnchor:
    """Return an anchor of exactly one kind: a PEM file with a public key, one with a root certificate, or an identity.

    Raises:
        TrustFailed: `anchor_invalid` for a name or a choice that is none, `anchor_unreadable`, `key_invalid`,
            `certificate_invalid`, `certificate_expired`.
        MissingExtra: The extra `trust` is not installed.
    """
    if not _NAME.fullmatch(name):
        raise TrustFailed(f"an anchor is named by a-z, 0-9, `.`, `_` and `-`, not {name!r:.80}", name=name[:80])
    if [key is not None, certificate is not None, bool(identity and issuer)].count(True) != 1 or bool(identity) != bool(
        issuer
    ):
        raise TrustFailed("an anchor is a key, a certificate, or an identity with its issuer: give one of them")
    if key is not None:
        return TrustAnchor(name, "key", _public_key(_pem(key), key))
    if certificate is not None:
        return TrustAnchor(name, "certificate", _root_certificate(_pem(certificate), certificate))
    return TrustAnchor(name, "identity", identity=identity, issuer=issuer)


def _pem(path: Path) -> bytes:
    try:
        return read_file(path.absolute().parent, path.name, limit=MAX_PEM).data
    except FileRefused as error:
        message = f"{path} cannot be used: {error.message}"
        raise TrustFailed(message, code="anchor_unreadable", path=str(path)) from error


def _public_key(data: bytes, path: Path) -> str:
    """Return a public key as PEM in its usual form. Raises TrustFailed, `key_invalid`; MissingExtra."""
    _package()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

    if b"PRIVATE KEY" in data:
        raise TrustFailed(f"{path} is a private key: an anchor is the public one", code="key_invalid", path=str(path))
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise TrustFailed(f"{path} holds no public key in PEM", code="key_invalid", path=str(path)) from error
    if not isinstance(key, EllipticCurvePublicKey) or key.curve.name not in CURVES:
        message = f"the key in {path} is of another type: signatures are of the curves {', '.join(CURVES)}"
        raise TrustFailed(message, code="key_invalid", path=str(path))
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def _root_certificate(data: bytes, path: Path) -> str:
    """Return one certificate as PEM. Raises TrustFailed: `certificate_invalid`, `certificate_expired`; MissingExtra."""
    _package()
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    try:
        certificates = x509.load_pem_x509_certificates(data)
    except ValueError as error:
        message = f"{path} holds no certificate in PEM"
        raise TrustFailed(message, code="certificate_invalid", path=str(path)) from error
    if len(certificates) != 1:
        message = f"{path} holds {len(certificates)} certificates: an anchor is one root"
        raise TrustFailed(message, code="certificate_invalid", path=str(path))
    end = certificates[0].not_valid_after_utc
    if end < datetime.now(UTC):
        message = f"the certificate in {path} was valid until {end:%Y-%m-%d}"
        raise TrustFailed(message, code="certificate_expired", path=str(path), until=end.isoformat())
    return certificates[0].public_bytes(Encoding.PEM).decode()


def _package() -> Any:
    """Return the package `model_signing`, ready to verify and sign. Raises MissingExtra."""
    try:
        import model_signing
        import OpenSSL  # noqa: F401 - which model-signing needs for certificates, and does not ask for
    except ModuleNotFoundError as error:
        raise MissingExtra("checking signatures of skills", "trust") from error
    return model_signing


class _BundleUnreadable(Exception):
    """A signature file cannot be read; the message says why."""


def signature_of(
    folder: Path, anchors: Iterable[TrustAnchor], *, digests: Mapping[str, str] | None = None
) -> SignatureVerdict:
    """Return what the signature in a skill's folder says, as the package's own verifier does for one of *anchors*.

    Args:
        folder: The skill's folder.
        anchors: Who is trusted; without any, whatever is signed is by an untrusted signer.
        digests: SHA-256 in hex of every file by its path, as the caller read them: an accepted signature must be over
            these, so that a change while it is checked does not slip in.

    A signature of more than 4 MiB, and a folder of more than 20,000 files or 512 MiB, is `unreadable`.

    Raises:
        MissingExtra: There is a signature, and the extra `trust` is not installed.
    """
    try:
        data = _signature_bytes(folder)
        if data is None:
            return SignatureVerdict("unsigned", reason=f"there is no {SIGNATURE_FILE}")
        package = _package()
        bundle = _parsed(data)
        entries = walk_tree(folder)
        if len(entries) > MAX_FILES or sum(entry.size for entry in entries) > MAX_BYTES:
            raise _BundleUnreadable("the folder is larger than what is checked")  # noqa: TRY301 - told like every other
    except _BundleUnreadable as error:
        return SignatureVerdict("unreadable", reason=str(error))
    except FileRefused as error:
        return SignatureVerdict("unreadable", reason=f"the files cannot be read: {error.message}")
    statement = _statement(bundle)
    verdicts: list[SignatureVerdict] = []
    with tempfile.TemporaryDirectory(prefix="kdskills-sig-") as scratch:
        for anchor in anchors:
            if not _may_lead_to(bundle, anchor):
                continue
            verdict = _verified_by(package, anchor, folder, bundle, Path(scratch))
            if verdict.kind == "ok" and digests is not None:
                verdict = _compared(verdict, statement, digests)
            if verdict.kind == "ok":
                return verdict
            verdicts.append(verdict)
    order: tuple[VerdictKind, ...] = ("bad_signature", "unreadable", "untrusted_signer")
    nobody = SignatureVerdict("untrusted_signer", reason="no anchor of this operator signed it")
    best = min(verdicts, key=lambda each: order.index(each.kind), default=nobody)
    if best.kind == "bad_signature" and not best.files and statement is not None:
        return SignatureVerdict(best.kind, best.signer, _differing(statement, digests or _digests(folder)), best.reason)
    return best


def _signature_bytes(folder: Path) -> bytes | None:
    """Return the signature file, or None. A link is followed, as other verifiers do: the lock sees that it is one."""
    try:
        descriptor = os.open(folder / SIGNATURE_FILE, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        if os.path.lexists(folder / SIGNATURE_FILE):
            raise _BundleUnreadable("the signature is a link to nothing") from None
        return None
    except OSError as error:
        raise _BundleUnreadable(f"the signature cannot be read: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _BundleUnreadable("the signature is no regular file")
        return read_descriptor(descriptor, SIGNATURE_FILE, MAX_SIGNATURE).data
    except FileRefused as error:
        raise _BundleUnreadable(f"the signature cannot be read: {error.message}") from error
    finally:
        os.close(descriptor)


def _parsed(data: bytes) -> dict[str, Any]:
    """Return a bundle's JSON. Raises _BundleUnreadable for what no verifier could read."""
    try:
        bundle = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _BundleUnreadable("the signature is no JSON") from error
    parts = [bundle.get(name) for name in ("verificationMaterial", "dsseEnvelope")] if isinstance(bundle, dict) else []
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise _BundleUnreadable("the signature is no Sigstore bundle with a statement")
    whole: dict[str, Any] = bundle
    return whole


def _statement(bundle: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the statement that a bundle says was signed, or None when it cannot be read."""
    try:
        statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return statement if isinstance(statement, dict) else None


def _may_lead_to(bundle: Mapping[str, Any], anchor: TrustAnchor) -> bool:
    """Whether a bundle has what an anchor of this kind verifies."""
    material = bundle["verificationMaterial"]
    has_key = "publicKey" in material or "public_key" in material
    return has_key if anchor.kind == "key" else not has_key


def _verified_by(
    package: Any, anchor: TrustAnchor, folder: Path, bundle: dict[str, Any], scratch: Path
) -> SignatureVerdict:
    """Return the verdict of the package's verifier for one anchor."""
    from cryptography.exceptions import InvalidSignature
    from OpenSSL.crypto import X509StoreContextError

    material = bundle["verificationMaterial"]
    if anchor.kind == "key" and isinstance(material.get("publicKey"), dict):
        # A bundle of old says no key; the package would print a warning about it, and then verify with the given one.
        hint = material["publicKey"].get("hint") or hashlib.sha256(anchor.pem.encode()).hexdigest()
        bundle = {**bundle, "verificationMaterial": {**material, "publicKey": {**material["publicKey"], "hint": hint}}}
    signature, pem = scratch / "bundle", scratch / "anchor"
    signature.write_text(json.dumps(bundle), encoding="utf-8")
    pem.write_text(anchor.pem, encoding="utf-8")
    try:
        verifier = package.verifying.Config()
        if anchor.kind == "key":
            verifier.use_elliptic_key_verifier(public_key=pem)
        elif anchor.kind == "certificate":
            verifier.use_certificate_verifier(certificate_chain=[pem])
        else:
            verifier.use_sigstore_verifier(identity=anchor.identity, oidc_issuer=anchor.issuer)
        verifier.verify(folder, signature)
    except X509StoreContextError as error:
        return SignatureVerdict("untrusted_signer", reason=f"its certificate does not lead to {anchor.name}: {error}")
    except InvalidSignature:
        return SignatureVerdict("bad_signature", anchor.name, reason="the signature is not of this statement and key")
    except Exception as error:  # noqa: BLE001 - whatever the package says of hostile JSON, it did not accept it
        return _refused_by(anchor, error)
    return SignatureVerdict("ok", anchor.name)


def _refused_by(anchor: TrustAnchor, error: Exception) -> SignatureVerdict:
    words = " ".join(str(error).split())[:300] or type(error).__name__
    if words.startswith(("Key mismatch", "Signing certificate cannot")):
        return SignatureVerdict("untrusted_signer", reason=words)
    if isinstance(error, ValueError) and words.startswith(("Signature mismatch", "Cannot use")):
        return SignatureVerdict("bad_signature", anchor.name, reason="the files are not the ones that were signed")
    if isinstance(error, ValueError) and words.startswith(("Manifest is", "Expected", "Predicate", "Cannot guess")):
        return SignatureVerdict("bad_signature", anchor.name, reason=words)
    return SignatureVerdict("unreadable", reason=f"it cannot be checked: {type(error).__name__}: {words}")


def _differing(statement: Mapping[str, Any], digests: Mapping[str, str]) -> tuple[str, ...]:
    """Return the paths whose files are not those of a statement over SHA-256 of whole files; () when it is another one."""
    signed = _signed(statement)
    if signed is None:
        return ()
    resources, ignored = signed
    paths = {path for path in digests if not any(path == each or path.startswith(f"{each}/") for each in ignored)}
    differing = {path for path in paths | resources.keys() if digests.get(path) != resources.get(path)}
    return tuple(sorted(differing))


def _signed(statement: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]] | None:
    """Return `{path: digest}` of a statement and the paths it leaves out; None unless it is over SHA-256 of whole files."""
    try:
        predicate = statement["predicate"]
        serialization = predicate["serialization"]
        if (serialization["method"], serialization["hash_type"]) != ("files", "sha256"):
            return None
        resources = {str(row["name"]): str(row["digest"]) for row in predicate["resources"]}
        ignored = [os.path.normpath(str(path)) for path in serialization.get("ignore_paths", ())]
    except (KeyError, TypeError, AttributeError):
        return None
    return resources, (*ignored, *_IGNORED)


def _compared(
    verdict: SignatureVerdict, statement: Mapping[str, Any] | None, digests: Mapping[str, str]
) -> SignatureVerdict:
    """Return *verdict*, unless the statement is not over the files that the caller read."""
    if statement is None or _signed(statement) is None:
        return SignatureVerdict("unreadable", reason="its statement is not over SHA-256 of whole files")
    differing = _differing(statement, digests)
    if differing:
        return SignatureVerdict("bad_signature", verdict.signer, differing, "the files changed while they were checked")
    return verdict


def _digests(folder: Path) -> dict[str, str]:
    """Return the digests of all regular files; a link has its target's path, so that it differs."""
    digests: dict[str, str] = {}
    for entry in walk_tree(folder):
        try:
            digests[entry.path] = hashlib.sha256(read_file(folder, entry.path, limit=MAX_BYTES).data).hexdigest()
        except FileRefused:
            digests[entry.path] = f"link:{entry.target}"
    return digests


def sign_folder(folder: Path, key: Path, *, certificate: Path | None = None, chain: Iterable[Path] = ()) -> Path:
    """Sign every file of a skill's folder, and return the signature's path.

    Args:
        folder: The skill's folder; a signature there is replaced in one step.
        key: PEM file with the private key, not encrypted, of one of the curves P-256, P-384 and P-521.
        certificate: PEM file with the certificate of that key; without it the bare key signs.
        chain: PEM files of the certificates between *certificate* and the root.

    Raises:
        TrustFailed: `anchor_unreadable` for a file that cannot be read, `signing_failed` when the key, the certificate or
            the folder cannot be used.
        MissingExtra: The extra `trust` is not installed.
        OSError: The folder cannot be written.
    """
    package = _package()
    chain = tuple(chain)
    for path in (key, *(() if certificate is None else (certificate,)), *chain):
        _pem(path)
    try:
        signer = package.signing.Config().set_hashing_config(
            package.hashing.Config().set_ignored_paths(paths=[SIGNATURE_FILE])
        )
        if certificate is None:
            signer.use_elliptic_key_signer(private_key=key)
        else:
            # The package cannot read a chain of none; the certificate itself adds nothing to one.
            chain = chain or (certificate,)
            signer.use_certificate_signer(private_key=key, signing_certificate=certificate, certificate_chain=chain)
        with tempfile.TemporaryDirectory(prefix="kdskills-sig-") as scratch:
            signer.sign(folder, Path(scratch, SIGNATURE_FILE))
            data = Path(scratch, SIGNATURE_FILE).read_bytes()
    except Exception as error:  # whatever the package says of a key or folder, nothing was signed
        words = " ".join(str(error).split())[:300] or type(error).__name__
        raise TrustFailed(f"{folder.name} cannot be signed: {words}", code="signing_failed") from error
    replace_file(folder / SIGNATURE_FILE, data, mode=0o644)
    return folder / SIGNATURE_FILE

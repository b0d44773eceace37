"""Keys, certificates and signed skills for tests of signatures, and the reference verifier called as its package documents."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import model_signing
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from kdskills.supply.signatures import SIGNATURE_FILE, TrustAnchor, make_anchor, sign_folder

NOW = datetime.now(UTC)


def private_key(
    path: Path, curve: ec.EllipticCurve | None = None, *, password: bytes = b""
) -> ec.EllipticCurvePrivateKey:
    """Write a new private key, and its public half beside it as `<name>.pub`."""
    key = ec.generate_private_key(curve or ec.SECP256R1())
    write_key(path, key, password=password)
    return key


def write_key(path: Path, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, *, password: bytes = b"") -> None:
    """Write both halves of a key as PEM."""
    locked = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(pem, pkcs8, locked))
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    path.with_suffix(".pub").write_bytes(public)


def certificate(
    path: Path,
    key: ec.EllipticCurvePrivateKey,
    issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None = None,
    *,
    name: str = "publisher",
    authority: bool = False,
    days: tuple[int, int] = (-30, 30),
    for_signing: bool = True,
) -> x509.Certificate:
    """Write a certificate of *key*, valid over *days* from now, by *issuer* or by itself."""
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    usage = x509.KeyUsage(for_signing and not authority, *[False] * 4, authority, authority, False, False)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer[0].subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW + timedelta(days=days[0]))
        .not_valid_after(NOW + timedelta(days=days[1]))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .sign(key if issuer is None else issuer[1], hashes.SHA256())
    )
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return made


@dataclass(frozen=True)
class Publisher:
    """Someone who signs: with a bare key, or with a certificate that a root vouches for."""

    folder: Path
    anchor: TrustAnchor

    @classmethod
    def with_key(cls, folder: Path, name: str = "acme", curve: ec.EllipticCurve | None = None) -> Publisher:
        """Make a publisher whose public key is the anchor."""
        folder.mkdir(parents=True)
        private_key(folder / "key.pem", curve)
        return cls(folder, make_anchor(name, key=folder / "key.pub"))

    @classmethod
    def with_certificate(
        cls, folder: Path, name: str = "acme", days: tuple[int, int] = (-30, 30), *, for_signing: bool = True
    ) -> Publisher:
        """Make a publisher whose root certificate is the anchor."""
        folder.mkdir(parents=True)
        root_key, key = private_key(folder / "root-key.pem"), private_key(folder / "key.pem")
        root = certificate(folder / "root.pem", root_key, name=f"{name} root", authority=True, days=(-3000, 3000))
        certificate(folder / "leaf.pem", key, (root, root_key), name=name, days=days, for_signing=for_signing)
        return cls(folder, make_anchor(name, certificate=folder / "root.pem"))

    def sign(self, skill: Path) -> Path:
        """Sign a skill by this product."""
        leaf = self.folder / "leaf.pem"
        return sign_folder(skill, self.folder / "key.pem", certificate=leaf if leaf.exists() else None)

    def reference(self) -> model_signing.verifying.Config:
        """Return the package's own verifier of this publisher."""
        config = model_signing.verifying.Config()
        if self.anchor.kind == "key":
            return config.use_elliptic_key_verifier(public_key=self.folder / "key.pub")
        return config.use_certificate_verifier(certificate_chain=[self.folder / "root.pem"])

    def reference_accepts(self, skill: Path) -> bool:
        """Whether the package's own verifier accepts a skill's folder."""
        try:
            self.reference().verify(skill, skill / SIGNATURE_FILE)
        except Exception:  # noqa: BLE001 - it raises what it likes
            return False
        return True


def make_skill(folder: Path, text: str = "Read the brief.") -> Path:
    """Write a skill with a script, a reference and files that verifiers leave out."""
    for path, content in {
        "SKILL.md": f"---\nname: {folder.name}\ndescription: Briefs.\n---\n{text}\n",
        "scripts/run.py": "print('ran')\n",
        "references/deep/notes.md": "notes\n",
        ".gitignore": "*.pyc\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    (folder / "scripts/run.py").chmod(0o755)
    return folder

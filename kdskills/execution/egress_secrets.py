"""Secrets that code never sees: headers the proxy puts in for some hosts, the run's own authority for TLS, and masks.

Keys and secrets are in the memory of this process alone; a program gets the authority's certificate, which is no secret.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import ssl
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Final

from kdskills.errors import ExecRefused
from kdskills.execution.egress import LEAST_SECRET, NO_ADDRESS, HostHeaders, SecretOrigin, address_problem
from kdskills.execution.rootfs import trusted_certificates

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

SPARE_DAYS: Final = 1
"""Days that certificates of a run hold before its beginning and beyond its longest time."""
HTTP: Final = ["http/1.1"]


class RunSecrets:
    """Secrets of one run of *wall_s* seconds at most, and the authority that certifies the proxy as their hosts to its programs, and as no other.

    Raises ExecRefused when the library for certificates is missing.
    """

    def __init__(self, headers: HostHeaders, wall_s: float = 0) -> None:
        self._headers = headers
        self._lock = threading.Lock()
        self._contexts: dict[str, ssl.SSLContext] = {}
        self.hosts = tuple(sorted({origin.host for origin in headers if origin.tls}))
        if self.hosts:
            self._key, self._authority = _new_authority(
                self.hosts, dt.datetime.now(dt.UTC) + dt.timedelta(days=SPARE_DAYS, seconds=wall_s)
            )

    def headers(self, host: str, port: int, *, tls: bool) -> Mapping[str, str]:
        """Return what is put into requests to *host* at *port*; empty for nearly all."""
        return self._headers.get(SecretOrigin(host, port, tls), {})

    def trust(self) -> bytes:
        """Return the certificates that a program shall trust, as PEM: those of this host, and the run's authority."""
        from cryptography.hazmat.primitives.serialization import Encoding

        path = trusted_certificates()
        host_authorities = b"" if path is None else path.read_bytes().rstrip() + b"\n"
        return host_authorities + self._authority.public_bytes(Encoding.PEM)

    def context_as(self, host: str) -> ssl.SSLContext:
        """Return what the proxy needs to be *host* to the program."""
        with self._lock:
            if host not in self._contexts:
                self._contexts[host] = _server_context(_certify(host, self._key, self._authority))
            return self._contexts[host]

    @cached_property
    def context_to(self) -> ssl.SSLContext:
        """What the proxy needs to speak to the hosts themselves: their certificates are verified as this host does."""
        context = ssl.create_default_context(cafile=trusted_certificates())
        return _narrow(context)


def _narrow(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(HTTP)
    return context


def _server_context(chain: bytes) -> ssl.SSLContext:
    """Return the context of a server with this certificate and key, which touch no disk."""
    context = _narrow(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    with os.fdopen(os.memfd_create("kdskills", os.MFD_CLOEXEC), "w+b", buffering=0) as file:
        file.write(chain)
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


def _name_of(host: str) -> x509.GeneralName:
    from cryptography import x509

    return x509.DNSName(host) if address_problem(host) == NO_ADDRESS else x509.IPAddress(ipaddress.ip_address(host))


def _builder(
    subject: str, issuer: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, end: dt.datetime
) -> x509.CertificateBuilder:
    """Return a certificate in the making, with what all of ours have."""
    from cryptography import x509

    names = [
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text[:64])]) for text in (subject, issuer)
    ]  # the subject's bound is that of the standard; hosts are named by the alternative name
    return (
        x509.CertificateBuilder()
        .subject_name(names[0])
        .issuer_name(names[1])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(dt.datetime.now(dt.UTC) - dt.timedelta(days=SPARE_DAYS))
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )


_AUTHORITY: Final = "kdskills: one run"


def _new_authority(hosts: Iterable[str], end: dt.datetime) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Return key and certificate of an authority for these hosts, valid until *end*. Raises ExecRefused."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        words = "secrets for TLS need the package cryptography: pip install 'kdskills[network]'"
        raise ExecRefused(words, missing=["cryptography"]) from None
    key = ec.generate_private_key(ec.SECP256R1())
    permitted: list[x509.GeneralName] = []
    for host in hosts:
        name = _name_of(host)
        if isinstance(name, x509.IPAddress):
            name = x509.IPAddress(ipaddress.ip_network(host))
        permitted.append(name)
    certificate = (
        _builder(_AUTHORITY, _AUTHORITY, key, key, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.NameConstraints(permitted_subtrees=permitted, excluded_subtrees=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return key, certificate


def _certify(host: str, signer: ec.EllipticCurvePrivateKey, issuer: x509.Certificate) -> bytes:
    """Return a new key, its certificate for *host* and the issuer's, as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(host, _AUTHORITY, key, signer, issuer.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_name_of(host)]), critical=False)
        .sign(signer, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private + certificate.public_bytes(Encoding.PEM) + issuer.public_bytes(Encoding.PEM)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    names = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign")
    unused = dict.fromkeys((*names, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(digital_signature=not signs_certificates, key_cert_sign=signs_certificates, **unused)


class TlsEnd:
    """One end of TLS whose bytes we carry ourselves, so that no call waits; *host* is the server's name for its client."""

    def __init__(self, context: ssl.SSLContext, host: str | None = None) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, host is None, host)
        self.closed = False

    def shake(self, data: bytes) -> bool:
        """Take bytes of the other end; whether the handshake is done. Raises ssl.SSLError."""
        self._incoming.write(data)
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            return True
        return False

    def outgoing(self) -> bytes:
        """Return bytes for the other end."""
        return self._outgoing.read()

    def open(self, data: bytes) -> bytes:
        """Return what bytes of the other end say; `closed` once it said that there is no more. Raises ssl.SSLError."""
        self._incoming.write(data)
        text = bytearray()
        with suppress(ssl.SSLWantReadError):
            while piece := self._tls.read(64 * 1024):
                text += piece
            self.closed = True
        return bytes(text)

    def seal(self, text: bytes, *, last: bool = False) -> bytes:
        """Return the bytes that say *text* to the other end and, when it is the *last*, that there is no more."""
        if text:
            self._tls.write(text)
        if last:
            with suppress(ssl.SSLError):  # the other end's own goodbye is not waited for
                self._tls.unwrap()
        return self.outgoing()


class SecretMask:
    """Passes on an answer with stars for the secrets that were put in; lengths stay."""

    def __init__(self, values: Iterable[str]) -> None:
        texts = {piece for value in values for piece in (value, value.rpartition(" ")[2]) if len(piece) >= LEAST_SECRET}
        self._secrets = [text.encode("ascii") for text in texts]
        self._tail, self._masked_tail = b"", b""

    def feed(self, data: bytes, *, last: bool) -> bytes:
        """Return what can be passed on: what may be the beginning of a secret waits for more, unless it is the *last*."""
        data, masked = self._tail + data, bytearray(self._masked_tail + data)
        for secret in self._secrets:
            at = data.find(secret)
            while at >= 0:  # secrets may overlap, and one may begin another
                masked[at : at + len(secret)] = b"*" * len(secret)
                at = data.find(secret, at + 1)
        beginnings = (n for secret in self._secrets for n in range(1, len(secret)) if data.endswith(secret[:n]))
        end = len(data) - (0 if last else max(beginnings, default=0))
        self._tail, self._masked_tail = data[end:], bytes(masked[end:])
        return bytes(masked[:end])

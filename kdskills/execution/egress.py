"""Network on purpose, the pure part: which hosts are granted, which addresses are nobody's business, and heads of requests.

Nothing here opens a socket; `kdskills.execution.egress_proxy` does. Whatever is not plainly right is refused: a proxy and a server
that read one request in two ways are how requests are smuggled.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

from pydantic import SecretStr

from kdskills.errors import ExecRefused
from kdskills.execution.protocol import SecretHeaders

DEFAULT_PORTS: Final = frozenset({80, 443})
PROXY_PORT: Final = 3128
"""Port of the helper on the sandbox's own loopback."""
TRUST_FILE: Final = "etc/ssl/certs/ca-certificates.crt"
"""Certificate authorities in the prepared tree."""
PROXY_ENV: Final = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), f"http://127.0.0.1:{PROXY_PORT}"),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,::1"),
    "NODE_USE_ENV_PROXY": "1",
    "SSL_CERT_FILE": f"/{TRUST_FILE}",
}
"""Variables of a program that may reach some hosts; the proxy is the only way there."""
TRUST_DIR: Final = "/run/trust"
"""Where a program whose requests get secrets finds the certificates to trust."""
TRUST_NAME: Final = "certificates.pem"
TRUST_ENV: Final = dict.fromkeys(
    ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO"),
    f"{TRUST_DIR}/{TRUST_NAME}",
)
MAX_HEAD: Final = 16 * 1024
MAX_RULES: Final = 256
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})

_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT: Final = re.compile(r"[1-9][0-9]{0,4}")

NO_ADDRESS: Final = "no address"

_REFUSED_NETWORKS: Final[Mapping[str, str]] = {
    "0.0.0.0/8": "this host's",
    "10.0.0.0/8": "private",
    "100.64.0.0/10": "private (shared by a provider's customers)",
    "127.0.0.0/8": "loopback",
    "168.63.129.16/32": "a cloud's own",
    "169.254.0.0/16": "link-local, as metadata services are",
    "172.16.0.0/12": "private",
    "192.0.0.0/24": "reserved",
    "192.88.99.0/24": "a relay's between IPv6 and IPv4",
    "192.168.0.0/16": "private",
    "198.18.0.0/15": "private (for measurements)",
    "224.0.0.0/4": "multicast",
    "240.0.0.0/4": "reserved",
    "2001::/23": "reserved, or one of IPv4 in disguise",
    "2002::/16": "one of IPv4 in disguise",
}
"""IPv6 is refused but for its global part, and these: that leaves out loopback, IPv4 in disguise, NAT64, private and link-local."""
_NETWORKS: Final = [(ipaddress.ip_network(text), words) for text, words in _REFUSED_NETWORKS.items()]
_GLOBAL_IPV6: Final = ipaddress.IPv6Network("2000::/3")


def address_problem(text: str) -> str | None:
    """Return what kind of address *text* is that no program may reach, or None for one of the public Internet."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return NO_ADDRESS
    if isinstance(address, ipaddress.IPv6Address) and (address not in _GLOBAL_IPV6 or address.scope_id):
        return "not of the public part of IPv6"
    for network, words in _NETWORKS:
        if address.version == network.version and address in network:
            return words
    return None


def canonical_host(text: str) -> str:
    """Return a host name in lower case without its last dot, or an address in its one spelling (IPv6 without brackets).

    Raises ValueError, with a problem to show, for anything else: an odd spelling of an address, or a name without a dot.
    """
    if text.startswith("[") and text.endswith("]") and "%" not in text:
        return _plain_address(text[1:-1], ipaddress.IPv6Address)
    if not text.isascii():
        raise ValueError("is not ASCII: write the name's xn-- form")
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        return _plain_address(text, ipaddress.IPv4Address)
    if len(labels) < 2 or len(name) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError("is no full host name")
    return name


def _plain_address(text: str, kind: type[ipaddress.IPv4Address | ipaddress.IPv6Address]) -> str:
    """Return an address in its one spelling; IPv4 in octal, hexadecimal or fewer than four numbers is refused."""
    try:
        return str(kind(text))
    except ValueError:
        raise ValueError("is no address in plain spelling") from None


def canonical_port(text: str) -> int:
    """Return a port written as a plain decimal number. Raises ValueError."""
    if not _PORT.fullmatch(text) or int(text) > 65_535:
        raise ValueError("has no port from 1 to 65535")
    return int(text)


def split_authority(text: str) -> tuple[str, int | None]:
    """Return host, canonical, and port of `host` or `host:port`. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        return canonical_host(text), None
    return canonical_host(host), canonical_port(port)


def authority(host: str, port: int, default: int | None = None) -> str:
    """Return host and port as requests write them, without the port when it is the *default*."""
    name = f"[{host}]" if ":" in host else host
    return name if port == default else f"{name}:{port}"


@dataclass(frozen=True, slots=True)
class HostRule:
    """Hosts a program may reach: one, or with `below` every host below a name, at some ports."""

    host: str
    ports: frozenset[int]
    below: bool

    def matches(self, host: str, port: int) -> bool:
        """Whether a host, canonical, may be reached at *port*."""
        return port in self.ports and (host.endswith(f".{self.host}") if self.below else host == self.host)


@lru_cache(maxsize=1024)
def host_rule(text: str) -> HostRule:
    """Return the rule `host`, `host:port`, `*.example.net` or `*.example.net:port`. Raises ValueError with what is wrong."""
    problem, below = "", text.startswith("*.")
    try:
        host, port = split_authority(text.removeprefix("*."))
        if below and address_problem(host) != NO_ADDRESS:
            problem = "nothing is below an address"
    except ValueError as error:
        problem = str(error)
    if problem:
        raise ValueError(f"{text[:80]!r} is no rule such as 'pypi.org' or '*.example.net:443': {problem}")
    return HostRule(host, DEFAULT_PORTS if port is None else frozenset({port}), below)


def host_rules(texts: Iterable[str]) -> tuple[HostRule, ...]:
    """Return the rules. Raises ExecRefused, `bad_request`, for one that is none."""
    try:
        return tuple(map(host_rule, texts))
    except ValueError as error:
        raise ExecRefused(f"the network cannot be granted: {error}", code="bad_request", who="caller") from None


Grants = Mapping[str, Sequence[str]]
"""Rules by namespace or full id of the skills whose programs they are for."""


def granted(grants: Grants, skills: Iterable[str]) -> Literal["none"] | tuple[str, ...]:
    """Return the rules that *grants* give to any of *skills*, by full id; sorted."""
    keys = {key for skill in skills for key in (skill, skill.rpartition(".")[0])}
    return tuple(sorted({rule for key in keys for rule in grants.get(key, ())})) or "none"


def require_granted(grants: Grants, skill: str, rules: Iterable[str]) -> None:
    """Raise ExecRefused, `network_not_granted`, unless *grants* give all *rules* to a skill, by full id."""
    own = granted(grants, (skill,))
    missing = sorted(set(rules).difference(() if own == "none" else own))
    if missing:
        words = f"the settings of this worker do not grant {skill} the network it was submitted with"
        raise ExecRefused(f"{words}: {', '.join(missing)}", code="network_not_granted", hosts=missing)


def asked_network(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the hosts a skill's metadata asks for by `kdskills.network`, a list or one text; asking gives nothing."""
    ours = metadata.get("kdskills")
    wish = ours.get("network") if isinstance(ours, Mapping) else metadata.get("kdskills.network")
    if isinstance(wish, list | tuple):
        return tuple(map(str, wish))
    return tuple(re.split(r"[\s,]+", str(wish).strip())) if wish else ()


LEAST_SECRET: Final = 8
"""Characters a secret needs: what is shorter would be masked where it only looks like it."""
_SECRET_NAME: Final = re.compile(r"[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*")
_SECRET_VALUE: Final = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")


@dataclass(frozen=True, slots=True)
class SecretOrigin:
    """Where a secret may go: one host at one port, with TLS or, when the operator says so, without."""

    host: str
    port: int
    tls: bool


def secret_origin(text: str) -> SecretOrigin:
    """Return the origin that `host`, `host:port`, `https://…` or `http://…` names; only the last is without TLS.

    Raises ValueError with what is wrong.
    """
    tls = not text.startswith("http://")
    try:
        host, port = split_authority(text.removeprefix("http://").removeprefix("https://"))
    except ValueError as error:
        raise ValueError(
            f"{text[:80]!r} is no host such as 'api.example.net' or 'http://10.1.example': {error}"
        ) from None
    return SecretOrigin(host, port or (443 if tls else 80), tls)


def secret_header(text: str) -> str:
    """Return the one spelling of a header's name. Raises ValueError for one that is none, or that a request hangs on."""
    if not _SECRET_NAME.fullmatch(text) or text.lower() in LINK_HEADERS:
        raise ValueError(f"{text[:80]!r} is no header that can be put in")
    return "-".join(map(str.capitalize, text.split("-")))


def checked_secret(secret: SecretStr) -> SecretStr:
    """Return a secret that can be a header's value. Raises ValueError, which does not repeat it."""
    value = secret.get_secret_value()
    if len(value) < LEAST_SECRET or not _SECRET_VALUE.fullmatch(value):
        raise ValueError(f"a secret has {LEAST_SECRET} or more characters of ASCII, without spaces around it")
    return secret


HostHeaders = Mapping[SecretOrigin, Mapping[str, str]]
"""Headers that are put into requests to each origin; the values are in clear."""


def host_secrets(table: SecretHeaders, skills: Iterable[str]) -> HostHeaders:
    """Return the headers of each origin for programs of *skills*, by full id; what is for a skill beats its namespace's.

    Raises ExecRefused when two skills need different values, and for a *table* that is not well-formed.
    """
    result: dict[SecretOrigin, dict[str, str]] = {}
    for skill in sorted(set(skills)):
        own: dict[SecretOrigin, dict[str, str]] = {}
        try:
            for key in (skill.rpartition(".")[0], skill):
                for origin, headers in table.get(key, {}).items():
                    values = {secret_header(name): checked_secret(value) for name, value in headers.items()}
                    own.setdefault(secret_origin(origin), {}).update(
                        (name, value.get_secret_value()) for name, value in values.items()
                    )
        except ValueError as error:
            raise ExecRefused(f"network_secrets cannot be used: {error}", code="bad_request") from None
        for place, values_of in own.items():
            known = result.setdefault(place, {})
            clash = sorted(name for name, value in values_of.items() if known.get(name, value) != value)
            if clash:
                words = f"skills that run together have different secrets for {place.host}, header {clash[0]}"
                raise ExecRefused(f"{words}: run them one at a time", code="bad_request")
            known |= values_of
    return result


def describe_secrets(table: SecretHeaders, skill: str) -> list[str]:
    """Return one line for each origin with secrets for a skill, by full id: names of headers, never a value."""
    return [
        f"{'' if origin.tls else 'http://'}{authority(origin.host, origin.port, 443 if origin.tls else 80)}: {', '.join(sorted(headers))}"
        for origin, headers in sorted(host_secrets(table, [skill]).items(), key=str)
    ]


class BadHead(ValueError):
    """A request that is not plainly well-formed; the message says why."""


class BadAnswer(ValueError):
    """An answer of a server that is not plainly well-formed; the message says why."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What a request asks for. `path` is empty for CONNECT; `size` of the body is None when it comes in chunks."""

    method: str
    host: str
    port: int
    path: str
    headers: tuple[tuple[str, str], ...]
    size: int | None
    waits: bool  # for `100 Continue`
    version: str

    def forwarded(self, further: Mapping[str, str]) -> bytes:
        """Return the head for the server itself, for one request; *further* headers take the place of those of their names."""
        names = {name.lower() for name in further}
        # Some servers take X_Name for X-Name.
        headers = [(name, value) for name, value in self.headers if name.lower().replace("_", "-") not in names]
        if self.size is None:
            headers.append(("Transfer-Encoding", "chunked"))
        lines = [
            f"{self.method} {self.path} {self.version}",
            *(f"{name}: {value}" for name, value in (*headers, *further.items())),
        ]
        return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1")


_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_PATH: Final = re.compile(r"/[\x21\x22\x24-\x5b\x5d-\x7e]*")
_OWN_LINK: Final = frozenset(
    {"connection", "proxy-connection", "keep-alive", "proxy-authorization", "te", "trailer", "upgrade", "expect"}
)
"""Headers that are about the link to us, and are not passed on."""
_FRAMING: Final = frozenset({"host", "content-length", "transfer-encoding"})
LINK_HEADERS: Final = _OWN_LINK | _FRAMING | {"proxy-authenticate", "accept-encoding"}
"""Headers that no operator may put in: requests hang on them."""
_SIZE: Final = re.compile(r"[0-9]{1,15}")


def parse_head(data: bytes, inside: tuple[str, int] | None = None) -> RequestHead:
    """Read the head of a request, its empty line included; *inside* is the host and port of the tunnel it came through.

    Only CONNECT and `http://` targets are understood, inside a tunnel only paths. The header Host must name the target.
    Raises BadHead.
    """
    lines = data.removesuffix(b"\r\n\r\n").decode("latin-1").split("\r\n")
    if not data.endswith(b"\r\n\r\n") or any("\n" in line or "\r" in line or "\0" in line for line in lines):
        raise BadHead("lines must end in CR and LF")
    words = lines[0].split(" ")
    if len(words) != 3 or words[2] not in {"HTTP/1.1", "HTTP/1.0"}:
        raise BadHead("the first line must be METHOD TARGET HTTP/1.1")
    method, target, version = words
    fields = _header_fields(lines[1:])
    try:
        host, port, path = _target(method, target, inside)
        # Clients leave the port out of CONNECT's header, too, when it is that of TLS.
        default = port if method == "CONNECT" else 80 if inside is None else 443
        _check_host(fields, (host, port), default, required=version == "HTTP/1.1")
    except BadHead:
        raise
    except ValueError as error:
        raise BadHead(f"the target {error}") from None
    size = _body_size(fields, version)
    if method == "CONNECT" and size != 0:
        raise BadHead("CONNECT has no body")
    about_link = _OWN_LINK | _named_by_connection(fields) | {"transfer-encoding"}
    passed_on = tuple((name, value) for name, value in fields if name.lower() not in {*about_link, "host"})
    waits = any(name.lower() == "expect" for name, _ in fields) and version == "HTTP/1.1"
    headers = (("Host", authority(host, port, 80 if inside is None else 443)), *passed_on)
    return RequestHead(method, host, port, path, headers, size, waits, version)


def _header_fields(lines: Sequence[str]) -> list[tuple[str, str]]:
    if len(lines) > 100:
        raise BadHead("there are more than 100 headers")
    fields = []
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):  # a folded line has no such name
            raise BadHead("a header is not NAME: VALUE")
        fields.append((name, value.strip(" \t")))
    return fields


def _target(method: str, target: str, inside: tuple[str, int] | None) -> tuple[str, int, str]:
    """Return host, port and path of a request's target. Raises BadHead, ValueError."""
    if method == "CONNECT" and inside is None:
        host, port = split_authority(target)
        if port is None:
            raise BadHead("CONNECT needs HOST:PORT")
        return host, port, ""
    if method not in METHODS:
        raise BadHead("the method is not known")
    if inside is not None:
        host, port, path = *inside, target
    else:
        if target[:7].lower() != "http://":
            raise BadHead("the target must begin with http://; for TLS use CONNECT")
        name, slash, rest = target[7:].partition("/")
        name, question, query = (name, "", "") if slash else name.partition("?")
        host, named_port = split_authority(name)
        port = 80 if named_port is None else named_port
        path = f"/{rest}" if slash else f"/{question}{query}"
    if not _PATH.fullmatch(path):
        raise BadHead("the path holds characters that no path has")
    return host, port, path


def _check_host(fields: Sequence[tuple[str, str]], target: tuple[str, int], default: int, *, required: bool) -> None:
    """Raise BadHead unless there is one header Host, and it names the *target*; without a port it means the *default*."""
    hosts = [value for name, value in fields if name.lower() == "host"]
    if len(hosts) > 1 or (required and not hosts):
        raise BadHead("there must be one header Host")
    for text in hosts:
        name, port = split_authority(text)
        if (name, default if port is None else port) != target:
            raise BadHead("the header Host names another host than the target")


def _body_size(fields: Sequence[tuple[str, str]], version: str) -> int | None:
    """Return how many bytes the body has, None for chunks. Raises BadHead where readers could disagree."""
    sizes = [value for name, value in fields if name.lower() == "content-length"]
    codings = [value for name, value in fields if name.lower() == "transfer-encoding"]
    if codings and (sizes or version != "HTTP/1.1" or [coding.lower() for coding in codings] != ["chunked"]):
        raise BadHead("the body's length is told in more than one way, or in an unknown one")
    if len(sizes) > 1 or any(not _SIZE.fullmatch(size) for size in sizes):
        raise BadHead("the body's length is not one number")
    return None if codings else int(sizes[0]) if sizes else 0


def _named_by_connection(fields: Sequence[tuple[str, str]]) -> frozenset[str]:
    """Return the headers that Connection says are about the link. Raises BadHead when it names one the request hangs on."""
    values = (value for name, value in fields if name.lower() in {"connection", "proxy-connection"})
    names = frozenset(word.strip().lower() for value in values for word in value.split(","))
    if names & _FRAMING:
        raise BadHead("Connection names a header that the request needs")
    return names


class RequestBody:
    """Passes on exactly one body, of *size* bytes or (None) in chunks; `complete` once all of it came."""

    def __init__(self, size: int | None) -> None:
        self._chunked, self._bytes_left = size is None, size or 0
        self._line = b""
        self._state = "size" if size is None else "data"
        self.complete = size == 0

    def feed(self, data: bytes) -> bytes:
        """Return what of *data* belongs to the body, chunks rewritten; what follows is dropped. Raises BadHead."""
        out = bytearray()
        while data and not self.complete:
            if self._state == "data":
                piece, data = data[: self._bytes_left], data[self._bytes_left :]
                out += piece
                self._bytes_left -= len(piece)
                if not self._bytes_left:
                    self._state, self.complete = "after", not self._chunked
                continue
            end = data.find(b"\n") + 1
            self._line, data = self._line + (data[:end] if end else data), data[end:] if end else b""
            if len(self._line) > 18:
                raise BadHead("a chunk's size is too long")
            if end:
                line, self._line = self._line, b""
                out += self._chunk_line(line)
        return bytes(out)

    def _chunk_line(self, line: bytes) -> bytes:
        """Act on a line between chunks, and return it as it is passed on."""
        if self._state == "after" and line == b"\r\n":
            self._state = "size"
            return line
        if self._state == "end" and line == b"\r\n":
            self.complete = True
            return line
        if self._state != "size" or not re.fullmatch(rb"[0-9A-Fa-f]{1,12}\r\n", line):
            raise BadHead("a chunk is not well-formed")  # extensions and trailers neither
        self._bytes_left = int(line, 16)
        self._state = "data" if self._bytes_left else "end"
        return b"%x\r\n" % self._bytes_left


class ResponseHead:
    """Passes on a response, whose head then says that the connection ends with it."""

    def __init__(self) -> None:
        self._head: bytes | None = b""

    def feed(self, data: bytes) -> bytes:
        """Return what of the response can be passed on. Raises BadAnswer."""
        if self._head is None:
            return data
        self._head += data
        out = b""
        while self._head is not None and (end := self._head.find(b"\r\n\r\n")) >= 0:
            first, *lines = self._head[:end].split(b"\r\n")
            if not re.match(rb"HTTP/1\.[01] [1-5][0-9][0-9]", first):
                raise BadAnswer("the server's answer has no status")
            headers = [line for line in lines if line.partition(b":")[0].strip().lower() not in _LINK_BYTES]
            out += b"\r\n".join([first, *headers, b"Connection: close", b"", b""])
            rest = self._head[end + 4 :]
            interim = first[9:10] == b"1"  # the real head is still to come
            self._head = rest if interim else None
            out += b"" if interim else rest
        if self._head is not None and (len(self._head) > 4 * MAX_HEAD or not b"HTTP/1.".startswith(self._head[:7])):
            raise BadAnswer("the server's answer is no HTTP/1")
        return out


_LINK_BYTES: Final = frozenset({b"connection", b"proxy-connection", b"keep-alive"})

"""URLs of sources: one spelling for one place, and which of them may become a link."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

_DEFAULT_PORTS = {"http": "80", "https": "443", "ftp": "21", "ws": "80", "wss": "443"}
_NEED_HOST = frozenset(_DEFAULT_PORTS)
_LINKS = frozenset({"http", "https", "mailto"})
_TRACKING = frozenset({"gclid", "fbclid"})
_EDGE = (
    "".join(map(chr, range(0x21)))
    + "\x7f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000\u200b\ufeff"
    + "".join(map(chr, range(0x2000, 0x200B)))
)
_NOT_IN_URL = re.compile("[\t\r\n]")  # the URL standard drops these wherever they stand
_HAS_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:")
_HOST_PORT = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::([0-9]*))?")
_UNSAFE = re.compile(
    "[\\s\x00-\x20\x7f-\xa0\"'<>()`\\\\|\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202f\u205f-\u206f\ufeff\ud800-\udfff]"
)


@dataclass(frozen=True, slots=True)
class Url:
    """A URL in its stored spelling, whether `https` was added, and whether it does not parse."""

    text: str
    scheme_added: bool = False
    bad: bool = False


def normalize_url(text: str) -> str:
    """Return the stored spelling of a URL; the same for every text already normalised.

    Scheme and host are lower-cased. The scheme's own default port, user info, fragment and the parameters `utm_*`,
    `gclid`, `fbclid` go; the rest of the query stays byte-equal. An empty path is `/`; a single trailing slash goes
    off longer paths, while a path that ends in several is another place and stays. `//host`, `host.tld/…` and
    `www.…` get `https`; any other text without a scheme is a relative path, unchanged. What does not parse stays text.
    """
    return parse_url(text).text


def parse_url(text: str) -> Url:
    """Return what `normalize_url` returns, and whether `https` was added or the text is no URL."""
    trimmed = text.strip(_EDGE)
    bare = _NOT_IN_URL.sub("", trimmed)
    https_added = False
    if not _HAS_SCHEME.match(bare):
        if not _is_host_like(bare):
            return Url(trimmed)
        bare, https_added = "https://" + bare.removeprefix("//"), True
    normal = _normal(bare)
    return Url(trimmed, bad=True) if normal is None else Url(normal, scheme_added=https_added)


def usable_url(text: str | None) -> str | None:
    """Return *text* as the target of a link, or None if it must not become one.

    Only `http`, `https` and `mailto` are usable. Blanks, quotes, `<>()`, backslashes, backticks, bars and controls
    are percent-encoded, so that no URL can end the link it stands in.
    """
    if not text:
        return None
    parsed = parse_url(text)
    scheme, _, target = parsed.text.partition(":")
    if parsed.bad or scheme not in _LINKS or not target:
        return None
    return _UNSAFE.sub(lambda found: quote(found[0], safe="", errors="replace"), parsed.text)


def _is_host_like(text: str) -> bool:
    if text.startswith("//"):
        return len(text) > 2 and text[2] not in "/?#"
    if text[:4].lower() == "www." and text[4:5] not in {"", "/", "."}:
        return True
    host, slash, _ = text.partition("/")
    labels = host.split(".")
    plain = all(label and label.replace("-", "a").replace("_", "a").isalnum() for label in labels)
    return bool(slash) and len(labels) > 1 and plain and labels[-1].isalpha()


def _normal(text: str) -> str | None:
    text = text.partition("#")[0].rstrip(_EDGE)
    try:
        parts = urlsplit(text)
    except ValueError:
        return None
    scheme = parts.scheme
    if not scheme:
        return None
    query = "&".join(p for p in parts.query.split("&") if not _tracks(p.partition("=")[0]))
    path = parts.path
    after = text[len(scheme) + 1 :]
    if not after.startswith("//"):
        if scheme in _NEED_HOST:
            return None
        return f"{scheme}:{path}{'?' + query if query else ''}".rstrip(_EDGE)
    host = _host(parts.netloc, scheme)
    if host is None:
        return None
    query = query.rstrip(_EDGE)
    if not query:
        path = path.rstrip(_EDGE)
    while len(path) > 1 and path.endswith("/") and not path.endswith("//"):
        path = path[:-1] if query else path[:-1].rstrip(_EDGE)  # which may lay the next slash bare
    if not path and host:
        path = "/"
    return f"{scheme}://{host}{path}{'?' + query if query else ''}"


def _tracks(name: str) -> bool:
    return name in _TRACKING or name.startswith("utm_")


def _host(netloc: str, scheme: str) -> str | None:
    """Return host and port in their stored spelling, or None if they do not parse."""
    match = _HOST_PORT.fullmatch(netloc.rpartition("@")[2])
    if match is None:
        return None
    host, port = match[1].strip(_EDGE).lower(), (match[2] or "").lstrip("0") or ("0" if match[2] else "")
    if len(port) > 5 or int(port or "0") > 65535:
        return None
    if not host:
        return None if netloc or scheme in _NEED_HOST else ""
    return host if port in {"", _DEFAULT_PORTS.get(scheme)} else f"{host}:{port}"

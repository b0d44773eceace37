"""Rows of `sources.yaml` made citable: their fields, one spelling for one URL, and a pool of numbers that never change owner.

Of the URLs, those that may become a link are told from the rest.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urlsplit

from kdskills.errors import BadRequest, Diagnostic, Severity

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
    named = [(part, part.partition("=")[0]) for part in parts.query.split("&")]
    query = "&".join(part for part, name in named if name not in _TRACKING and not name.startswith("utm_"))
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


MAX_SID = 999_999_999
"""The largest number a citation can carry."""

MAX_FIELD = 64 * 1024

_MAX_DEPTH = 20
_MOST_BITS = 2_000  # Python always writes numbers of this size, however it is set up

FIELDS = {
    "url": ("url", "href", "value"),
    "physical_path": ("physical_path", "local_path"),
    "title": ("title", "description"),
    "text": ("text", "body", "value_preview"),
}
"""Field of a row: the keys it may be written under, of which the first present counts."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SourceRow(Mapping[str, Any]):
    """One source: a read-only mapping that equals the dict with the same fields.

    It always has `title` and `text`; `url` in its stored spelling, `physical_path` and `sid` when known; and every
    other key its file gave it.
    """

    _fields: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self._fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return f"SourceRow({self._fields!r})"

    @property
    def sid(self) -> int | None:
        """The number it is cited by, or None."""
        return self._fields.get("sid")

    @property
    def title(self) -> str:
        """Its title; the URL or path when it was given none."""
        return str(self._fields["title"])

    @property
    def text(self) -> str:
        """What it says, or `""`."""
        return str(self._fields["text"])

    @property
    def url(self) -> str | None:
        """Its URL in the stored spelling, or None."""
        return self._fields.get("url")

    @property
    def path(self) -> str | None:
        """Its physical path, or None."""
        return self._fields.get("physical_path")

    @property
    def identity(self) -> str:
        """What makes two rows the same source: the URL, else the path."""
        return self.url or self.path or ""

    @property
    def title_is_fallback(self) -> bool:
        """Whether the title is only the URL or path."""
        return self.title in {self.url, self.path}

    def numbered(self, sid: int | None) -> SourceRow:
        """Return the same row under *sid*, first in order, or without a number."""
        fields = {key: value for key, value in self._fields.items() if key != "sid"}
        return SourceRow(fields if sid is None else {"sid": sid, **fields})

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a new dict."""
        return dict(self._fields)


def normalize_sources(value: object) -> tuple[tuple[SourceRow, ...], tuple[Diagnostic, ...]]:
    """Return the rows a `sources.yaml` holds, and what was wrong with it.

    Args:
        value: A list of rows, a `{sid: row}` mapping, or either under `sources` or `items`; also as JSON text.

    Returns:
        The rows in file order, and findings: `source_without_identity`, `source_bad_sid`, `duplicate_sid`,
        `source_bad_url`, `url_scheme_added`, `source_field_too_large`, `source_field_type`, `source_bad_row`,
        `sources_not_rows`. Nothing raises.
    """
    findings: list[Diagnostic] = []
    rows: list[SourceRow] = []
    used_sids: set[int] = set()
    for number, (key, raw) in enumerate(_items(value, findings), start=1):
        row = raw if isinstance(raw, SourceRow) and key is None else _row(key, raw, f"row {number}", findings)
        if row is None:
            continue
        if row.sid is not None and row.sid in used_sids:
            _add(
                findings,
                "duplicate_sid",
                f"row {number}: sid {row.sid} stands twice; the first row has it",
                str(row.sid),
            )
            row = row.numbered(None)
        if row.sid is not None:
            used_sids.add(row.sid)
        rows.append(row)
    return tuple(rows), tuple(findings)


def first_text(row: Mapping[str, Any], field: str) -> str | None:
    """Return a field under the first key that is present, as text, or None."""
    for key in FIELDS[field]:
        text = _text(row.get(key), numbers=field in {"title", "text"})
        if text is not None:
            return text
    return None


def _add(findings: list[Diagnostic], code: str, message: str, ref: str, severity: Severity = "warning") -> None:
    findings.append(Diagnostic(code, severity, message, ref=ref))


def _items(value: object, findings: list[Diagnostic]) -> list[tuple[object, object]]:
    """Return (key of a `{sid: row}` mapping or None, row) pairs."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = object()
    if isinstance(value, Mapping) and not isinstance(value, SourceRow):
        for key in ("sources", "items"):
            if isinstance(value.get(key), (list, tuple, Mapping)):
                value = value[key]
                break
    if value is None:
        return []
    if isinstance(value, Mapping) and not isinstance(value, SourceRow):
        return list(value.items())
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray, SourceRow)):
        return [(None, row) for row in value]
    _add(findings, "sources_not_rows", "sources are a list of rows or a mapping of sid to row", "sources")
    return []


def _row(key: object, raw: object, label: str, findings: list[Diagnostic]) -> SourceRow | None:
    if not isinstance(raw, Mapping):
        _add(findings, "source_bad_row", f"{label} is not a mapping; it is dropped", label)
        return None
    fields = _fields(raw, label, findings)
    sid = _sid(fields.pop("sid", None), key, label, findings)
    ref = label if sid is None else str(sid)
    texts = {name: _take(fields, name, ref, findings) for name in FIELDS}
    url = texts["url"]
    if url is not None:
        parsed = parse_url(url)
        url = parsed.text or None
        if parsed.bad:
            _add(findings, "source_bad_url", f"{label}: the URL does not parse and is kept as text", ref)
        if parsed.scheme_added:
            _add(findings, "url_scheme_added", f"{label}: https was added to the URL", ref, "info")
    identity = url or texts["physical_path"]
    if identity is None:
        _add(findings, "source_without_identity", f"{label} has neither URL nor path; it is dropped", ref)
        return None
    known: dict[str, Any] = {"sid": sid, "title": texts["title"] or identity, "url": url}
    known |= {"physical_path": texts["physical_path"], "text": texts["text"] or ""}
    return SourceRow({name: value for name, value in known.items() if value is not None} | fields)


def _fields(raw: Mapping[Any, Any], label: str, findings: list[Diagnostic]) -> dict[str, Any]:
    """Return the fields of a row as JSON values, without those that are too large."""
    fields: dict[str, Any] = {}
    for raw_key, raw_value in raw.items():
        name = _name(raw_key)
        if name in fields:
            continue
        value = _plain(raw_value, 0)
        json_text = value if isinstance(value, str) else json.dumps(value)
        if len(json_text) > MAX_FIELD or len(json_text.encode("utf-8", "surrogatepass")) > MAX_FIELD:
            _add(findings, "source_field_too_large", f"{label}: {name[:80]!r} is over 64 KiB and is dropped", label)
            continue
        fields[name] = value
    return fields


def _plain(value: Any, depth: int) -> Any:
    """Return *value* as JSON can hold it; what it cannot becomes text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _encodable(value)
    if isinstance(value, int):
        return value if value.bit_length() <= _MOST_BITS else hex(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            return {_name(key): _plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [_plain(item, depth + 1) for item in value]
    return type(value).__name__ if isinstance(value, (Mapping, list, tuple)) else _encodable(str(value))


def _name(key: Any) -> str:
    """Return the key of a mapping as text."""
    return _encodable(key) if isinstance(key, str) else str(_plain(key, _MAX_DEPTH))


def _encodable(text: str) -> str:
    """Return *text* with U+FFFD for halves of characters, which no file and no reply can hold."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _take(fields: dict[str, Any], name: str, ref: str, findings: list[Diagnostic]) -> str | None:
    """Take a field out of *fields* under the first key that is present; other keys stay as they are."""
    text_value = None
    for key in FIELDS[name]:
        value = fields.get(key)
        text = _text(value, numbers=name in {"title", "text"})
        if text is not None and text_value is None:
            text_value = text if name == "text" else text.strip()
            del fields[key]
        elif key in fields and (value is None or (isinstance(value, str) and not value.strip())):
            del fields[key]
    if name in fields:
        _add(findings, "source_field_type", f"{name!r} is not text; it is dropped", ref)
        del fields[name]
    return text_value


def _text(value: object, *, numbers: bool) -> str | None:
    if isinstance(value, str):
        return value if value.strip() else None
    return json.dumps(value) if numbers and isinstance(value, (int, float)) else None


def _sid(field: object, key: object, label: str, findings: list[Diagnostic]) -> int | None:
    """Return the number of a row: the key of its mapping, else its field."""
    key_sid = _number(key)
    field_sid = _number(field)
    if (key is not None and key_sid is None) or (field is not None and field_sid is None):
        _add(findings, "source_bad_sid", f"{label}: a sid is a whole number from 1 to {MAX_SID}", label)
    elif key_sid is not None and field_sid is not None and key_sid != field_sid:
        _add(
            findings, "source_bad_sid", f"{label}: sid {field_sid} stands under the key {key_sid}, which counts", label
        )
    return key_sid if key_sid is not None else field_sid


def _number(value: object) -> int | None:
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdecimal():
        digits = value.strip().lstrip("0")
        value = int(digits) if digits and len(digits) <= 9 else None
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 1 <= value <= MAX_SID else None


def sources_schema() -> dict[str, Any]:
    """Return the JSON Schema of `sources.yaml`; of what it refuses, a finding says which row does not count, or not as written."""
    digits = r"^\s*0*[1-9][0-9]{0,8}\s*$"
    sid = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_SID}, {"type": "string", "pattern": digits}]}
    locators = [*FIELDS["url"], *FIELDS["physical_path"]]
    row = {
        "type": "object",
        "properties": {
            "sid": {"anyOf": [*sid["anyOf"], {"type": "null"}], "description": "The number it is cited by."},
            "url": {"type": ["string", "null"]},
            "physical_path": {"type": ["string", "null"], "description": "Where it lies, when it has no address."},
            "title": {"type": ["string", "number", "boolean", "null"]},
            "text": {"type": ["string", "number", "boolean", "null"], "description": "What it says."},
        },
        "anyOf": [{"required": [key], "properties": {key: {"type": "string", "pattern": r"\S"}}} for key in locators],
    }
    rows: dict[str, Any] = {"type": "array", "items": row}
    by_sid = {"type": "object", "propertyNames": {"pattern": digits}, "additionalProperties": row}
    either = {"anyOf": [rows, by_sid]}
    inside = [{"type": "object", "required": [key], "properties": {key: either}} for key in ("sources", "items")]
    return {"title": "Sources that a skill cites", "anyOf": [rows, *inside, by_sid]}


SourceKey = Callable[[Mapping[str, Any]], str | None]
"""Gives the key under which a row is merged, or None for its URL or path (hook `kdskills_source_key`)."""

_LONGER_WINS = frozenset({"text", "content"})


@dataclass(frozen=True, slots=True)
class MergeResult:
    """What came of merging a file's rows into a pool.

    Attributes:
        pool: The new pool.
        sid_map: The file's sids to the pool's; rows without a sid are not in it.
        added: Numbers issued now, in file order.
        merged: Numbers of prior rows that a row of the file fell onto.
        diagnostics: What was wrong with the rows.
    """

    pool: SourcesPool
    sid_map: Mapping[int, int]
    added: tuple[int, ...]
    merged: tuple[int, ...]
    diagnostics: tuple[Diagnostic, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class SourcesPool:
    """Sources by number. Frozen: merging gives a new pool."""

    _rows: dict[int, SourceRow] = field(default_factory=dict)
    _aliases: dict[int, int] = field(default_factory=dict)
    diagnostics: tuple[Diagnostic, ...] = field(default=(), compare=False)

    @classmethod
    def from_rows(cls, rows: object, *, key: SourceKey | None = None) -> SourcesPool:
        """Build a pool from raw prior rows, in any form `normalize_sources` takes.

        Rows keep their sids. Of several rows of one source the lowest sid has it and the others become aliases.
        What was wrong with the rows stands in `diagnostics`.
        """
        normal, findings = normalize_sources(rows)
        numbered = sorted((row for row in normal if row.sid is not None), key=lambda row: row.sid or 0)
        merged = cls().merge(numbered, key=key)
        aliases = {sid: owner for sid, owner in merged.sid_map.items() if sid != owner}
        pool = cls(dict(merged.pool.rows), aliases)
        rest = [row for row in normal if row.sid is None]
        return replace(pool.merge(rest, key=key).pool if rest else pool, diagnostics=findings)

    @property
    def rows(self) -> Mapping[int, SourceRow]:
        """The rows by sid, ascending; aliases are not in it."""
        return MappingProxyType(self._rows)

    @property
    def aliases(self) -> Mapping[int, int]:
        """Issued sids that stand for the row of another."""
        return MappingProxyType(self._aliases)

    def get(self, sid: int) -> SourceRow | None:
        """Return the row a sid, or an alias, stands for, or None."""
        return self._rows.get(self._aliases.get(sid, sid))

    def merge(self, rows: object, *, key: SourceKey | None = None) -> MergeResult:
        """Add rows in file order.

        A row whose source is known gets that source's sid. Else it keeps its own sid if that was never issued, else
        gets the highest issued + 1. Prior rows keep their sids and never vanish.

        Args:
            rows: Rows in any form `normalize_sources` takes.
            key: Overrides what makes two rows one source.
        """
        normal, findings = normalize_sources(rows)
        by_sid = dict(self._rows)
        owners: dict[str, int] = {}
        for sid, row in by_sid.items():
            owners.setdefault(_key(row, key), sid)
        issued = {*by_sid, *self._aliases}
        highest = max(issued, default=0)
        # A file that claims the last number must not make all later sources uncitable: gaps are filled then.
        free = (sid for sid in count(1) if sid not in issued)
        sid_map: dict[int, int] = {}
        added: list[int] = []
        merged: dict[int, None] = {}
        for row in normal:
            identity = _key(row, key)
            owner = owners.get(identity)
            if owner is None:
                owner = row.sid
                if owner is None or owner in issued:
                    owner = highest + 1 if highest < MAX_SID else next(free)
                owners[identity] = owner
                issued.add(owner)
                highest = max(highest, owner)
                by_sid[owner] = row.numbered(owner)
                added.append(owner)
            else:
                by_sid[owner] = _combined(by_sid[owner], row)
                merged[owner] = None
            if row.sid is not None:
                sid_map[row.sid] = owner
        pool = self if by_sid == self._rows else SourcesPool(dict(sorted(by_sid.items())), self._aliases)
        fresh = set(added)
        return MergeResult(pool, sid_map, tuple(added), tuple(s for s in merged if s not in fresh), findings)

    def to_json(self) -> dict[str, Any]:
        """Return the pool as JSON: `{"rows": [...], "aliases": {"5": 2}}`."""
        rows = [row.to_json() for row in self._rows.values()]
        return {"rows": rows, "aliases": {str(alias): sid for alias, sid in self._aliases.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SourcesPool:
        """Return the pool `to_json` described.

        Raises:
            BadRequest: *data* was not written by `to_json`.
        """
        try:
            raw = list(data["rows"])
            aliases = {int(alias): int(sid) for alias, sid in data["aliases"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadRequest(f"this is no sources pool: {error}") from error
        rows, findings = normalize_sources(raw)
        by_sid = {row.sid: row for row in rows if row.sid is not None}
        sound = len(by_sid) == len(raw) and not any(
            f.severity != "info" for f in findings if f.code != "source_bad_url"
        )
        if not sound or any(sid not in by_sid or alias in by_sid for alias, sid in aliases.items()):
            raise BadRequest("this is no sources pool: its numbers do not fit its rows")
        return cls(dict(sorted(by_sid.items())), aliases)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[SourceRow]:
        return iter(self._rows.values())

    def __contains__(self, sid: object) -> bool:
        return sid in self._rows or sid in self._aliases

    def __repr__(self) -> str:
        return f"SourcesPool({len(self._rows)} rows, {len(self._aliases)} aliases)"


def _key(row: SourceRow, key: SourceKey | None) -> str:
    return (key(row) if key else None) or row.identity


def _combined(prior: SourceRow, new: SourceRow) -> SourceRow:
    """Return the prior row with what the new one knows better: longer texts, a real title, absent fields."""
    fields = prior.to_json()
    changed = False
    for name, value in new.items():
        old = fields.get(name)
        if name == "sid" or value in (None, ""):
            continue
        if name == "title":
            better = not new.title_is_fallback and (prior.title_is_fallback or len(new.title) > len(prior.title))
        elif old in (None, ""):
            better = True
        else:
            better = name in _LONGER_WINS and isinstance(old, str) and isinstance(value, str) and len(value) > len(old)
        if better:
            fields[name] = value
            changed = True
    return SourceRow(fields) if changed else prior

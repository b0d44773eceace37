"""Archives made by hand, field by field, so that each can lie in its own way."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

SKILL = b"---\nname: brief\ndescription: Turns long material into one page.\n---\n\nRead, then write.\n"


@dataclass
class Item:
    """One entry; what is None is told truthfully."""

    name: bytes | str
    data: bytes = b""
    mode: int = 0o100644
    method: int = 0
    flags: int = 0x0800
    size: int | None = None
    packed_size: int | None = None
    crc: int | None = None
    local_name: bytes | None = None
    local_size: int | None = None
    local_crc: int | None = None
    local_flags: int | None = None
    offset: int | None = None
    made_by: int = 3
    attributes: int | None = None
    packed: bytes | None = None
    descriptor: bool = False
    disk: int = 0
    time: int = 0
    extra: bytes = b""


def deflate(data: bytes) -> bytes:
    """Return *data* as a zip packs it."""
    machine = zlib.compressobj(9, zlib.DEFLATED, -15)
    return machine.compress(data) + machine.flush()


def make_zip(
    *items: Item,
    comment: bytes = b"",
    count: int | None = None,
    directory_size: int | None = None,
    directory_offset: int | None = None,
    disk: int = 0,
    prefix: bytes = b"",
    gap: bytes = b"",
) -> bytes:
    """Return an archive of *items* with the end record as told."""
    body, directory = prefix, b""
    for item in items:
        name = item.name.encode() if isinstance(item.name, str) else item.name
        packed = item.packed
        if packed is None:
            packed = deflate(item.data) if item.method == 8 else item.data
        crc = zlib.crc32(item.data) if item.crc is None else item.crc
        size = len(item.data) if item.size is None else item.size
        packed_size = len(packed) if item.packed_size is None else item.packed_size
        offset = len(body) if item.offset is None else item.offset
        flags = item.flags | (8 if item.descriptor else 0)
        local_name = name if item.local_name is None else item.local_name
        local = (
            crc if item.local_crc is None else item.local_crc,
            packed_size,
            size if item.local_size is None else item.local_size,
        )
        local_flags = flags if item.local_flags is None else item.local_flags
        head = (20, local_flags, item.method, item.time, 33)
        body += struct.pack(
            "<4s5H3L2H", b"PK\x03\x04", *head, *((0, 0, 0) if item.descriptor else local), len(local_name), 0
        )
        body += local_name + packed
        if item.descriptor:
            body += struct.pack("<4s3L", b"PK\x07\x08", crc, packed_size, size)
        attributes = item.mode << 16 if item.attributes is None else item.attributes
        directory += struct.pack(
            "<4s6H3L5H2L",
            b"PK\x01\x02",
            (item.made_by << 8) | 20,
            20,
            flags,
            item.method,
            item.time,
            33,
            crc,
            packed_size,
            size,
            len(name),
            len(item.extra),
            0,
            item.disk,
            0,
            attributes,
            offset,
        )
        directory += name + item.extra
    begin = len(body) if directory_offset is None else directory_offset
    total = len(items) if count is None else count
    length = len(directory) if directory_size is None else directory_size
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", disk, disk, total, total, length, begin, len(comment))
    return body + gap + directory + end + comment


@pytest.fixture
def skill() -> bytes:
    """A skill file for a folder called `brief`."""
    return SKILL


@pytest.fixture
def item() -> type[Item]:
    """What makes an entry."""
    return Item


@pytest.fixture
def zipped(tmp_path: Path) -> Callable[..., Path]:
    """Write an archive of items and return its path; keywords as of `make_zip`."""

    def write(*items: Item, **told) -> Path:
        place = tmp_path / f"archive-{len(list(tmp_path.glob('archive-*')))}.zip"
        place.write_bytes(make_zip(*items, **told))
        return place

    return write


@pytest.fixture
def brief(item, skill) -> Item:
    """The skill file in its root folder."""
    return item("brief/SKILL.md", skill)

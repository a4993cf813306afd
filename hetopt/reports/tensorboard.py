"""Scalars in the files that TensorBoard reads.

A file is a sequence of records: the length (uint64), its checksum, the data, their checksum; little-endian, checksums
CRC-32C rotated and shifted (TensorFlow's ``record_writer.h``). The data is a protocol buffer ``Event`` with
``wall_time`` (1, double), ``step`` (2, varint), and either ``file_version`` (3, string) or ``summary`` (5), which holds
``value`` (1) with ``tag`` (1, string) and ``simple_value`` (2, float). That is little enough to write by hand, and
spares a run the packages that writing it otherwise takes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import cache

from hetopt.reports.scalars import Scalar

_POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
_DOUBLE, _FLOAT, _BYTES, _VARINT = 1, 5, 2, 0


def event_file(figures: Iterable[Scalar]) -> bytes:
    """The bytes of an event file with these figures."""
    parts = [_record(_field(1, _DOUBLE, struct.pack("<d", 0.0)) + _string(3, "brain.Event:2"))]
    parts += [_record(_event(one)) for one in figures]
    return b"".join(parts)


def tag(one: Scalar) -> str:
    """Such as ``compute_seconds/0 h0``: TensorBoard groups by what comes before the stroke."""
    return f"{one.name}/{' '.join(value for _, value in one.labels)}" if one.labels else one.name


def _event(one: Scalar) -> bytes:
    value = _string(1, tag(one)) + _field(2, _FLOAT, struct.pack("<f", one.value))
    summary = _message(1, value)
    time = _field(1, _DOUBLE, struct.pack("<d", one.time_s))
    return time + _field(2, _VARINT, _varint(one.step)) + _message(5, summary)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _masked(data: bytes) -> bytes:
    crc = _crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)


def _crc32c(data: bytes) -> int:
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@cache
def _table() -> tuple[int, ...]:
    rows = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ _POLYNOMIAL if number & 1 else number >> 1
        rows.append(number)
    return tuple(rows)


def _field(number: int, kind: int, data: bytes) -> bytes:
    return _varint(number << 3 | kind) + data


def _message(number: int, data: bytes) -> bytes:
    return _field(number, _BYTES, _varint(len(data)) + data)


def _string(number: int, text: str) -> bytes:
    return _message(number, text.encode())


def _varint(number: int) -> bytes:
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])

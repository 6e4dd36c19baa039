"""Reads TensorBoard's event files with nothing but the formats: TFRecord, CRC-32C, and protobuf's wire format."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

CASTAGNOLI = 0x82F63B78  # reflected


class Value(NamedTuple):
    tag: str
    step: int
    value: float


def values(folder: Path) -> list[Value]:
    """Return all values of the event files in a folder, in order. Raises AssertionError if a file is invalid."""
    files = sorted(folder.glob("events.out.tfevents.*"))
    assert files
    found = []
    for file in files:
        events = [fields(record) for record in records(file.read_bytes())]
        assert events[0][3][0] == b"brain.Event:2"  # file_version
        for event in events[1:]:
            step = event.get(2, [0])[0]
            assert struct.unpack("<d", event[1][0])[0] > 1e9  # wall_time
            found += [_value(fields(each), step) for each in fields(event[5][0])[1]]
    return found


def records(raw: bytes) -> Iterator[bytes]:
    """Yield the records of a TFRecord file: length, masked CRC of the length, data, masked CRC of the data."""
    at = 0
    while at < len(raw):
        head = raw[at : at + 8]
        (length,), (head_crc,) = struct.unpack("<Q", head), struct.unpack("<I", raw[at + 8 : at + 12])
        data = raw[at + 12 : at + 12 + length]
        (data_crc,) = struct.unpack("<I", raw[at + 12 + length : at + 16 + length])
        assert (masked(head), masked(data)) == (head_crc, data_crc), "a checksum is wrong"
        yield data
        at += 16 + length


def masked(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (CASTAGNOLI if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def fields(message: bytes) -> dict[int, list[Any]]:
    """Parse a protobuf message: integers, and the bytes of all other fields, by field number."""
    found: dict[int, list[Any]] = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(message, at)
        else:
            size = {1: 8, 5: 4}.get(wire)
            if size is None:
                assert wire == 2
                size, at = _varint(message, at)
            value, at = message[at : at + size], at + size
        found.setdefault(number, []).append(value)
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _value(message: dict[int, list[Any]], step: int) -> Value:
    """Parse a Summary.Value: tag 1, simple_value 2."""
    return Value(message[1][0].decode(), step, struct.unpack("<f", message[2][0])[0])

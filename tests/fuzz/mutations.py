"""Hostile bytes and hostile JSON, as strategies of Hypothesis: damaged valid files, and files made to do harm."""

import copy
import gzip
import json
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

Strategy = st.SearchStrategy
NUMBERS = (0, 1, 2, 7, 127, 128, 255, 256, 32767, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1)
TEXTS = (
    "", " ", "\0", "nan", "inf", "-1", "1e400", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "a\nb", "\r\x08",
    "<script>alert(1)</script>", "&lt;", '"><img src=x onerror=alert(1)>', "$\\frac{", "%s%n", "{0}", "../../etc", "é",
    "\u202eabc", "\ud800", "\U0001f600", "x" * 5000, "=1+1", "__class__",
)  # fmt: skip
DEEP = 3000  # deeper than Python's stack


def mutated(seeds: Sequence[bytes], most: int = 6) -> "Strategy[bytes]":
    """Draw one of the seeds, damaged in up to `most` places; sometimes undamaged."""
    return st.builds(_mutate, st.sampled_from(list(seeds)), st.lists(_change(seeds), max_size=most))


def gzipped(content: "Strategy[bytes]") -> "Strategy[bytes]":
    """Draw the content unchanged, gzipped, gzipped and then damaged, or followed by a decompression bomb."""
    zipped = content.map(lambda each: gzip.compress(each, 1))
    damaged = st.builds(_mutate, zipped, st.lists(_change([BOMB]), min_size=1, max_size=3))
    return st.one_of(content, zipped, damaged, zipped.map(lambda each: each + BOMB))


BOMB = gzip.compress(bytes(1 << 20))


def _change(seeds: Sequence[bytes]) -> "Strategy[tuple[str, int, int, bytes]]":
    piece = st.one_of(st.binary(max_size=8), st.sampled_from(list(seeds)), st.sampled_from(_numbers()))
    return st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 1 << 20), st.integers(0, 255), piece)


def _numbers() -> list[bytes]:
    return [
        (number & (256**size - 1)).to_bytes(size, order)
        for number in NUMBERS
        for size in (1, 2, 4, 8)
        for order in ("little", "big")
    ]


CHANGES: dict[str, Callable[[bytes, int, int, bytes], bytes]] = {  # of a text at a place, by a value or a piece
    "flip": lambda text, at, value, _: text[:at] + _flipped(text[at : at + 1], value % 8) + text[at + 1 :],
    "set": lambda text, at, value, _: text[:at] + bytes([value]) + text[at + 1 :],
    "insert": lambda text, at, _, piece: text[:at] + piece + text[at:],
    "delete": lambda text, at, value, _: text[:at] + text[at + value :],
    "repeat": lambda text, at, value, _: text[: at + value] + text[at:],
    "cut": lambda text, at, *_: text[:at],
    "number": lambda text, at, _, piece: text[:at] + piece[:8] + text[at + len(piece[:8]) :],
    "splice": lambda text, at, _, piece: text[:at] + piece[at % (len(piece) + 1) :],
    "zeros": lambda text, at, value, _: text[:at] + bytes(value * 16) + text[at + value :],
}


def _flipped(text: bytes, bit: int) -> bytes:
    return bytes(each ^ (1 << bit) for each in text)


def _mutate(content: bytes, changes: Sequence[tuple[str, int, int, bytes]]) -> bytes:
    for kind, place, value, piece in changes:
        content = CHANGES[kind](content, place % (len(content) + 1), value, piece)
    return content


# JSON


def values() -> "Strategy[Any]":
    """Draw a JSON value that may replace any other."""
    plain = st.one_of(
        st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(NUMBERS).map(lambda each: -each),
        st.sampled_from((0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), -float("inf"), 10**40, 10**400)),
        st.sampled_from(TEXTS), st.text(max_size=8), st.floats(),
    )  # fmt: skip
    nested = st.recursive(plain, lambda inside: st.lists(inside, max_size=3) | st.dictionaries(_keys(), inside))
    return st.one_of(plain, nested, st.just([]), st.just({}), st.just([0] * 3000))


def _keys() -> "Strategy[str]":
    return st.sampled_from((*TEXTS, "format", "cpu", "cores"))


def trees(seeds: Sequence[Any], most: int = 4) -> "Strategy[Any]":
    """Draw one of these JSON values, with up to `most` of its parts replaced, removed, doubled or renamed."""
    change = st.tuples(
        st.sampled_from(("replace", "replace", "replace", "remove", "double", "rename")),
        st.integers(0, 1 << 20),
        values(),
        _keys(),
    )
    return st.builds(_grow, st.sampled_from(list(seeds)), st.lists(change, max_size=most))


def _grow(tree: Any, changes: Sequence[tuple[str, int, Any, str]]) -> Any:
    tree = copy.deepcopy(tree)
    for kind, place, value, key in changes:
        found = _places(tree) if isinstance(tree, dict | list) else []
        if not found:
            return copy.deepcopy(value)
        holder, name = found[place % len(found)]
        if kind == "replace":
            holder[name] = copy.deepcopy(value)
        elif kind == "remove":
            del holder[name]
        elif isinstance(holder, list):
            holder.extend(copy.deepcopy(holder[name : name + 1]) * 3)
        elif kind == "rename":
            holder[key] = holder.pop(name)
        else:
            holder[f"{name}{key}"] = holder[name]
    return tree


def _places(tree: Any, limit: int = 2000) -> list[tuple[Any, Any]]:
    """Return the paths of a tree's parts, those near the root first."""
    places, row = [], [tree]
    while row and len(places) < limit:
        inside = []
        for holder in row:
            names = list(holder) if isinstance(holder, dict) else range(len(holder))
            places += [(holder, name) for name in names]
            inside += [holder[name] for name in names if isinstance(holder[name], dict | list)]
        row = inside
    return places


def texts(seeds: Sequence[Any]) -> "Strategy[bytes]":
    """Draw JSON texts of such trees; some damaged, in another encoding, with repeated keys, or too deep."""
    text = trees(seeds).map(_dumped)
    whole = [json.dumps(seed).encode() for seed in seeds]
    return st.one_of(
        text,
        text,
        text,
        mutated(whole),
        st.builds(_mutate, text, st.lists(_change(whole), max_size=3)),
        st.builds(lambda made, way: way(made), text, st.sampled_from(ENVELOPES)),
    )


def _dumped(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def _deep(opening: bytes) -> Callable[[bytes], bytes]:
    return lambda text: opening * DEEP + text


ENVELOPES: tuple[Callable[[bytes], bytes], ...] = (
    lambda text: b"\xef\xbb\xbf" + text,
    lambda text: text.decode().encode("utf-16"),
    lambda text: text.decode().encode("utf-32"),
    lambda text: text + b"\xff\xfe",
    lambda text: text + text,
    lambda text: b" " * 10000 + text,
    lambda text: text.replace(b"{", b'{"format": 1, "entries": [], "results": [],', 1),
    lambda text: text.replace(b"}", b', "format": 2, "ranks": 1e999, "task": {}}', 1),
    lambda text: text.replace(b"1", b"9" * 5000, 1),
    _deep(b"["),
    _deep(b'{"a":'),
)

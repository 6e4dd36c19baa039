"""Two levels of "shared": chunks of whole pages, and the NUMA node of a process."""

import os
from itertools import pairwise
from pathlib import Path

import pytest

from allreduce.arrays.chunks import page_chunk
from allreduce.machine import numa_node

PAGE = 4096


@pytest.mark.parametrize("length", [0, 1, 1023, 1024, 1025, 100_003])
@pytest.mark.parametrize("offset", [0, 4, 2048, 4092])
@pytest.mark.parametrize("itemsize", [1, 4, 8])
@pytest.mark.parametrize("parts", [1, 3, 64])
def test_chunks_of_pages(length: int, offset: int, itemsize: int, parts: int) -> None:
    found = [page_chunk(length, parts, index, itemsize, offset, PAGE) for index in range(parts)]
    assert (found[0].start, found[-1].stop) == (0, length)
    assert all(before.stop == after.start for before, after in pairwise(found))
    inner = {each.stop for each in found[:-1]} - {0, length}
    assert all(0 <= (offset + stop * itemsize) % PAGE < itemsize for stop in inner), "a page has one owner"
    pages = -(-(offset + length * itemsize) // PAGE)
    assert max(each.stop - each.start for each in found) <= -(-pages // parts) * PAGE / itemsize + 1


@pytest.mark.parametrize(
    ("mine", "node"),
    [({0}, 0), ({2, 3, 9}, 0), ({4, 7}, 1), ({11}, 1), ({3, 4}, -1), ({12}, -1), (set(range(12)), -1)],
)
def test_numa_node(mine: set[int], node: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, cores in enumerate(("0-3,8-9", "4-7,10,11", "")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: mine)
    assert numa_node(str(tmp_path)) == node


def test_numa_node_is_unknown(tmp_path: Path) -> None:
    assert numa_node(str(tmp_path / "missing")) == -1
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text("what?\n")
    assert numa_node(str(tmp_path)) == -1

"""A few inputs for each reader of files and messages; `python -m tests.fuzz` reads a hundred thousand."""

from pathlib import Path

import pytest

from tests.fuzz.layouts import ENDLESS, PIPE, SPARSE
from tests.fuzz.readers import READERS
from tests.fuzz.running import Count, Reader, judge, limited, run

INPUTS, SEED = 50, 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_hostile_inputs(reader: Reader, tmp_path: Path) -> None:
    count = run(reader, max(round(INPUTS * reader.share), 3), SEED, tmp_path)
    assert not count.others, "\n\n".join(count.others.values())
    assert count.accepted + count.refused == count.inputs > 0


@pytest.mark.parametrize("kind", [PIPE, ENDLESS, SPARSE])
@pytest.mark.parametrize("reader", [reader for reader in READERS if reader.laid], ids=lambda reader: reader.name)
def test_what_is_no_file_is_refused(reader: Reader, kind: str, tmp_path: Path) -> None:
    """Before it is read: a pipe has no end, and a sparse file does not fit the memory."""
    assert reader.laid is not None
    if kind == SPARSE:
        count = Count()
        judge(reader, reader.laid(kind), tmp_path, count)
        assert count.refused, count.others
        return
    with pytest.raises(reader.errors, match="not a regular file"), limited():
        reader.read(reader.laid(kind), tmp_path)

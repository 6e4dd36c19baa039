"""A few inputs for each reader of files and messages; `python -m tests.fuzz` reads a hundred thousand."""

import re
from pathlib import Path

import pytest

from tests.fuzz.examples import WHOLE, examples
from tests.fuzz.layouts import ENDLESS, PIPE, SPARSE
from tests.fuzz.readers import READERS
from tests.fuzz.running import Count, Reader, judge, limited, run

INPUTS, SEED = 50, 1
BY_NAME = {reader.name: reader for reader in READERS}
EXAMPLES = examples()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_hostile_inputs(reader: Reader, tmp_path: Path) -> None:
    count = run(reader, max(round(INPUTS * reader.share), 3), SEED, tmp_path)
    assert not count.others, "\n\n".join(count.others.values())
    assert count.accepted + count.refused == count.inputs > 0


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(("reader", "example"), [(name, each) for name, some in EXAMPLES.items() for each in some])
def test_examples_are_refused(reader: str, example: str, tmp_path: Path) -> None:
    count, (value, words) = Count(), EXAMPLES[reader][example]
    said = judge(BY_NAME[reader], value(), tmp_path, count)
    assert count.refused, count.others
    assert re.search(words, said), said


@pytest.mark.parametrize("reader", WHOLE)
def test_what_the_examples_are_made_of_is_accepted(reader: str, tmp_path: Path) -> None:
    BY_NAME[reader].read(WHOLE[reader](), tmp_path)


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

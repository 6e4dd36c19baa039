"""A few inputs for each reader of files and messages; `python -m tests.fuzz` reads a hundred thousand."""

from pathlib import Path

import pytest

from tests.fuzz.readers import READERS
from tests.fuzz.running import Reader, run

INPUTS, SEED = 50, 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_hostile_inputs(reader: Reader, tmp_path: Path) -> None:
    count = run(reader, max(round(INPUTS * reader.share), 3), SEED, tmp_path)
    assert not count.others, "\n\n".join(count.others.values())
    assert count.accepted + count.refused == count.inputs > 0

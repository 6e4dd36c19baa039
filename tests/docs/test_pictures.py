"""The pictures of the documentation are those that docs/pictures draws from the code as it is."""

import os
import subprocess
import sys
from pathlib import Path

from tests import launch

PICTURES = launch.ROOT / "docs" / "pictures"


def test_the_pictures_are_up_to_date(tmp_path: Path) -> None:
    env = {**os.environ, "ALLREDUCE_ALONE": "1"}
    subprocess.run([sys.executable, PICTURES, tmp_path], check=True, env=env, timeout=60)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(drawn) > 10
    there = {name: (PICTURES / name).read_text() for name in drawn if (PICTURES / name).exists()}
    assert there == drawn, "python docs/pictures draws them again"

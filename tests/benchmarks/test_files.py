"""Result files: saved, read and compared; never left half-written."""

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.lib import outputs
from benchmarks.lib.results import Run, from_json, to_json
from tests.benchmarks.made_runs import made_run

Compared = Callable[..., tuple[int, str, str]]


@pytest.fixture
def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Compared:
    """`compared(run, ...)`: the exit code and the output of a comparison of made_run(), in a.json, with b.json."""

    def compare_with(after: Run, *options: str) -> tuple[int, str, str]:
        paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
        for path, run in zip(paths, (made_run(), after), strict=True):
            Path(path).write_text(to_json(run, "said"))
        return compare.main([*paths, *options]), *capsys.readouterr()

    return compare_with


def test_json_and_back() -> None:
    run = made_run()
    run.compress = "bfloat16"
    text = to_json(run, "an advice")
    assert from_json(text) == run
    assert json.loads(text)["advice"] == "an advice"
    assert from_json(text.replace(',\n "compress": "bfloat16"', "")) == made_run(), "files of earlier versions"


def test_compare_finds_a_regression(compared: Compared) -> None:
    code, told, _ = compared(made_run())
    assert (code, "no regression beyond 10%" in told) == (0, True)
    code, told, _ = compared(made_run(slower=1.3))
    assert code == 1
    assert "ring, foreign arrays, all sizes: 1.30x the time on average" in told
    assert "native" not in told[told.index("regressions beyond") :]
    assert compared(made_run(slower=1.3), "--threshold", "35%")[0] == 0
    assert compared(made_run(slower=0.7))[0] == 0


def test_compare_forgives_noise_that_left_the_minimum_alone() -> None:
    before, after = made_run(), made_run()
    after.results[0] = replace(after.results[0], time_us=after.results[0].time_us * 1.5)
    assert [each.slower(0.1) for each in compare.ratios(before, after)].count(True) == 0
    after.results[0] = replace(after.results[0], min_us=after.results[0].min_us * 1.5)
    assert [each.slower(0.1) for each in compare.ratios(before, after)].count(True) == 1


def test_compare_tells_of_other_conditions_and_of_what_is_gone_or_wrong(compared: Compared) -> None:
    run = made_run(ranks=2)
    run.machine["cpu"] = "another"
    warnings = compared(run)[2]
    assert "cpu: Made Up CPU <1> before, another after" in warnings
    assert "4 ranks on 1 node before, 2 ranks on 1 node after" in warnings
    run = made_run()
    run.results = [each for each in run.results if each.backend != "gloo"]
    run.results[0] = replace(run.results[0], wrong=5)
    code, told, warnings = compared(run)
    assert code == 1
    assert warnings.count("only in") == 1
    assert "a.json: gloo, foreign arrays, 13 sizes" in warnings
    assert "# 1 regression beyond 10%:\n#   ring, arrays from allocate(), 8 B: 5 wrong elements" in told


def test_compare_refuses_what_it_cannot_compare(
    compared: Compared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for other in ({"dtype": "float64"}, {"op": "max"}, {"compress": "int8"}):
        code, _, told = compared(replace(made_run(), **other))
        assert (code, "float32 sum, compress=None can't be compared with " in told) == (2, True)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "text.txt").write_text("words")
    for name, reason in {
        "none.json": " can't be read (No such file or directory)",
        "": " can't be read (Is a directory)",
        "picture.png": ": it is not text",
        "text.txt": ": it is not JSON (Expecting value: line 1 column 1 (char 0))",
    }.items():
        assert compare.main([str(tmp_path / "a.json"), str(tmp_path / name)]) == 2
        told = capsys.readouterr().err
        wanted = "give a file that python -m benchmarks.bandwidth --json FILE wrote"
        assert told == f"benchmarks.compare: error: {tmp_path / name}{reason}; {wanted}\n"
    with pytest.raises(SystemExit, match="2"):
        compare.main(["a", "b", "--threshold", "much"])


def test_write_replaces_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    outputs.write(path, "old")
    outputs.write(path, b"new")
    assert path.read_text() == "new"
    with pytest.raises(TypeError):
        outputs.write(path, 7)  # type: ignore[arg-type]
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_dash_is_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert outputs.unwritable("-") is None
    outputs.write("-", "content\n")
    outputs.Screen(True, "-", "a command").write_record({"a": 1})
    assert capsys.readouterr().out == 'content\n{\n "a": 1\n}\n'
    assert not list(tmp_path.iterdir())


def test_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    """`--json /dev/null` as root must not make /dev/null a file."""
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "there" / "file")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for path in (link, pipe):
            assert outputs.unwritable(str(path)) is None
            outputs.write(path, "content")
        assert os.read(reader, 99) == b"content"
    finally:
        os.close(reader)
    assert link.is_symlink()
    assert (tmp_path / "there" / "file").read_text() == "content"
    assert stat.S_ISFIFO(pipe.stat().st_mode)

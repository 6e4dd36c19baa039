"""Result files: saved, read and compared; never left half-written."""

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.lib import outputs
from benchmarks.lib.results import from_json, to_json
from tests.benchmarks.made_runs import made_run


def save(path: Path, **options: float) -> Path:
    path.write_text(to_json(made_run(**options), "said"))  # type: ignore[arg-type]
    return path


def test_json_and_back() -> None:
    run = made_run()
    assert from_json(to_json(run, "an advice")) == run
    assert json.loads(to_json(run, "an advice"))["advice"] == "an advice"


def test_compare_equal_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([str(save(tmp_path / "a.json")), str(save(tmp_path / "b.json"))]) == 0
    assert "no regression beyond 10%" in capsys.readouterr().out


def test_compare_finds_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(save(tmp_path / "a.json")), str(save(tmp_path / "b.json", slower=1.3))]
    assert compare.main(files) == 1
    told = capsys.readouterr().out
    assert "ring, foreign arrays, all sizes: 1.30x the time on average" in told
    assert "native" not in told[told.index("regressions beyond") :]
    assert compare.main([*files, "--threshold", "35%"]) == 0
    assert compare.main([*reversed(files)]) == 0  # faster is no regression


def test_compare_forgives_noise_that_left_the_minimum_alone() -> None:
    before, after = made_run(), made_run()
    after.results[0] = replace(after.results[0], time_us=after.results[0].time_us * 1.5)
    assert [each.slower(0.1) for each in compare.ratios(before, after)].count(True) == 0
    after.results[0] = replace(after.results[0], min_us=after.results[0].min_us * 1.5)
    assert [each.slower(0.1) for each in compare.ratios(before, after)].count(True) == 1


def test_compare_warns_of_other_conditions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(ranks=2)
    run.machine["cpu"] = "another"
    other = tmp_path / "b.json"
    other.write_text(to_json(run))
    compare.main([str(save(tmp_path / "a.json")), str(other)])
    warnings = capsys.readouterr().err
    assert "cpu: Made Up CPU <1> before, another after" in warnings
    assert "4 ranks on 1 node before, 2 ranks on 1 node after" in warnings


def test_compare_tells_what_is_gone_and_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run()
    run.results = [each for each in run.results if each.backend != "gloo"]
    run.results[0] = replace(run.results[0], wrong=5)
    (tmp_path / "b.json").write_text(to_json(run))
    before = save(tmp_path / "a.json")
    assert compare.main([str(before), str(tmp_path / "b.json")]) == 1
    told = capsys.readouterr()
    assert f"warning: only in {before}: gloo, foreign arrays, 13 sizes" in told.err
    assert told.err.count("only in") == 1
    assert "# 1 regression beyond 10%:\n#   ring, arrays from allocate(), 8 B: 5 wrong elements" in told.out


def test_compare_refuses_what_it_cannot_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for other in ({"dtype": "float64"}, {"op": "max"}, {"compress": "int8"}):
        (tmp_path / "b.json").write_text(to_json(replace(made_run(), **other)))
        assert compare.main([str(save(tmp_path / "a.json")), str(tmp_path / "b.json")]) == 2
        assert "float32 sum, compress=None can't be compared with " in capsys.readouterr().err
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "text.txt").write_text("words")
    for name, reason in {
        "none.json": " can't be read (No such file or directory)",
        "": " can't be read (Is a directory)",
        "picture.png": ": it is not text",
        "text.txt": ": it is not JSON (Expecting value: line 1 column 1 (char 0))",
    }.items():
        capsys.readouterr()
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

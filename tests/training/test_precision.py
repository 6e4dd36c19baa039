"""precision="bfloat16": the notice of processors that compute slowly with it. Its trainings: tests/ranks/pytorch."""

from pathlib import Path

import pytest

from trainers.replicas import precision


@pytest.mark.parametrize(
    ("flags", "slow"),
    [("fpu avx2 avx512f", True), ("avx512f avx512_bf16", False), ("asimd bf16", False), (None, False)],
)
def test_a_slow_processor_is_reported(
    flags: str | None, slow: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(precision, "CPUINFO", tmp_path / "cpuinfo")
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"flags\t: {flags}\n")
    assert precision.slow_notice("cpu") == ((precision.SLOW,) if slow else ())
    assert precision.slow_notice("cuda") == ()

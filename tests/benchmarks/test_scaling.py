"""benchmarks.scaling: each formula against its paper, the fit against known constants, the command line."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from allreduce.algorithms import class_of
from allreduce.algorithms.shared import IN_CACHE
from allreduce.transport.cost import Layout, Machine
from benchmarks import scaling
from benchmarks.lib.results import FileError, Run, summarize, to_json
from benchmarks.predicting import fitting
from benchmarks.predicting.costs import backends, predict
from benchmarks.predicting.fitting import FITTED, Point
from benchmarks.predicting.forecast import MODELS, Prediction, exposed, forecast, saturation
from tests import launch

FREE = Machine(**dict.fromkeys(FITTED, 0.0))
MIB = float(1 << 20)


def count(name: str, constant: str, at: Layout, s: float, allocated: bool = True) -> float:
    """Return how often a formula uses a constant: its value when all other constants are 0."""
    return predict(name, replace(FREE, **{constant: 1.0}), at, s, allocated)


@pytest.mark.parametrize(("n", "power", "extra"), [(2, 2, 0), (4, 4, 0), (8, 8, 0), (5, 4, 1), (7, 4, 1), (64, 64, 0)])
def test_halving_doubling(n: int, power: int, extra: int) -> None:
    at, s = Layout((n,)), 1024.0
    assert count("halving_doubling", "alpha", at, s) == 2 * (power.bit_length() - 1) + 2 * extra
    assert count("halving_doubling", "beta", at, s) == pytest.approx(2 * s * (power - 1) / power + 2 * s * extra)
    assert count("halving_doubling", "gamma", at, s) == pytest.approx(s * (power - 1) / power + s * extra)
    assert count("halving_doubling", "beta", replace(at, half=True), s) == 2 * count("halving_doubling", "beta", at, s)


def test_reduce_to_one_burdens_the_root() -> None:
    at, s = Layout((8,)), 1000.0
    assert count("reduce_to_one", "gamma", at, s) == 7 * s
    assert count("reduce_to_one", "beta", at, s) == 7 * s + 3 * s  # and a tree of three levels
    assert count("reduce_to_one", "alpha", at, s) == 7 + 3


@pytest.mark.parametrize("n", [2, 4, 6])
def test_shared(n: int) -> None:
    at, s = Layout((n,)), 1000.0
    rounds = int(np.ceil(np.log2(n)))
    assert count("shared", "alpha", at, s) == count("shared", "beta", at, s) == 0, "no messages"
    assert count("shared", "copy", at, s) == 0, "nothing staged"
    assert count("shared", "fence", at, s) == 2 * rounds
    assert count("shared", "gamma", at, s) == pytest.approx(s * (n - 1) / n)
    cached = pytest.approx(2 * (n - 1) / n * s * IN_CACHE)
    assert count("shared", "copy", at, s, allocated=False) == cached, "staged: there and back in the caches"
    assert count("shared", "fence", at, s, allocated=False) == 3 * rounds
    long = 16 * MIB
    assert count("shared", "copy", at, long, allocated=False) == pytest.approx(2 * (n - 1) / n * long), "by CMA"
    staged = replace(at, cma=False)
    assert count("shared", "copy", staged, long, allocated=False) == 2 * long
    assert count("shared", "fence", staged, long, allocated=False) == (2 + 2 * n) * rounds, "two for each of n pieces"
    assert count("shared", "fence", staged, 16 * MIB, allocated=False) == (2 + 2 * n) * rounds, "n pieces"


@pytest.mark.parametrize(("sizes", "factor"), [((2, 2), 1.0), ((4,) * 4, 1.5), ((8,) * 16, 30 / 16), ((3, 1), 1.0)])
def test_hierarchical_copy_loads_each_link_as_few_ranks_as_there_are_nodes(
    sizes: tuple[int, ...], factor: float
) -> None:
    """2 S (m - 1) / m, however many ranks a node has."""
    assert count("hierarchical_copy", "net_beta", Layout(sizes), 1000.0) == pytest.approx(factor * 1000.0)


def test_links_of_flat_algorithms() -> None:
    at, s = Layout((4, 4)), 1000.0
    assert count("ring", "net_beta", at, s) == pytest.approx(2 * s * 7 / 8), "one rank of a node sends out of it"
    assert count("halving_doubling", "net_beta", at, s) == pytest.approx(2 * 4 * s / 8), (
        "all four at once, an eighth each"
    )
    assert count("reduce_to_one", "net_beta", at, s) == pytest.approx(4 * s + s), "four come, the tree crosses once"
    assert count("halving_doubling", "net_beta", Layout((3, 1)), s) == pytest.approx(2 * (s / 2 + 2 * s / 4)), (
        "ranks 2 and 3 are on two nodes"
    )


@pytest.mark.parametrize("name", backends())
@pytest.mark.parametrize("allocated", [True, False])
def test_limits(name: str, allocated: bool) -> None:
    machine = Machine()
    assert predict(name, machine, Layout((1,)), 1e6, allocated) == 0, "nothing to do alone"
    assert predict(name, machine, Layout((4,)), 0, allocated) == 0
    sizes = [predict(name, machine, Layout((4,)), size, allocated) for size in np.geomspace(8, 1e9, 60)]
    assert all(more >= less > 0 for less, more in pairwise(sizes)), "monotonic in the bytes"
    ranks = [predict(name, machine, Layout((n,)), 1e6, allocated) for n in (2, 4, 8, 16)]
    assert ranks == sorted(ranks), "monotonic in the ranks"
    slower = [predict(name, machine, Layout((8,), cores=cores), 1e6, allocated) for cores in (8, 4, 2)]
    assert slower == sorted(slower), "ranks that share cores are slower"
    assert slower[0] < slower[-1]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="cost of 'nccl' is not known"):
        predict("nccl", Machine(), Layout((2,)), 8)
    with pytest.raises(ValueError, match="one node only"):
        predict("shared", Machine(), Layout((2, 2)), 8)


def test_ring_across_nodes_is_paced_by_the_link_the_core_or_a_single_segment() -> None:
    at, slow = Layout((1,) * 4), replace(FREE, net_beta=8e-9, net_alpha=1e-4)
    long, short = 4 * 16.0 * MIB, 4 * 0.5 * MIB  # a chunk of 16 segments, and one of half a segment
    assert predict("ring", replace(slow, gamma=1e-10), at, long) == pytest.approx(6 * 16 * MIB * 8e-9), "all hidden"
    assert predict("ring", slow, at, short) == pytest.approx(6 * (1e-4 + 0.5 * MIB * 8e-9)), "every step pays in full"
    assert predict("ring", replace(slow, gamma=1e-6), at, long) == pytest.approx(3 / 4 * long * 1e-6), "the core"


def test_ranks_that_share_a_core_take_turns() -> None:
    turns = [predict("ring", replace(FREE, switch=1.0), Layout((n,), cores=2), 8) for n in (2, 3, 4, 5, 8)]
    assert turns == [0, 4, 6, 16, 42], "2 (n - 1) steps, a turn of each other rank on the fullest core"
    assert predict("shared", replace(FREE, gamma=1.0), Layout((3,), cores=2), 3.0) == 2 * 2.0, "two ranks on one core"


# ---- The fit ----

TRUE = Machine(
    call=9e-6, alpha=7e-6, handshake=6e-6, beta=2.5e-10, gamma=8e-11, copy=1.2e-10, fence=4e-6, switch=3e-5,
    native_alpha=2e-6, native=1.5, net_alpha=5e-5, net_beta=6e-9,
)  # fmt: skip
LAYOUTS = [Layout((n,), cores=2) for n in (2, 3, 4, 5, 8)] + [
    Layout(sizes, cores=2, sharing=sum(sizes)) for sizes in ((2, 2), (1, 1), (3, 1))
]


def made_points(noise: float, places: list[Layout] = LAYOUTS) -> list[Point]:
    generator, points = np.random.default_rng(1), []
    for at in places:
        for name in backends():
            for size in (8, 512, 8192, 1 << 17, 1 << 20, 1 << 23, 1 << 26):
                if name != "shared" or at.nodes == 1:
                    seconds = predict(name, TRUE, at, size) * np.exp(generator.normal(0, noise))
                    points.append(Point(name, at, size, True, seconds))
    return points


def test_fit_recovers_constants_that_made_the_data() -> None:
    fitted = fitting.fit(made_points(0.0), Machine())
    for name in (name for name in FITTED if name != "call"):
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name), rel=0.15), name
    assert fitting.median_error(made_points(0.0), fitted) < 0.02


def test_fit_stands_noise_and_outliers() -> None:
    points = made_points(0.1)
    points[::15] = [replace(point, seconds=point.seconds * 10) for point in points[::15]]
    fitted = fitting.fit(points, Machine())
    assert fitting.median_error(made_points(0.0), fitted) < 0.06, "near the truth, not near the noise"
    assert fitted.net_beta == pytest.approx(TRUE.net_beta, rel=0.1)


def test_a_place_is_predicted_from_the_others() -> None:
    points = made_points(0)
    busy = [replace(point, seconds=point.seconds * 3) if point.place == LAYOUTS[2] else point for point in points]
    located = {place.name: place for place in fitting.by_place(busy, TRUE, Machine())}
    assert located["4 ranks"].held_out == pytest.approx(2 / 3, abs=0.1), "predicted as if it had not been busy"
    assert located["3 ranks"].held_out is not None
    assert located["3 ranks"].held_out < 0.1


# ---- Training ----


@pytest.mark.parametrize("name", MODELS)
def test_forecasts_hang_together(name: str) -> None:
    found = forecast(MODELS[name], Machine(), 8)
    assert [row.ranks for row in found.rows] == [2**power for power in range(13)]
    assert found.rows[0].efficiency == 1
    for row in found.rows[1:]:
        assert row.seconds[row.winner] == min(row.seconds.values())
        assert 0 < row.efficiency <= row.efficiency_overlapped <= 1
        assert ("shared" in row.seconds) == (row.nodes == 1)
    half = forecast(MODELS[name], Machine(), 8, itemsize=2)
    assert all(small.step < large.step for small, large in zip(half.rows[1:], found.rows[1:], strict=True))


def rows(efficiencies: dict[int, float]) -> list[Prediction]:
    return [Prediction(n, 1, n, 0, 1, {"ring": 0.1}, "ring", 1 / each, each, 1, 1) for n, each in efficiencies.items()]


def test_saturation_is_where_doubling_stops_to_pay() -> None:
    assert saturation(rows({1: 1, 2: 0.9, 4: 0.8, 8: 0.43, 16: 0.2})) == 4, "8 ranks are 3.44 as fast, 4 are 3.2"
    assert saturation(rows({1: 1, 2: 0.9, 4: 0.8, 8: 0.7})) is None


# ---- Files and the command line ----


def saved(path: Path, ranks: int, *, dtype: str = "float32") -> str:
    run = Run({"cpu": "made up", "cores": 2}, [ranks], False, dtype, "sum", "2026-01-02", "made up")
    for name in backends():
        for size in (8, 4096, 1 << 20, 1 << 24):
            seconds = np.full(5, predict(name, TRUE, Layout((ranks,), cores=2), size) or 1e-6)
            run.results.append(summarize(name, "allocated", size // 4, 4, ranks, seconds, 0))
    path.write_text(to_json(run))
    return str(path)


def test_files_that_cannot_be_fitted_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = saved(tmp_path / "1.json", 1)
    with pytest.raises(FileError, match="no time of"):
        fitting.read([alone])
    with pytest.raises(FileError, match="bfloat16"):
        fitting.read([saved(tmp_path / "half.json", 2, dtype="bfloat16")])
    assert scaling.main(["--fit", str(tmp_path / "missing.json")]) == 2
    assert "missing.json" in capsys.readouterr().err


def test_fit_report_and_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [saved(tmp_path / f"{ranks}.json", ranks) for ranks in (2, 3, 4)]
    record = tmp_path / "record.json"
    assert scaling.main(["--fit", *files, "--json", str(record), "--max-ranks", "64"]) == 0
    shown = capsys.readouterr().out
    assert "Median error: overall" in shown
    assert "flat" in shown
    assert re.search(r"3 ranks +\d+ +\d+% +\d+%", shown), "each place, and predicted from the others"
    assert "not in these runs: the default" in shown
    found = json.loads(record.read_text())
    assert found["fit"]["median_error"] < 0.05
    assert all(place["held_out"] is not None for place in found["fit"]["places"])
    assert [row["ranks"] for row in found["forecasts"][0]["rows"]] == [1, 2, 4, 8, 16, 32, 64]


def test_every_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [saved(tmp_path / f"{ranks}.json", ranks) for ranks in (2, 4)]
    assert scaling.main(["--model", "all", "--fit", *files]) == 0
    shown = capsys.readouterr().out
    assert all(model.title in shown and model.source in shown for model in MODELS.values())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "resnet51"], "use all, or some of resnet50"),
        (["--link", "fast"], "such as 10gbit"),
        (["--link", "0gbit"], "such as 10gbit"),
        (["--node-size", "0"], "from 1 to 1024"),
        (["--overlap", "1.5"], "from 0 to 1"),
        (["--json", "/nowhere/at/all.json"], "does not exist"),
        (["--microbatches", "4"], "--microbatches needs --stages"),
        (["--schedule", "gpipe"], "--schedule needs --stages"),
        (["--stages", "4", "--chunks", "2"], "needs --schedule interleaved, not 1f1b"),
        (["--stages", "4", "--microbatches", "2"], "1f1b needs --microbatches 4 or more"),
    ],
)
def test_bad_options(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = scaling.main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == 2
    assert text in capsys.readouterr().err


def test_runs_without_mpirun() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.scaling", "--max-ranks", "4"],
        cwd=launch.ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "ResNet-50" in ended.stdout


@pytest.mark.parametrize("name", ["ring", "halving_doubling"])
def test_the_formula_in_the_docstring_is_that_of_the_code(name: str) -> None:
    """The docs' table shows it."""
    text = " ".join((class_of(name).cost.__doc__ or "").split())
    parts = re.findall(r"(\d .*?) (alpha|beta)\b", text.replace("log2 p", "log2p"))[:2]
    assert [constant for _, constant in parts] == ["alpha", "beta"]
    for n in (2, 4, 8, 16):
        values = {"n": n, "p": n, "S": 1000.0, "log2p": np.log2(n)}
        for expression, constant in parts:
            product = re.sub(r"(?<=[\d)np]) (?=[(Sl])", "*", expression)
            assert count(name, constant, Layout((n,)), 1000.0) == pytest.approx(eval(product, values)), text


@pytest.mark.parametrize("at", [Layout((n,)) for n in (2, 3, 5, 64)], ids=lambda at: f"{at.ranks}ranks")
def test_ring_sends_and_adds_what_its_paper_says(at: Layout) -> None:
    n, s = at.ranks, 1000.0
    assert count("ring", "beta", at, s) == pytest.approx(2 * s * (n - 1) / n)
    assert count("ring", "gamma", at, s) == pytest.approx(s * (n - 1) / n)
    assert count("ring", "alpha", at, s) == 2 * (n - 1)


def test_exposed() -> None:
    assert exposed(1.0, 3.0, 0.0) == 1.0
    assert exposed(1.0, 3.0, 2 / 3) == 0.0
    assert exposed(3.0, 3.0, 2 / 3) == pytest.approx(1.0)


def test_strong_scaling_has_a_best_number_of_ranks() -> None:
    slow = replace(Machine(), net_beta=8 / 1e9)
    fast = replace(Machine(), net_beta=8 / 1e12, net_alpha=1e-6)
    assert forecast(MODELS["resnet50"], slow, 1).best_strong < forecast(MODELS["resnet50"], fast, 1).best_strong


def test_links() -> None:
    assert scaling._link("100gbit") == (100e9, scaling.LINK_LATENCY)
    assert scaling._link("2.5Gbit,30us") == (2.5e9, pytest.approx(30e-6))

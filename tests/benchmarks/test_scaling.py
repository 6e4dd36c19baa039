"""benchmarks.scaling: each formula against its paper, the fit against known constants, stages, the command line."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from allreduce.algorithms.shared import IN_CACHE
from allreduce.transport.cost import Layout, Machine, on_link
from benchmarks import scaling
from benchmarks.lib.results import FileError, Run, summarize, to_json
from benchmarks.predicting import fitting
from benchmarks.predicting.costs import backends, predict
from benchmarks.predicting.fitting import FITTED, Point
from benchmarks.predicting.forecast import MODELS, Prediction, exposed, forecast, saturation
from benchmarks.predicting.pipeline import Plan, bubble, crowded

FREE = Machine(**dict.fromkeys(FITTED, 0.0))
MIB = float(1 << 20)


def count(name: str, constant: str, at: Layout, s: float, allocated: bool = True) -> float:
    """Return how often a formula uses a constant: its value when all other constants are 0."""
    return predict(name, replace(FREE, **{constant: 1.0}), at, s, allocated)


FOUR, EIGHT, NODES, LONG = Layout((4,)), Layout((8,)), Layout((4, 4)), 16 * MIB
FORMULAS = [
    ("ring", "alpha", EIGHT, 1000, 2 * 7),
    ("ring", "beta", EIGHT, 1000, 2 * 1000 * 7 / 8),
    ("ring", "gamma", Layout((5,)), 1000, 1000 * 4 / 5),
    ("ring", "net_beta", NODES, 1000, 2 * 1000 * 7 / 8),  # one rank of a node sends out of it
    ("halving_doubling", "alpha", EIGHT, 1024, 2 * 3),
    ("halving_doubling", "beta", EIGHT, 1024, 2 * 1024 * 7 / 8),
    ("halving_doubling", "gamma", EIGHT, 1024, 1024 * 7 / 8),
    ("halving_doubling", "alpha", Layout((7,)), 1024, 2 * 2 + 2),  # four ranks, and one exchange with the others
    ("halving_doubling", "beta", Layout((7,)), 1024, 2 * 1024 * 3 / 4 + 2 * 1024),
    ("halving_doubling", "gamma", Layout((5,)), 1024, 1024 * 3 / 4 + 1024),
    ("halving_doubling", "beta", replace(EIGHT, half=True), 1024, 4 * 1024 * 7 / 8),
    ("halving_doubling", "net_beta", NODES, 1000, 2 * 4 * 1000 / 8),  # all four at once, an eighth each
    ("halving_doubling", "net_beta", Layout((3, 1)), 1000, 2 * (1000 / 2 + 2 * 1000 / 4)),  # of ranks 2 and 3
    ("reduce_to_one", "alpha", EIGHT, 1000, 7 + 3),  # the root's messages, and a tree of three levels
    ("reduce_to_one", "beta", EIGHT, 1000, 7 * 1000 + 3 * 1000),
    ("reduce_to_one", "gamma", EIGHT, 1000, 7 * 1000),
    ("reduce_to_one", "net_beta", NODES, 1000, 4 * 1000 + 1000),  # four come, the tree crosses once
    ("hierarchical_copy", "net_beta", Layout((4,) * 4), 1000, 1500),  # 2 S (m - 1) / m of m nodes
    ("hierarchical_copy", "net_beta", Layout((3, 1)), 1000, 1000),
    ("shared", "alpha", FOUR, 1000, 0),  # no messages
    ("shared", "copy", FOUR, 1000, 0),  # nothing staged
    ("shared", "fence", FOUR, 1000, 2 * 2),
    ("shared", "gamma", FOUR, 1000, 1000 * 3 / 4),
]
FOREIGN = [  # arrays, for the backend `shared`
    ("copy", FOUR, 1000, 2 * 3 / 4 * 1000 * IN_CACHE),  # staged: there and back in the caches
    ("fence", FOUR, 1000, 3 * 2),
    ("copy", FOUR, LONG, 2 * 3 / 4 * LONG),  # by CMA
    ("copy", replace(FOUR, cma=False), LONG, 2 * LONG),
    ("fence", replace(FOUR, cma=False), LONG, (2 + 2 * 4) * 2),  # two for each of four pieces
]


def test_formulas_are_those_of_the_papers() -> None:
    for name, constant, at, size, expected in FORMULAS:
        assert count(name, constant, at, size) == pytest.approx(expected), (name, constant, at)
    for constant, at, size, expected in FOREIGN:
        assert count("shared", constant, at, size, allocated=False) == pytest.approx(expected), (constant, at, size)


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


def made_points(noise: float) -> list[Point]:
    generator, points = np.random.default_rng(1), []
    for at in LAYOUTS:
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
    assert scaling.main(["--model", "all", "--fit", *files, "--json", str(record), "--max-ranks", "64"]) == 0
    shown = capsys.readouterr().out
    assert all(model.title in shown and model.source in shown for model in MODELS.values())
    assert "Median error: overall" in shown
    assert "flat" in shown
    assert re.search(r"3 ranks +\d+ +\d+% +\d+%", shown), "each place, and predicted from the others"
    assert "not in these runs: the default" in shown
    found = json.loads(record.read_text())
    assert found["fit"]["median_error"] < 0.05
    assert all(place["held_out"] is not None for place in found["fit"]["places"])
    assert [row["ranks"] for row in found["forecasts"][0]["rows"]] == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "resnet51"], "use all, or some of resnet50"),
        (["--link", "fast"], "such as 10gbit"),
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


# ---- Stages ----


def test_the_bubble_is_that_of_gpipe_and_of_interleaved_stages() -> None:
    """Of the steps of a stage, one for each microbatch and one for each other stage, it is idle in the latter."""
    expected = {(1, 1): 0, (2, 1): 1 / 2, (2, 4): 1 / 5, (3, 4): 2 / 6, (4, 16): 3 / 19, (8, 3, 2): 7 / 13}
    assert {plan: bubble(*plan) for plan in expected} == pytest.approx(expected)


@pytest.mark.parametrize(("cores", "replicas", "longer"), [(4, 1, 11 / 8), (3, 1, 11 / 8), (2, 1, 2.0), (2, 2, 4.0)])
def test_fewer_cores_than_ranks(cores: int, replicas: int, longer: float) -> None:
    """A rank waits for the larger of the bubble and of the time in which other ranks have the cores."""
    model = MODELS["bert-large"]
    row = forecast(model, FREE, 8, Plan(4, 8), cores=cores, most=8).rows[replicas - 1]
    assert row.ranks == 4 * replicas
    assert row.pipeline == pytest.approx(model.step_seconds * longer)
    assert crowded(4 * replicas, cores) == max(0, 1 - cores / row.ranks)


def test_replicas_average_the_gradients_of_a_stage() -> None:
    """On one node, and on nodes whose ranks are stages of one replica: then all stages use the node's link at once."""
    model, k = MODELS["bert-large"], on_link(Machine(), 100e9 / 8, 5e-6)
    one = forecast(model, k, 8, Plan(4, 8), most=8).rows[1]
    assert (one.ranks, one.nodes, one.replicas) == (8, 1, 2)
    assert one.seconds["ring"] == predict("ring", k, Layout((2,), sharing=8), model.parameters * 4 // 4)
    apart = forecast(model, k, 4, Plan(4, 8), most=8).rows[1]
    assert "shared" not in apart.seconds
    slower = replace(k, net_beta=4 * k.net_beta)
    assert apart.seconds["ring"] == predict("ring", slower, Layout((1, 1), sharing=4), model.parameters * 4 // 4)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.json"
    given = ["--stages", "4", "--microbatches", "16", "--max-ranks", "16", "--json", str(record)]
    assert scaling.main(["--model", "gpt2-xl", *given]) == 0
    shown = capsys.readouterr().out
    assert "GPT-2 XL in 4 stages, 1f1b, 16 microbatches of 2 samples: bubble 15.8%" in shown
    assert "a replica sends 96 messages of 13.1 MB a step" in shown
    found = json.loads(record.read_text())["stages"][0]
    assert [row["ranks"] for row in found["rows"]] == [4, 8, 16]
    assert found["bubble"] == bubble(4, 16)

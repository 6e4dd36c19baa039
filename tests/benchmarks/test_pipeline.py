"""benchmarks.scaling --stages: the bubble, the all-reduce of replicas, the command line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from allreduce.transport.cost import Layout, Machine, on_link
from benchmarks import scaling
from benchmarks.predicting.costs import predict
from benchmarks.predicting.forecast import MODELS, forecast
from benchmarks.predicting.pipeline import Plan, bubble, crowded

FREE = replace(Machine(), alpha=0, beta=0, handshake=0, switch=0, call=0)  # messages in a node take no time


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

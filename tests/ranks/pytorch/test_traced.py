"""MirroredOptimizer with a trace: the recorded spans; otherwise nothing changes."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

import allreduce
from allreduce.errors import DisagreementError, OptionError
from tests.ranks.pytorch.trained import OPTIMIZERS, SMALL_BUCKETS, assert_mirrored, mine, mirrored, network, train
from tests.trace_schema import check_trace
from trainers.pytorch import Buckets, MirroredOptimizer

JOBS = "openmpi 1 2"

SIZE = MPI.COMM_WORLD.size
STEPS = 3


@pytest.mark.parametrize("update", ["replicated", "sharded"])
@pytest.mark.parametrize("overlap", [False, True], ids=["after", "during"])
def test_what_is_recorded(
    update: str, overlap: bool, flat: allreduce.Topology, world: MPI.Intracomm, tmp_path: Path
) -> None:
    if overlap and MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI has no MPI_THREAD_MULTIPLE")
    path = world.bcast(tmp_path) / "trace.json"
    parameters = []
    for trace in (path, None):
        model = network()
        plain = OPTIMIZERS["momentum"](model.parameters())
        options = {"topology": flat, "update": update, "trace": trace, "buckets": Buckets(overlap, **SMALL_BUCKETS)}
        with mirrored(plain, model, "auto", **options) as optimizer:
            buckets = len(optimizer.report().buckets)
            train(model, optimizer, mine, steps=STEPS)
            assert_mirrored(world, model)
        parameters.append([each.detach().clone() for each in model.parameters()])
    assert all(map(torch.equal, *parameters))
    world.Barrier()
    events = check_trace(json.loads(path.read_text()), SIZE)
    own = [event for event in events if event["pid"] == world.rank]
    assert Counter(event["cat"] for event in own)["update"] == STEPS
    call = "all_reduce" if update == "replicated" else "reduce_scatter"
    reductions = [each for each in own if each["name"].startswith(call) and each["args"]["dtype"] == "float32"]
    assert len(reductions) == STEPS * buckets
    threads = {event["tid"] for event in reductions}
    assert threads == {1} if overlap and SIZE > 1 else len(threads) == 1  # the worker may have a thread for others
    assert all(event["args"]["bytes"] > 0 for event in reductions)
    main = [event["cat"] for event in own if event["tid"] == 0]
    assert main[0] == "compute"
    assert main.count("compute") >= STEPS


def test_what_is_refused(flat: allreduce.Topology, world: MPI.Intracomm, tmp_path: Path) -> None:
    model = network()
    with pytest.raises(OptionError, match="the trace can't be written"):
        MirroredOptimizer(OPTIMIZERS["momentum"](model.parameters()), model, topology=flat, trace="/missing/trace.json")
    if SIZE > 1:
        trace = tmp_path / "trace.json" if world.rank == 0 else None
        with pytest.raises(DisagreementError, match=r"trace=\.\.\."):
            MirroredOptimizer(OPTIMIZERS["momentum"](model.parameters()), model, topology=flat, trace=trace)

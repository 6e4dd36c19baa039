"""A rank of the matrix: runs cases, each on some of the job's ranks, and judges them. `tests.matrix` starts the job."""

import argparse
import importlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
from mpi4py import MPI

import allreduce
from allreduce.errors import AllReduceError
from tests.matrix import alone, trained
from tests.matrix.case import OPTIMIZER, Case, case_of
from trainers.errors import TrainerError

NAMED = (AllReduceError, TrainerError)


class Judge:
    """Runs cases on the ranks of a job. Collective. tells: whether this rank prints the outcomes."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.tells = comm, comm.rank == 0
        self.self = allreduce.Topology(MPI.COMM_SELF)
        self.topologies: dict[tuple[int, int], allreduce.Topology | None] = {}

    def topology(self, ranks: int, nodes: int) -> allreduce.Topology | None:
        """Return the topology of the first ranks; None on the others. Collective."""
        if (ranks, nodes) not in self.topologies:
            part = self.comm.Split(0 if self.comm.rank < ranks else MPI.UNDEFINED, self.comm.rank)
            made = None if part == MPI.COMM_NULL else allreduce.Topology(part, ranks_per_node=nodes or None)
            self.topologies[ranks, nodes] = made
        return self.topologies[ranks, nodes]

    def run(self, case: Case) -> tuple[str, str]:
        """Return "right", "refused" or "wrong", and why; the same on all ranks."""
        if case.killed >= 0:
            return self.run_killed(case)
        folder = self.comm.bcast(tempfile.mkdtemp() if self.comm.rank == 0 else "")
        outcome: tuple[str, str] = ("right", "")
        for ranks, resumes in ((case.ranks, False), (case.resumed, True))[: 1 + bool(case.resumed)]:
            topology = self.topology(ranks, case.nodes)
            outcome = self.agreed(*(found := self.part(case, topology, resumes, folder, self.comm.rank == 0)))
            bits = found[1]
            if outcome[0] != "right":
                break
        if outcome[0] == "right" and case.resumed == case.ranks and case.average != "LocalSGD":
            whole = self.part(replace(case, stop=0, resumed=0), topology, False, folder, self.comm.rank == 0)
            outcome = self.agreed(*whole, bits)
        if self.comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        if outcome[0] == "wrong":
            self.topologies.clear()
        return outcome

    def run_killed(self, case: Case) -> tuple[str, str]:
        """As `run`, of a case in which a rank of this job dies. The case has the first of the living ranks."""
        living = allreduce.Topology.of_survivors()
        folder = living.world.bcast(tempfile.mkdtemp() if living.rank == 0 else "")
        chosen = living.rank < case.ranks
        ranks = living.split(int(chosen), case.nodes or None)
        first = ranks.rank == int(case.killed == 0)
        found = self.part(case, ranks if chosen else None, False, folder, first)
        ranks.abandon()
        living.abandon()
        with allreduce.Topology.of_survivors() as living:
            self.comm, self.tells = living.world, living.rank == 0
            outcome = self.agreed(*found)
        shutil.rmtree(folder, ignore_errors=True)
        return outcome

    def part(self, case: Case, topology: Any, resumes: bool, folder: str, first: bool) -> tuple[tuple[str, str], bytes]:
        """Train, up to a stop or to the end. Returns the outcome on this rank, and the bits of the parameters.

        first: whether this rank compares them with one process.
        """
        if topology is None:
            return ("right", ""), b""
        try:
            found = trained.train(case, topology, resumes, folder)
            if first and (resumes or not case.resumed):  # the bits of all ranks are compared
                self.compare(case, *found)
                self.compare_bits(case, found[0], folder)
        except NAMED as error:
            return ("refused", f"{type(error).__name__}: {error}"), b""
        except Exception:
            return ("wrong", traceback.format_exc()), b""
        return ("right", ""), found[0].tobytes()

    def agreed(self, outcome: tuple[str, str], bits: bytes, before: bytes | None = None) -> tuple[str, str]:
        """Return the worst outcome of the ranks, or that they have different bits. Collective.

        before: the bits of the same training with a stop.
        """
        if outcome[0] == "right" and before is not None and before != bits:
            outcome = "wrong", "a stop and a resume on as many ranks have given other bits"
        outcomes, held = zip(*self.comm.allgather((outcome, bits)), strict=True)
        worst: tuple[str, str] = max(outcomes, key=lambda each: ("right", "refused", "wrong").index(each[0]))
        if worst[0] == "right" and len({each for each in held if each}) > 1:
            return "wrong", "the ranks have different bits"
        return worst

    def compare_bits(self, case: Case, parameters: np.ndarray, folder: str) -> None:
        """Check that an Exact training has the bits of one rank. Raises AssertionError."""
        if case.average == "Exact":
            one = {"owner": "replicated", "backend": "ring", "ranks": 1, "nodes": 0, "buckets": False}
            alone_here = replace(case, **one, stop=0, resumed=0, killed=-1)
            found, *_ = trained.train(alone_here, self.self, False, folder)
            assert found.tobytes() == parameters.tobytes(), "the bits are not those of one rank"

    def compare(self, case: Case, parameters: np.ndarray, average: np.ndarray | None, history: Any) -> None:
        """Compare the end of a training with that of one process. Raises AssertionError."""
        local = case.average == "LocalSGD"
        if local and (case.killed >= 0 or (case.loader == "shards" and case.owner not in OPTIMIZER)):
            return  # a round is lost, or each rank has the rows of its own files: only the bits are compared
        wanted = alone.train(case, trained.beginning(case))
        share = 2e-4 if case.update in ("sgd", "momentum", "nesterov") else 2e-3  # the others divide by small numbers
        share = 0.03 if case.compress else 1e-8 if case.dtype == "float64" else share
        near("parameters", parameters, wanted.parameters, share * wanted.travelled + 1e-12)
        if "EMA" in case.transforms:
            near("average", average, wanted.average, share * wanted.travelled + 1e-7)
        if history is not None:
            near("losses", history.column("loss"), wanted.losses, (0.03 if case.compress else 1e-4))
            if "ClipNorm" in case.transforms and case.average != "LocalSGD":
                near("grad_norm", history.column("grad_norm"), wanted.norms, (0.03 if case.compress else 1e-4))


def near(name: str, found: Any, wanted: Any, most: float) -> None:
    """Raise AssertionError if two vectors are further apart than `most`."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape, f"{name} of shape {found.shape}, and one process has {wanted.shape}"
    assert np.array_equal(np.isnan(found), np.isnan(wanted)), f"{name}: not finite elsewhere"
    distance = float(np.linalg.norm(np.nan_to_num(found - wanted)))
    assert distance <= most, f"{name}: {distance:.3g} from one process, more than {most:.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("cases", help="their numbers, as 3,5,8")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("trainers", "allreduce"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("ALLREDUCE_TIMEOUT_SECONDS", "30")  # of all topologies
    cases = [case_of(given.seed, int(number)) for number in given.cases.split(",")]
    judge = Judge(MPI.COMM_WORLD.Dup())
    frameworks = {case.framework for case in cases if case.killed >= 0 or judge.comm.rank < case.needed}
    if frameworks & {"torch", "keras"}:
        importlib.import_module("tests.without_dynamo")
    for framework in sorted(frameworks):
        importlib.import_module(framework)  # may take longer than a rank waits for another one in a case
    for case in cases:
        begin = time.monotonic()
        outcome, why = judge.run(case)
        line = {"number": case.number, "outcome": outcome, "why": why, "seconds": time.monotonic() - begin}
        if judge.tells:
            print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

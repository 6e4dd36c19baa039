"""The strategy of MirroredTrainer(average=Exact()): bits depend on nothing but the data and the arguments.

Micro-batch m of a batch has the same rows on any number of ranks. A rank computes its gradients alone, with the
parameters, statistics and random numbers of the step's start, and all are summed exactly (algorithms.compressed.exact).
M. Li et al.: EasyScale: Elastic training with consistent accuracy and improved utilization on GPUs, SC 2023.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allreduce.backend import AllReduce
from allreduce.topology import Topology
from trainers.backends import exact_error
from trainers.checks import changed_alone
from trainers.data import Batch, BatchSource, Data, row_count, seed_generators
from trainers.errors import ArgumentError
from trainers.group import RankGroup
from trainers.replica import undo_batch
from trainers.strategies.interface import Strategy
from trainers.strategies.mirrored import Mirrored
from trainers.strategies.rule import WEIGHT, mean_weight
from trainers.strategies.step import Step
from trainers.strategies.transforms.transform import Rows


class ExactStep(Step):
    """A step that sums the gradients of micro-batches exactly. backend: has exact sums. micro_batch: the rows of one.
    batch_size: returns the rows of a whole batch, the same on all ranks."""

    backend: Any

    def __init__(self, strategy: Strategy, backend: AllReduce, micro_batch: int, batch_size: Callable[[], int]) -> None:
        super().__init__(strategy, backend)
        self._micro_batch, self._batch_size = micro_batch, batch_size
        self._rows: list[np.ndarray] = []  # memory for the gradients of all micro-batches of a step but the last one
        self._terms: list[np.ndarray] = []  # this rank's gradients of the current step
        self._count = 1  # micro-batches of a batch
        self._values = np.zeros((0, len(self.replica.metrics) + 1))  # their metrics and mean weights, times their share
        self._checked = False  # whether it is known that batches change no buffers that ranks do not average

    def compute(self, batch: Batch | None) -> None:
        self._count = -(-self._batch_size() // self._micro_batch)
        count = 0 if batch is None else len(batch.seeds)
        self._terms, self._values = [], np.zeros((count, len(self.replica.metrics) + 1))
        super().compute(batch)

    def _compute(self, batch: Batch) -> None:
        if not batch.seeds:
            super()._compute(batch)
            return
        shares = [row_count(part) / batch.rows for part in batch.parts]
        self._compute_terms(batch, shares)
        self._values[:, -1] = [mean_weight(self.replica, part) for part in batch.parts]
        self._values *= np.array(shares)[:, None]
        *measured, self.rule.weight = self._values.sum(axis=0).tolist()
        self.measured[: len(measured)] = measured

    def _compute_terms(self, batch: Batch, shares: list[float]) -> None:
        """Compute the gradients of one micro-batch after the other: `_terms`, and `_values`. Local."""
        while len(self._rows) < len(shares) - 1:
            self._rows.append(np.empty_like(self.buffer))
        self._terms = [*self._rows[: len(shares) - 1], self.buffer]
        self.rule.take_none()
        for number, (seed, part, share) in enumerate(zip(batch.seeds, batch.parts, shares, strict=True)):
            if number:
                undo_batch(self.replica)  # each micro-batch begins with the statistics of the step's start
            if self.replica.unseeded:
                raise ArgumentError(self.replica.unseeded)
            seed_generators(seed)
            self._values[number, :-1] = self._compute_term(part, share, self._terms[number])

    def _compute_term(self, part: Data, share: float, memory: np.ndarray) -> Any:
        """Write the gradients of a micro-batch to `memory`; return its metrics. Local."""
        replica = self.replica
        before = {} if self._checked else replica.local_state()
        values = self.rule.compute(Rows(part, share, self.gradients, replica))
        if memory is not self.buffer:
            memory[:] = self.buffer
        if not self._checked:
            after = replica.local_state()
            if wrong := changed_alone(before, after):
                raise ArgumentError(wrong)
            self._checked = True
        return values

    def __call__(self, flags: tuple[float, ...]) -> None:
        sums = self.add_up(self._values, self._count)
        # `measured` is summed over the ranks, with the flags: one rank has the sums, the others add zeros
        *metrics, weight = sums if self.comm.rank == 0 else np.zeros(sums.size)
        self.measured[: len(metrics)] = metrics
        super().__call__((*flags[:WEIGHT], weight, *flags[WEIGHT + 1 :]))

    def add_up(self, terms: np.ndarray, count: int) -> np.ndarray:
        """Return the exact sum of float64 rows. terms: (k, length), this rank's; count: of all ranks. Collective."""
        sums = np.zeros(terms.shape[1])
        self.backend.sum_terms(terms, sums, "sum", count)
        return sums

    def _weighed(self) -> Sequence[Any]:
        return [term[: self.replica.parameter_count] for term in self._terms]

    @property
    def scatters(self) -> bool:
        """False if a transform needs a norm: the bits of one of slices would depend on the number of ranks."""
        return not self.rule.needs_squares

    def sum(self, kind: str) -> None:
        kind = kind if self.scatters else "all_reduce"
        self.clock.start()
        self.backend.sum_terms(self._terms, self.buffer, "sum", self._count, kind)
        self.clock.stop()

    @property
    def local_gradients(self) -> Any:
        return np.add.reduce(self._terms) if len(self._terms) > 1 else self.buffer


class ExactMirrored(Mirrored):
    """Mirrored with exact sums of micro-batches; see MirroredTrainer for the arguments, and the module."""

    def argument_error(self, ranks: Topology) -> Exception | None:
        if error := super().argument_error(ranks):
            return error
        replica = self.replica
        if wrong := exact_error(self._given, self._compress):
            return ArgumentError(wrong)
        kind = type(replica).__name__
        if replica.device != "cpu":
            return ArgumentError(f"Exact trains on the CPU, and this {kind} is on {replica.device!r}")
        return None

    def connect(self, group: RankGroup) -> None:
        self.replica.undoable = True
        super().connect(group)

    def rows_error(self, rows: str) -> str:
        if rows == "divided":
            text = "Exact divides every batch into micro-batches, which must not depend on the ranks"
            return f'{text}: use rows="whole", or leave it out'
        return ""

    def make_meter(self, batches: BatchSource) -> Any:
        self._batches = batches
        return super().make_meter(batches)

    def _make_step(self) -> Step:
        assert self.micro_batch is not None
        return ExactStep(self, self.allreduce, self.micro_batch, lambda: self._batches.batch_size)

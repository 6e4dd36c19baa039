"""The strategy of MirroredTrainer(average=LocalSGD(H)): ranks train on their own for H steps, then average.

Between two averages (`trainers.local_sgd`) a rank updates its replica with the mean gradient over its own rows; without
rows in a short batch it takes no step. After a round, and at the end of an epoch, the ranks meet: one small message has
their flags and metrics. The state of the inner optimizer stays on each rank; a checkpoint has that of every rank.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from allreduce.arrays.gpu import on_host
from allreduce.elastic.standby import JOINED
from allreduce.topology import Topology
from allreduce.transport.control import combine, together
from trainers.backends import allocate_own
from trainers.data import Batch, BatchSource
from trainers.errors import ArgumentError, ModelFileError
from trainers.local_sgd.rounds import Rounds
from trainers.options.average import LocalSGD
from trainers.replica import attach, changing_entries, check_divisible, copied, snapshot_of
from trainers.state.adopt import OUTER, RATES, Arrays, Piece
from trainers.state.owners import INNER
from trainers.state.sharded import Flat
from trainers.strategies.interface import EpochRun
from trainers.strategies.mirrored import MEASURED, Mirrored
from trainers.strategies.rule import FLAGS, WEIGHT
from trainers.strategies.step import Step, StepOwners
from trainers.watching.meter import RoundMeter

ROUND = f"{INNER}round."  # prefix of the entries of a rank's local state that are of its round
MEET = "end the steps that ranks have taken on their own"


class LocalOwners(StepOwners):
    """Every rank updates its own replica. rounds: of averages, which begin again from a state that is loaded.

    A checkpoint has the parameters as if the round ended there, and each rank's part of the round. So it can be loaded
    on any ranks, and a training that resumes on as many ranks goes on with the round, as one that was not stopped.
    """

    def __init__(self, step: Step, steps: int, rounds: Rounds) -> None:
        super().__init__(step, steps)
        self._rounds = rounds

    def not_replicated(self) -> dict[str, str]:
        return dict.fromkeys(changing_entries(self._replica), "each rank keeps that of its own inner steps")

    def shared_state(self) -> Arrays:
        momentum = self._rounds.momentum
        return {} if momentum is None else {OUTER: np.array(on_host(momentum))}

    def local_state(self) -> Arrays:
        state, updated = self._replica.state(), changing_entries(self._replica)
        own = {f"{INNER}{name}": np.array(array) for name, array in state.items() if name in updated}
        return own | {f"{ROUND}{name}": array for name, array in self._rounds.state().items()}

    def load_local_state(self, state: Mapping[str, np.ndarray]) -> None:
        of_round = {name.removeprefix(ROUND): array for name, array in state.items() if name.startswith(ROUND)}
        inner = {name.removeprefix(INNER): state[name] for name in state if not name.startswith(ROUND)}
        if inner:
            self._replica.load_state(copied(self._replica.state(), {}) | inner)
        if of_round:
            self._go_on(of_round)

    @contextmanager
    def whole(self) -> Iterator[None]:
        of_round, backend = self._rounds.state(), self._step.backend
        if not of_round:
            yield
            return
        feedback = backend.state()
        self._rounds.end()
        self._replica.refresh()
        yield
        backend.load_state(feedback)
        self._go_on(of_round)

    def _go_on(self, of_round: Arrays) -> None:
        self._rounds.load_state(of_round)
        self._replica.refresh()

    def reset(self) -> None:
        self._rounds.load(None, self._rounds.done)

    def run_round(self, end: Callable[[], object]) -> None:
        """Take an outer step by `end`, and bring the replica up to date. Collective."""
        self._step.clock.start()
        end()
        self._step.clock.stop()
        self._replica.refresh()

    def end_round(self) -> None:
        if self._rounds.begun:
            self.run_round(self._rounds.end)

    def begin_change(self) -> None:
        self._rounds.restart()

    def synchronize_state(self) -> None:
        self._rounds.restart()


class LocalMirrored(Mirrored):
    """Local SGD; see MirroredTrainer for the arguments, and the module's docstring.

    given: the arguments of Mirrored.
    """

    mirrors = "epoch"
    rounds: Rounds = None  # type: ignore[assignment]  # while connected

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        assert isinstance(self.average, LocalSGD)
        self.local = self.average
        self._meter: RoundMeter
        self._added: list[np.ndarray] = []  # a row of RoundMeter.add for each step since the ranks have met
        self._batches: BatchSource  # of the fit
        self._first = 0  # the first step since the ranks have met, in its epoch
        self._met = np.zeros(len(FLAGS))  # the sums over the ranks at the last meeting: flags, then rows of metrics

    # Construction

    def argument_error(self, ranks: Topology) -> Exception | None:
        if error := super().argument_error(ranks):
            return error
        replica, local = self.replica, self.local
        if wrong := local.length_error(replica.gradient_length):
            return ArgumentError(wrong)
        return None

    def _make_buffer(self) -> None:
        """Allocate the gradients, and the parameters with the memory of the rounds. Collective."""
        super()._make_buffer()
        replica, local, length = self.replica, self.local, self.replica.gradient_length
        self.measured = np.zeros(len(replica.metrics) + len(FLAGS))
        self._gradients = self.core.gradients
        self._parameters = allocate_own(replica)
        together(self.group.comm, self._bind)
        self._trained = replica.parameter_count
        dtype = "float64" if replica.gradient_dtype == "float64" else "float32"
        # Between an inner step and the next gradients the gradient buffer is free.
        delta = self._gradients if replica.gradient_dtype == dtype else self.core.allocate(length, dtype)
        self.core.describe(delta)
        self._messages = self.group.topology.private()
        given = local, self._messages, [self._parameters], self.allreduce, Flat(delta, delta)
        self.rounds = Rounds(*given, averaged=length - self._trained)
        self.core.owners = LocalOwners(self.core, self.steps, self.rounds)

    def _bind(self) -> None:
        check_divisible(self.replica, whole=True)
        attach(self.replica, self._parameters, self._gradients)

    def close(self) -> None:
        if self.rounds is not None:
            self.group.topology.release(self._messages)
        super().close()

    def _drop_buffer(self) -> None:
        self.rounds = None  # type: ignore[assignment]
        self._gradients = np.empty(0)
        super()._drop_buffer()

    # Steps, and rounds of them

    def make_meter(self, batches: BatchSource) -> RoundMeter:
        self._added.clear()
        self._batches = batches
        self._meter = RoundMeter(self.replica.metrics, batches.sizes, self.measured.dtype, "cpu")
        return self._meter

    def run_epoch(self, run: EpochRun, number: int) -> None:
        self._added.clear()
        with run.shares(number) as shares:
            while run.first_step < run.batches.steps and not run.stopped:
                run.check_alike()
                first = self._first = run.first_step
                last = first + self.rounds.left
                if run.batches.planned is not None:
                    last = min(last, run.batches.planned)
                for step in range(first, last):
                    self._added.append(np.zeros(len(self.replica.metrics) + 2))
                    took = run.keep_error(partial(self._take_step, run, step, shares))
                    self.rounds.count_step(1.0 if took else 0.0)
                run.keep_error(partial(run.batches.peek, last))
                run.end_steps(self._meet(run))

    def _take_step(self, run: EpochRun, step: int, shares: Iterator[Batch]) -> bool:
        """Take an inner step with this rank's rows. Returns False if there are none, or they were discarded. Local; may
        raise any exception."""
        exists = step < run.batches.steps
        if not exists:  # for all that is known: it does if this rank has rows of it
            run.batches.peek(step)
            exists = run.batches.coming > 0
        if exists:
            run.begin_batch(step)
        with self.clock.span("data"):
            batch = run.check_batch(next(shares))
        self._added[-1][-1] = batch.share
        took = batch.own > 0 and self._update_alone(run, batch)
        if exists:
            run.end_batch(step)
        return took

    def _update_alone(self, run: EpochRun, batch: Batch) -> bool:
        """Update the replica with rows of this rank. Returns False if they were discarded. Local; may raise any
        exception."""
        replica, metrics = self.replica, len(self.replica.metrics)
        with self.clock.span("compute"):
            values = self.rule.gradients(batch, 1.0, self._gradients)
        if run.discard_if_unusable(self._gradients, replica):
            return False
        self.measured[:metrics] = [float(value) for value in values]
        self.measured[metrics + WEIGHT] = self.rule.weight
        self.rule.weigh(self.measured, [self._gradients[: self._trained]])
        replica.still = self.rule.unused
        self._added[-1][:-1] = [*self.measured[:metrics] * batch.share, batch.share]
        with self.clock.span("update"):
            self.rule.transform([self._gradients[: self._trained]])
            self.rule.update()
            self.rule.raise_kept()
            self._parameters[self._trained :] = self._gradients[self._trained :]  # statistics, if there are any
        return True

    def _meet(self, run: EpochRun) -> int:
        """Add up flags and metrics, and take the outer step that is due. Returns the number of steps since the ranks
        last met, without those after the end of a stream. Raises an error of any rank on all ranks, and DivergedError.
        Collective."""
        met = np.concatenate([run.flags(steps=len(self._added)), *self._added])
        self.clock.start()
        combine(self.group.comm, met, MEET)
        self.clock.stop()
        self.measured[-len(FLAGS) :] = met[: len(FLAGS)]
        shares = met[len(FLAGS) :].reshape(len(self._added), -1)[:, -1]
        steps = len(shares)
        if run.batches.streams:
            if not met[FLAGS.index("rows")]:
                steps = int(np.flatnonzero(shares).max(initial=0)) + 1
                self.rounds.discount(len(shares) - steps)
            self._learn(shares[:steps])
            met = met[: len(met) - (len(shares) - steps) * (len(self.replica.metrics) + 2)]
        run.read_flags(steps)
        if self.rounds.due:
            self.core.owners.run_round(self.rounds.finish)
        # From here on nothing communicates: after a failure a rank has done all of the above, or counts none of it.
        self._count(met)
        self._meter.check_loss()
        return steps

    def _learn(self, shares: np.ndarray) -> None:
        """Take the rows of a stream's batches since the ranks last met. shares: of these steps, over all ranks. A rank
        knows the others' rows of the first of them only, so its share of another one is its rows. Local."""
        for step in range(1, len(shares)):
            self._batches.learn(self._first + step, round(shares[step]))

    def _count(self, met: np.ndarray) -> None:
        """Count the steps of a meeting. met: the sums over the ranks. Local."""
        self._met = met
        self.measured[-len(FLAGS) :] = met[: len(FLAGS)]
        self._added.clear()
        rows = met[len(FLAGS) :].reshape(-1, len(self.replica.metrics) + 2)
        self.steps += len(rows)
        self._meter.add(rows)

    # Recovery after failures: all ranks go back to the parameters after the last outer step, at the last meeting

    def pieces(self) -> list[Piece]:
        state, start = snapshot_of(self.replica, {}), self.rounds.start[: self._trained]
        state["parameters"] = start.astype(state["parameters"].dtype)
        state |= {RATES: np.array(self.replica.learning_rates), **self.owners.shared_state()}
        state[MEASURED] = np.array([self.rounds.done, *self._met])
        return [Piece(self.steps, self.steps, 0, len(self.core.buffer), {}, state, self.rounds.done)]

    def load_state(self, step: int, state: Arrays) -> None:
        momentum, outer = state.get(OUTER), self.rounds.momentum
        if momentum is not None and outer is not None and momentum.shape != outer.shape:
            raise ModelFileError(f"the outer momentum is of another model: {momentum.shape}, and here {outer.shape}")
        super().load_state(step, state)
        if momentum is not None:
            self.rounds.load(momentum, self.rounds.done)
        self.rounds.restart()

    def _go_to(self, step: int, state: Arrays) -> None:
        kept = dict(state)
        done, *met = state.pop(MEASURED).tolist()
        self.saved = [Piece(step, step, 0, len(self.core.buffer), {}, kept, int(done))]
        self._added.clear()
        if step > self.steps and self.group.previous[self.group.rank] != JOINED:
            if self._batches.streams:
                self._learn(np.array(met[len(FLAGS) :]).reshape(step - self.steps, -1)[:, -1])
            self._count(np.array(met))
        self.steps = step

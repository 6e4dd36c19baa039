"""One random sequence of calls on trainers, and the checks after each call."""

import io
import os
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np

from allreduce.errors import ClosedError, UnavailableError
from allreduce.tracing.trace import Trace
from tests.sequences.calls import Folder, Side
from tests.sequences.fits import CLASSES, FEATURES, Does, Evaluates, Fit, Rows, WantedError, draw_fit
from tests.sequences.making import Making
from tests.sequences.models import Model, State, multiply
from trainers import CentralStorageTrainer, MirroredTrainer, ParameterServerTrainer, SpareReplicasTrainer
from trainers.callbacks import (
    CheckDivergence,
    CheckGradients,
    CSVLogger,
    EarlyStopping,
    LearningRateSchedule,
    ModelCheckpoint,
)
from trainers.data import order
from trainers.errors import ArgumentError, CheckpointError, DataError, DivergedError, NotFiniteError
from trainers.fit.checkpointing import Checkpoint
from trainers.recovery.terminating import Terminated


class Sequence(Making):
    """Collective; see Making."""

    def run(self, calls: int) -> None:
        actions: list[tuple[Callable[[Side], None], int]] = [
            (self.fit, 12), (self.evaluate, 2), (self.predict, 2), (self.save, 2), (self.load, 2), (self.edit, 1),
            (self.record, 1), (self.surviving, 1), (self.refuse, 3), (self.close, 2), (self.leave, 1),
            (self.second, 1), (self.close_topology, 1), (self.unusual, 1),
        ]  # fmt: skip
        actions = [(action, weight) for action, weight in actions if action.__name__ not in self.without]
        for _ in range(calls):
            if not self.sides or (len(self.sides) < 3 and self.chance(0.15)):
                self.make()
                continue
            side = self.pick(*self.sides)
            if not side.model.finite:
                self.load(side)
                continue
            ((action, _),) = self.draw.choices(actions, [weight for _, weight in actions])
            action(side)
        while self.sides:
            side = self.pick(*self.sides)
            self.compare(side)
            self.close(side)
        for topology in self.topologies:
            self.well("Topology.close", topology.close)

    # Comparing

    def compare(self, side: Side) -> None:
        """Check that all ranks have the same model, and that it equals the shadow's."""
        trainer, model = side.trainer, side.model
        sums = self.well("parameters_sha256", trainer.parameters_sha256)
        self.check(len(set(sums)) == 1, f"{side.name}: ranks have different parameters")
        if not model.finite:
            return
        path = os.path.join(self.folder, "compare.npz")
        self.well("save", lambda: trainer.save(path))
        self.well("restore", lambda: model.reader.restore(path))
        self.comm.Barrier()
        found = model.reader.snapshot({})
        self.check(all(np.isfinite(array).all() for array in found.values()), f"{side.name}: the model is not finite")
        here = np.array(trainer.replica.state()["parameters"])
        self.check(np.array_equal(here, found["parameters"]), f"{side.name}: the file is not what the replica holds")
        if model.known:
            self.alike(side.name, found, model.shadow.state())
        model.settle(found)

    def alike(self, name: str, found: Any, wanted: State) -> None:
        for key, array in wanted.items():
            there = np.array(found[key])
            near = there.shape == array.shape and np.allclose(there, array, rtol=2e-3, atol=2e-4)
            self.check(near, f"{name}: {key} is {there}, and one rank has {array}")

    # Fits

    def fit(self, side: Side) -> None:
        call = draw_fit(self.draw, self.size)
        if self.chance(0.3) and not call.poisoned:
            self.with_checkpoint(side, call)
        call.callbacks = self.callbacks(call)
        kinds = [type(each).__name__ for each in call.callbacks]
        self.note(f"fit {side.name} on {side.model.name}: {call} {kinds}")
        self.run_fit(side, call)

    def callbacks(self, call: Fit) -> list[Any]:
        """Return callbacks that change nothing, or whose effect the shadow follows; some are used for the second
        time."""
        made: list[Any] = []
        if call.halves:
            made.append(self.again("schedule", lambda: LearningRateSchedule(lambda epoch, rate: rate * 0.5)))
        if call.finds:
            made.append(self.again(call.finds, lambda: CheckGradients(call.finds)))
        if call.restores:
            made.append(self.again("best", lambda: EarlyStopping("loss", patience=1000, restore_best_weights=True)))
        others: list[Callable[[], Any]] = [
            lambda: self.again("divergence", lambda: CheckDivergence(self.pick(1, 3))),
            lambda: Evaluates(*call.held),
            lambda: self.again("model", lambda: ModelCheckpoint(os.path.join(self.folder, "model-{epoch}.npz"))),
            lambda: self.again("csv", lambda: CSVLogger(os.path.join(self.folder, "log.csv"))),
        ]
        if not call.poisoned:
            others.append(lambda: CheckGradients(self.pick("raise", "skip")))
        if self.chance(0.4):
            made.append(self.pick(*others)())
        return made

    def again(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a callback of this name that an earlier fit has used, perhaps."""
        if name not in self.reused or self.chance(0.5):
            self.reused[name] = make()
        return self.reused[name]

    def with_checkpoint(self, side: Side, call: Fit) -> None:
        number = self.models.index(side.model)
        name = os.path.join(self.folder, f"checkpoints {number} {self.draw.randrange(2)}")
        every = self.pick("epoch", "2 epochs", "1 steps", "3 steps", "1000 seconds")
        best = "loss" if every == "epoch" and self.chance(0.5) else ""
        call.checkpoint = Checkpoint(name, every, keep=self.pick(1, 3), best=best)
        call.resume, call.restores, call.halves = self.chance(0.7), False, False
        there = self.folders.get(name)
        if there is not None and self.chance(0.85):  # the same training once more, longer or shorter
            call.resume, old = True, there.call
            call.x, call.y, call.batch_size = old.x, old.y, old.batch_size
            call.seed, call.shuffle = old.seed, old.shuffle
            if call.bad is not None and call.bad >= len(call.x) - 1:
                call.bad = None
            call.__post_init__()
            if call.incident is not None:
                call.incident.step %= call.steps

    def run_fit(self, side: Side, call: Fit) -> None:
        trainer, model, checkpoint = side.trainer, side.model, call.checkpoint
        does = None if call.incident is None else Does(call.incident)
        mine = [does] if call.incident is not None and self.rank == call.incident.rank else []
        options: dict[str, Any] = {
            "epochs": call.epochs, "batch_size": call.batch_size, "seed": call.seed, "shuffle": call.shuffle,
            "callbacks": [*call.callbacks, *mine], "progress": io.StringIO() if call.progress else False,
            "checkpoint": checkpoint, "resume": call.resume,
        }  # fmt: skip
        if call.validates:
            options["validation_data"] = call.held if call.validates == "arrays" else Rows(*call.held)
        before = trainer.steps
        data = call.data(self.folder, self.rank)
        history, error = self.call("fit", lambda: trainer.fit(data, **options))
        happened = any(self.comm.allgather(does is not None and does.happened))
        folder = None if checkpoint is None else self.folders.get(checkpoint.folder)
        if call.refuses_checkpoints:
            self.check(isinstance(error, DataError), f"{side.name}: {error!r} of a row that can't be read")
            self.compare(side)
            return
        if folder is not None:
            refused = not call.resume or folder.call.settings() != call.settings()
            if refused or (folder.total % call.steps and not trainer.strategy.synchronous):
                self.check(isinstance(error, CheckpointError), f"{side.name}: {error!r} of checkpoints")
                self.compare(side)
                return
        if not side.in_step or self.skips_steps(side, call):
            self.out_of_step(side, call, history, error, happened, folder)
            return
        first = 0 if folder is None else folder.total
        limit, wanted = call.limit(first)
        self.check(type(error) is (wanted or type(None)), f"{side.name}: {error!r} where {wanted} was wanted")
        if isinstance(error, DivergedError):
            model.finite = model.known = False
            self.compare(side)
            return
        if folder is not None and folder.state is not None:
            model.shadow.take_on(folder.state)
        elif folder is not None:
            model.known = False
        means = self.shadowed(side, call, first, limit, error)
        if trainer.strategy.synchronous:
            taken = trainer.steps - before
            self.check(taken == limit - first, f"{side.name}: {taken} steps, not {limit - first}")
        if error is None:
            self.check_history(side, call, history, first, limit, means)
        self.compare(side)

    def skips_steps(self, side: Side, call: Fit) -> bool:
        """Whether the rank of the incident may miss a step: no step waits for a rank without rows."""
        fewest = min(call.batch_size, call.rows - (call.steps - 1) * call.batch_size)
        return isinstance(side.trainer, SpareReplicasTrainer) and call.incident is not None and fewest < self.size

    def shadowed(
        self, side: Side, call: Fit, first: int, limit: int, error: BaseException | None
    ) -> list[dict[str, float]]:
        """Let the shadow do the same fit; return the means of its epochs."""
        model, keeps = side.model, call.kept(side.trainer.strategy.synchronous, first, limit, error and type(error))
        ends = range(call.steps, limit + 1, call.steps) if call.restores else []
        states: dict[int, State] = {total: {} for total in [*keeps, *ends]}
        means = model.shadow.train(call, first, limit, states)
        if call.skips and limit > first and isinstance(side.trainer, SpareReplicasTrainer):
            model.known = False  # a step is taken without the bad row
        if keeps and call.checkpoint is not None:
            newest = max(keeps)
            self.folders[call.checkpoint.folder] = Folder(call, newest, states[newest] if model.known else None)
        ended = error is None or isinstance(error, Terminated)
        ended |= isinstance(error, WantedError) and call.incident is not None and call.incident.event == "train_end"
        if call.restores and ended and means:
            if limit % call.steps:
                states[limit] = model.shadow.state()
            best = min(range(len(means)), key=lambda epoch: means[epoch]["loss"])
            rates = model.shadow.replica.learning_rates
            model.shadow.take_on(states[min((best + 1) * call.steps, limit)])
            model.shadow.replica.learning_rates = rates
        return means

    def out_of_step(
        self, side: Side, call: Fit, history: Any, error: BaseException | None, happened: bool, folder: Folder | None
    ) -> None:
        """Do a fit whose result depends on the ranks' speeds."""
        wanted = call.incident.error if happened and call.incident is not None else None
        allowed: set[Any] = {wanted or type(None)}
        if call.bad is not None:
            late = {NotFiniteError} if call.finds == "raise" else {DivergedError}
            allowed |= (late if call.poisoned else {DataError}) | {type(None)}
        self.check(type(error) in allowed, f"{side.name}: {error!r}, not one of {allowed}")
        side.model.known, checkpoint = False, call.checkpoint
        if isinstance(error, DivergedError) or (call.poisoned and not call.finds):
            side.model.finite = False
        if checkpoint is not None:
            self.comm.Barrier()
            if self.rank == 0:
                shutil.rmtree(checkpoint.folder, ignore_errors=True)
            self.folders.pop(checkpoint.folder, None)
        if error is None:
            epochs = call.epochs if folder is None else max(call.epochs, folder.total // call.steps)
            stops = happened and call.incident is not None and call.incident.kind == "stop"
            right = len(history) <= epochs if stops else len(history) == epochs
            self.check(right, f"{side.name}: a history of {len(history)} epochs, not {epochs}")
            if not stops and folder is None and not call.poisoned:
                self.check_counts(side, call, history)
        self.compare(side)

    def check_counts(self, side: Side, call: Fit, history: Any) -> None:
        """Check that all gradients of an epoch are counted."""
        trainer = side.trainer
        if not isinstance(trainer, ParameterServerTrainer):
            return
        visited, size = order(call.rows, 0, 0), call.batch_size
        sizes = [len(visited[step * size : (step + 1) * size]) for step in range(call.steps)]
        parts = sum(min(size, len(trainer.ranks_of_workers)) for size in sizes)
        counts = [sum(epoch.staleness) + epoch.dropped for epoch in history]
        self.check(counts == [parts] * call.epochs, f"{side.name}: {counts} gradients, not {parts} in each epoch")

    def check_history(
        self, side: Side, call: Fit, history: Any, first: int, limit: int, means: list[dict[str, float]]
    ) -> None:
        epochs = -(-limit // call.steps)
        stops = call.incident is not None and call.incident.event == "train_begin" and call.incident.kind == "stop"
        if limit == first and (stops or call.epochs * call.steps <= first):  # in the middle of an epoch, perhaps
            epochs = first // call.steps
        numbers = [epoch.epoch for epoch in history]
        self.check(numbers == list(range(1, epochs + 1)), f"{side.name}: a history of {numbers}, not {epochs} epochs")
        if first % call.steps or not side.model.known or not means or call.skips:
            return
        for there, here in zip(history[-len(means) :], means, strict=True):
            self.near(f"{side.name}: epoch {there.epoch}", there.as_dict(), here)

    def near(self, name: str, found: dict[str, Any], wanted: dict[str, float]) -> None:
        right = all(abs(found[key] - value) <= 1e-3 + 1e-2 * abs(value) for key, value in wanted.items())
        self.check(right, f"{name}: {found}, and one rank has {wanted}")

    # Other calls

    def evaluate(self, side: Side) -> None:
        call = draw_fit(self.draw, self.size)
        call.bad = None
        self.note(f"evaluate {side.name} on {call.rows} rows, {call.form}")
        x = call.x = np.nan_to_num(call.x)
        data = call.data(self.folder, self.rank)
        found = self.well("evaluate", lambda: side.trainer.evaluate(data))
        self.near(f"evaluate {side.name}", found, side.model.shadow.evaluate(x, call.y))

    def predict(self, side: Side) -> None:
        x = np.random.default_rng(7).normal(size=(self.pick(0, 1, 3, 20), FEATURES)).astype("float32")
        self.note(f"predict {side.name} of {len(x)} rows")
        found = self.well("predict", lambda: side.trainer.predict(x))
        wanted = side.model.shadow.replica.predict(x)
        near = found.shape == wanted.shape and np.allclose(found, wanted, rtol=1e-2, atol=1e-3)
        self.check(near, f"predict {side.name}: {found}, and one rank has {wanted}")

    def save(self, side: Side) -> None:
        path = os.path.join(self.folder, f"model {self.models.index(side.model)} {self.draw.randrange(2)}.npz")
        self.note(f"save {side.name} to {os.path.basename(path)}")
        self.well("save", lambda: side.trainer.save(path))
        self.files[path] = side.model.name, side.model.shadow.state()

    def load(self, side: Side) -> None:
        model = side.model
        paths = [path for path, (name, _) in self.files.items() if name == model.name]
        if model.finite and not paths:
            return
        if not paths:  # as it was in the beginning
            fresh = Model(model.name.split()[0], *model.name.split()[1:2], int(model.name.split()[2]))
            paths = [os.path.join(self.folder, f"fresh {self.models.index(model)}.npz")]
            if self.rank == 0:
                fresh.replica.save(paths[0])
            self.files[paths[0]] = model.name, fresh.replica.snapshot({})
        path = self.pick(*paths)
        self.note(f"load {side.name} from {os.path.basename(path)}")
        self.well("load", lambda: side.trainer.load(path))
        model.settle(self.files[path][1])
        model.finite = True
        self.compare(side)

    def edit(self, side: Side) -> None:
        if not isinstance(side.trainer, MirroredTrainer | CentralStorageTrainer):
            return
        self.note(f"edit {side.name}")
        trainer, replica = side.trainer, side.model.replica
        self.well("edit", lambda: trainer.edit(lambda: multiply(replica, 0.9)))
        multiply(side.model.shadow.replica, 0.9)
        self.compare(side)

    def record(self, side: Side) -> None:
        side.traced = not side.traced
        self.note(f"record {side.name}: {side.traced}")
        path, ranks = os.path.join(self.folder, "trace.json"), side.trainer.topology
        trace = self.well("Trace", lambda: Trace(path, ranks)) if side.traced else None
        self.well("record", lambda: side.trainer.record(trace))

    def surviving(self, side: Side) -> None:
        self.note(f"surviving {side.name}")
        found = self.well("surviving", lambda: side.trainer.surviving(lambda: side.trainer.topology.world.allreduce(1)))
        self.check(found == self.size, f"surviving gave {found}")

    def unusual(self, side: Side) -> None:
        """Make calls inside of calls, and other unusual calls."""
        trainer, x = side.trainer, np.ones((4, FEATURES), "float32")
        self.note(f"calls inside of calls of {side.name}")
        found = self.well("nested", lambda: trainer.surviving(lambda: trainer.predict(x)))
        self.check(len(found) == 4, "a prediction of four rows")
        self.well("record nothing", lambda: trainer.record(None))
        side.traced = False
        empty = x[:0], np.zeros(0, int)
        self.refused("nothing to evaluate", lambda: trainer.evaluate(*empty), "ArgumentError")
        self.refused("nothing to fit", lambda: trainer.fit(*empty, 1, progress=False), "ArgumentError")
        self.compare(side)

    def refuse(self, side: Side) -> None:
        """Make a call that is invalid on one rank, or differs there."""
        victim = self.draw.randrange(self.size)
        tries = refusals(side.trainer, self.folder, self.rank == victim)
        number = self.draw.randrange(ALONE if self.size == 1 else len(tries))
        self.note(f"refused call {number} on rank {victim} of {side.name}")
        _, error = self.call("refused", tries[number])
        self.check(error is not None, f"{side.name}: call {number} was not refused")
        if number == AFTER_AN_EPOCH:
            side.model.known = False
        self.compare(side)

    # Ends

    def second(self, side: Side) -> None:
        """Create another trainer on a replica that has one: it takes over a replica that every rank holds completely,
        or is refused."""
        name, make = self.kind_of_trainer()
        topology, former = self.topology(), side.trainer
        self.note(f"a second trainer, {name}, on what {side.name} has")
        trainer, error = self.call("second", lambda: make(side.model.replica, topology))
        if error is not None:
            right = UnavailableError, *([ArgumentError] if former.strategy.divides_state else [])
            self.check(isinstance(error, right), f"a second trainer met {error!r}")
            self.compare(side)
            return
        self.check(not former.strategy.divides_state, "a second trainer was not refused")
        self.sides.remove(side)
        side = Side(name, trainer, side.model)
        self.sides.append(side)
        self.refused(
            "predict without a replica", lambda: former.predict(np.zeros((2, FEATURES), "float32")), "ClosedError"
        )
        self.well("close", former.close)
        self.compare(side)

    def close(self, side: Side) -> None:
        self.note(f"close {side.name}")
        self.sides.remove(side)
        self.well("close", side.trainer.close)
        self.closed(side)

    def closed(self, side: Side) -> None:
        """Check that every rank's replica holds its complete state."""
        if self.chance(0.5):
            self.well("close again", side.trainer.close)
        if self.chance(0.5):
            x = np.zeros((2, FEATURES), "float32")
            self.refused("predict after close", lambda: side.trainer.predict(x), ClosedError.__name__)
        if side.model.finite:
            self.alike(f"{side.name}, closed", side.model.replica.state(), side.model.shadow.state())
        else:
            self.sides = [each for each in self.sides if each.model is not side.model]
            self.models.remove(side.model)

    def leave(self, side: Side) -> None:
        """An exception on all ranks leaves the `with` block; the replica is used again."""
        self.note(f"leave {side.name} by an error")
        self.sides.remove(side)

        def block() -> None:
            with side.trainer:
                side.trainer.predict(np.zeros((2, FEATURES + 1), "float32"))

        self.refused("leave", block, ArgumentError.__name__)
        self.closed(side)

    def close_topology(self, side: Side) -> None:
        """Close a topology, and with it its trainers."""
        topology = side.trainer.topology
        if topology not in self.topologies:
            return
        self.note(f"close the topology of {side.name} and others")
        self.topologies.remove(topology)
        self.well("Topology.close", topology.close)
        gone = [each for each in self.sides if each.trainer.topology is topology]
        self.sides = [each for each in self.sides if each not in gone]
        for each in gone:
            self.check(each.trainer.closed, f"{each.name} is open on a closed topology")
            self.closed(each)


ALONE, AFTER_AN_EPOCH = 15, 14  # refusals that need no other rank; the one that is refused after an epoch


def refusals(trainer: Any, folder: str, bad: bool) -> list[Callable[[], Any]]:
    """Return invalid calls; from ALONE on, invalid only because ranks differ. bad: whether this rank is the invalid
    one."""
    x, y = np.zeros((6, FEATURES), "float32"), np.zeros(6, int)
    missing = os.path.join(folder, "no such folder", "model.npz")
    return [
        lambda: trainer.fit(x, y, -1 if bad else 1, 2, progress=False),
        lambda: trainer.fit(x, y, 1, 0 if bad else 2, progress=False),
        lambda: trainer.fit(x[:, :-1] if bad else x, y, 1, 2, progress=False),
        lambda: trainer.fit(x, y[:-1] if bad else y, 1, 2, progress=False),
        lambda: trainer.fit(x, y + CLASSES if bad else y, 1, 2, progress=False),
        lambda: trainer.evaluate(x[:, :-1] if bad else x, y),
        lambda: trainer.predict(x[:, :-1] if bad else x),
        lambda: trainer.save(missing),
        lambda: trainer.load(missing),
        lambda: trainer.fit(Rows(x, y, 0 if bad else None), epochs=1, progress=False),
        lambda: trainer.fit(3 if bad else x, y, 1, 2, progress=False),
        lambda: trainer.fit(x, y, 1, 2, progress=False, resume=True),
        lambda: trainer.fit(x, y, 1, 2, progress=False, validation_data=(x, y[:-1]) if bad else (x, y)),
        lambda: trainer.fit(x, y, 1, 2, progress=False, callbacks=5 if bad else []),
        lambda: trainer.fit(x, y, 1, 2, progress=False, callbacks=[EarlyStopping("nothing")] if bad else []),
        lambda: trainer.fit(x, y, 2 if bad else 1, 2, progress=False),
        lambda: trainer.fit(x, y, 1, 2, seed=int(bad), progress=False),
        lambda: trainer.fit(x, y, 1, 2, progress=False, callbacks=[Evaluates(x, y)] if bad else []),
        lambda: trainer.evaluate(x, y) if bad else trainer.predict(x),
        lambda: trainer.save(missing) if bad else trainer.parameters_sha256(),
        lambda: trainer.fit(x + 1 if bad else x, y, 1, 2, progress=False),
        lambda: trainer.fit(x, y, 1, 2, progress=False, validation_data=(x, y) if bad else None),
        lambda: trainer.surviving(lambda: 1) and trainer.close() if bad else trainer.predict(x),
        lambda: trainer.fit(x, y, 1, 2, progress=False, checkpoint=os.path.join(folder, "one")) if bad
        else trainer.fit(x, y, 1, 2, progress=False),
    ]  # fmt: skip

"""EnsembleTrainer: several models of one task, each trained on a part of the ranks, whose votes are combined."""

import logging
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, TextIO, TypeVar

import numpy as np
from mpi4py import MPI

from allreduce.elastic.meeting import patient
from allreduce.elastic.ranks import (
    everywhere,
    lost,
    on_all,
    on_all_ranks,
    raise_together,
    recover,
    retry,
    root_value,
    survives,
    together,
    waiting,
)
from allreduce.errors import ClosedError, CopyError, RankLostError
from allreduce.topology import Topology
from trainers.apps.ensemble import model as ensemble_model
from trainers.apps.ensemble.drawn_rows import BAGGINGS, DrawnRows, taken
from trainers.apps.ensemble.model import MakeReplica, SavedEnsemble, SavedMember
from trainers.apps.ensemble.part_members import Callbacks, PartMembers
from trainers.apps.ensemble.voting import Scorer, Voting, shown
from trainers.apps.search.parts import Parts
from trainers.arguments import integer
from trainers.data import (
    Samples,
    Tree,
    keeping_generators,
    leaves,
    mapped,
    row_count,
    seed_generators,
    seed_of,
    sliced,
    structure_of,
    without_rows,
)
from trainers.errors import ArgumentError, TrainerError
from trainers.fit.checkpointing import Checkpoint
from trainers.fit.evaluation import means_of
from trainers.fit.source import BATCH_SIZE, NO_TARGETS, Given, Rows, checked_rows, tried
from trainers.group import GroupOwner, RankGroup, broadcast_arrays
from trainers.options.loader import Loader
from trainers.recovery.terminating import Terminated, Terminating
from trainers.replica import Replica, saved_config
from trainers.strategies.transforms.transform import Transform
from trainers.watching.history import Epoch, History

log = logging.getLogger("trainers")

ResultT = TypeVar("ResultT")


class Member(NamedTuple):
    """A member after `fit`. number: from 0. seed: of its replica and its rows. history: of its fit; empty if it failed.
    error: why it is missing; "" if it is there."""

    number: int
    seed: int
    history: History
    error: str


class EnsembleTrainer(GroupOwner):
    """Trains several members, each by a MirroredTrainer on a part of the ranks, and combines their predictions.

    The ranks form as many parts as there are members, or fewer if there are fewer ranks or if `ranks_per_member` says
    so. If there are more ranks, parts have several, and no rank is idle. A part trains members one after the other:
    part p the members p, p + parts, p + 2 parts, ... A member depends on its seed and its rows only, which follow from
    `seed` and its number: any number of ranks and parts trains the same members, to float tolerance.

    A member that can't be trained is missing: its loss becomes NaN, an exception is raised in its fit, or its rank
    fails (the other ranks survive that only under Open MPI's `mpirun --with-ft ulfm`). The others continue.

    Every method is collective: all ranks call it with the same arguments.

    Attributes: members: a Member for each. missing: the number of a missing member -> the reason. oob: the scores
    of the out-of-bag rows, with their number as "rows"; {} without bagging="rows". replicas: the replicas of the
    members that this rank's part trains, by their numbers.

        with EnsembleTrainer(lambda seed: NumpyNetwork([64, 32, 10], seed=seed), members=5, bagging="rows") as ensemble:
            ensemble.fit(x, y, epochs=10)
            outputs = ensemble.predict(x_test)
    """

    def __init__(
        self,
        make_replica: MakeReplica,
        members: int = 4,
        *,
        bagging: str | None = None,
        topology: Topology | None = None,
        ranks_per_member: int | None = None,
        trainer: Mapping[str, Any] | None = None,
        seed: int = 0,
        voting: str = "soft",
        logits: bool = False,
    ) -> None:
        """Divide the ranks, and make the replicas. Collective.

        make_replica: make_replica(seed) returns the replica of a member, of any framework; all members predict outputs
            of one shape. The random generators of Python, NumPy and PyTorch are seeded by this number before the call,
            and restored after it.
        members: the number of models.
        bagging: the rows of a member. None: all. "rows": a bootstrap sample, as many rows as there are, drawn with
            replacement; the member is then scored on the rows that it has not seen (out-of-bag; Breiman 1996).
            "shards": each row belongs to one member; the members' numbers of rows differ by one at the most.
        topology: the ranks; None for all ranks, on a new topology that is closed with the ensemble.
        ranks_per_member: the ranks that train a member together, at least. None: as many as there are for each, 1 if
            there are more members than ranks.
        trainer: options of MirroredTrainer, for every member: {"update": "sharded"}. With on_failure="continue" the
            remaining ranks of a part continue their member after a failure.
        seed: from which the seeds and the rows of all members are drawn.
        voting: "soft": the mean of the members' outputs. "hard": each member votes for one class, and the outputs are
            the shares of the votes.
        logits: softmax makes probabilities of the members' outputs before the vote: for replicas that predict logits,
            such as those of PyTorch modules that are trained by CrossEntropyLoss.

        Raises ArgumentError, DisagreementError, and the errors of make_replica, on all ranks.
        """
        self._make, self._bagging, self._seed = make_replica, bagging, seed
        self._options = dict(trainer or {})
        self._owns, self.closed = topology is None, False
        ranks = topology or (Topology.of_survivors() if survives() else Topology())
        row = f"EnsembleTrainer(members={members}, bagging={bagging}, seed={seed}, voting={voting}, logits={logits}, "
        row += f"trainer={sorted(self._options)})"
        parts: Parts | None = None
        try:
            ranks.agree([zlib.crc32(row.encode())], row, self._error(members, voting, logits))
            self.voting = Voting(voting, logits)
            self.seeds = tuple(seed_of(seed, number) >> 32 for number in range(members))
            self.members = [Member(number, each, History(), "") for number, each in enumerate(self.seeds)]
            self.missing: dict[int, str] = {}
            self.oob: dict[str, float] = {}
            parts = Parts(ranks, 1 if ranks_per_member is None else ranks_per_member, most=members)
            own = range(parts.index, members, parts.count)
            replicas = together(ranks.world, lambda: {number: self._made(number) for number in own})
        except Exception as error:
            if everywhere(error, ranks.world):
                if parts is not None:
                    parts.close()
                if self._owns:
                    ranks.close()
            elif isinstance(error, RankLostError):
                text = f"the ensemble was not created: {str(error).partition(';')[0]}; start the job again"
                raise RankLostError(text) from error
            raise
        self._index, self._part = parts.index, PartMembers(parts.topology, replicas, self._options)
        self.group = RankGroup(ranks, self)

    def _error(self, members: Any, voting: Any, logits: Any) -> Exception | None:
        """Return the error if an argument is invalid, or None. Local."""
        for name, value, least in (("members", members, 1), ("seed", self._seed, 0)):
            if text := integer(least).error(f"EnsembleTrainer: {name}", value):
                return ArgumentError(text)
        if self._bagging not in BAGGINGS:
            return ArgumentError(f'EnsembleTrainer: bagging={self._bagging!r}: use "rows", "shards" or None')
        if not callable(self._make):
            return ArgumentError("EnsembleTrainer: make_replica must be a function that takes a seed")
        if refused := sorted({"topology", "replica"} & set(self._options)):
            return ArgumentError(f"EnsembleTrainer: trainer: every member has its own {refused[0]}; leave it out")
        if not isinstance(self._options.get("allreduce", "auto"), str):
            return ArgumentError("EnsembleTrainer: trainer: allreduce must be a name: every part makes a backend")
        try:
            Voting(voting, logits)
        except ArgumentError as error:
            return error
        return None

    @property
    def replicas(self) -> dict[int, Replica]:
        """The replicas of the members that this rank's part trains, by their numbers."""
        return self._part.replicas

    def _made(self, number: int) -> Replica:
        with keeping_generators():
            seed_generators(self.seeds[number], gpus=False)
            made = self._make(self.seeds[number])
        if not isinstance(made, Replica):
            raise ArgumentError(f"make_replica must return a replica, such as a NumpyNetwork, not {made!r}")
        return made

    # Training

    def fit(
        self,
        x: Any,
        y: Any = None,
        epochs: int = 10,
        batch_size: int = BATCH_SIZE,
        *,
        sample_weight: Any = None,
        validation_data: Any = None,
        callbacks: Callbacks = (),
        checkpoint: Checkpoint | str | None = None,
        resume: bool = False,
        progress: bool | TextIO = True,
        shuffle: bool = True,
        class_weight: Any = None,
        transforms: Sequence[Transform] = (),
    ) -> list[Member]:
        """Train every member that is not missing; returns `members`, the same on all ranks. Collective.

        x, y, epochs, batch_size, sample_weight, validation_data: as for `MirroredTrainer.fit`: all rows, on every rank,
            arrays or a data set with rows by number, or a Loader of these without `rows`. A member gets its rows of
            them, and batch_size is the global batch of a member.
        callbacks: of every member's fit; or a function that returns those of a member, given its number: callbacks that
            write files need it.
        checkpoint, resume: as for `MirroredTrainer.fit`; every member has a folder of its own in the given folder.
        progress: print a line for each member that was trained, on a rank of its part. A stream: print them there.
        shuffle, class_weight, transforms: as for `MirroredTrainer.fit`, for every member.

        After SIGTERM the members that train write their checkpoints, and every rank ends with exit code 143 when all
        parts have done so.

        A member that fails is missing from then on, and rank 0 logs a warning. If all fail, the error of the first one
        is raised on all ranks, and none is missing.
        """
        settings: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size}
        given = Given.of(x, y, sample_weight)
        rows = self._run(lambda: self._checked("fit", given, settings))
        drawn = DrawnRows(self._bagging, self._seed, len(self.members), len(rows))  # the same error on all ranks
        self._run(lambda: self._check_kinds(rows))
        settings |= {"shuffle": shuffle, "class_weight": class_weight, "transforms": transforms}
        settings |= {"validation_data": validation_data, "resume": resume, "progress": False}
        rows_of = partial(taken, rows, drawn, given.prefetch)
        stream: Any = progress if hasattr(progress, "write") else None

        def tell(number: int, text: str) -> None:
            if progress and self._part.topology.rank == 0:
                print(f"member {number + 1} of {len(self.members)}: {text}", file=stream, flush=True)

        with Terminating() as sigterm:
            ended, first, stopped = self._train_own(rows_of, callbacks, checkpoint, settings, tell)
            with patient(self.topology):
                self._end_if(stopped, sigterm)
                self._run(lambda: self._share(ended, first))
        self._run(lambda: self._score(rows, drawn))
        return self.members

    def _train_own(
        self,
        rows_of: Callable[[int], Loader],
        callbacks: Callbacks,
        checkpoint: Checkpoint | str | None,
        settings: dict[str, Any],
        tell: Callable[[int, str], None],
    ) -> tuple[dict[int, tuple[list[Any], str]], Exception | None, Terminated | None]:
        """Train the members of this part that are not missing. Collective over the part.

        Returns, by number, the epochs of each and the text of the error that ended its training; the first error; and
        what SIGTERM has raised. tell: called with a member's number and how its training has ended.
        """
        ended: dict[int, tuple[list[Any], str]] = {}
        first: Exception | None = None
        for number in [each for each in self.replicas if each not in self.missing]:
            own = settings | {"checkpoint": _folder_of(checkpoint, number), "seed": self.seeds[number]}
            try:
                history, error = self._part.train(number, partial(rows_of, number), callbacks, own)
            except Terminated as met:
                return ended, first, met
            first = first or error
            text = "" if error is None else f"{type(error).__name__}: {error}"
            ended[number] = [epoch.as_dict() for epoch in history], text
            tell(number, f"failed: {text}" if error else str(history[-1]) if history else "no epochs")
        return ended, first, None

    def _end_if(self, stopped: Terminated | None, sigterm: Terminating) -> None:
        """Raise Terminated on all ranks if SIGTERM has come to one of them, when all parts have written checkpoints."""
        asked = stopped is not None or sigterm.here
        goes_on = self._run(lambda: on_all(self.group.comm, not asked, "learn of SIGTERM"))
        sigterm.agreed = True
        if not goes_on:
            raise stopped or Terminated("SIGTERM: the training of the ensemble has been stopped")

    def _checked(self, call: str, given: Given, settings: dict[str, Any] | None = None) -> Rows:
        """Check the arguments of a call on all ranks; returns arrays or a data set. Collective."""
        replica, settings = next(iter(self.replicas.values())), settings or {}  # every part has a member
        rows, row, error = tried(call, lambda: checked_rows(replica, given, settings), settings)
        if given.rows is not None:
            error = ArgumentError(f"{call}: members take rows by number: give a data set or arrays, without rows=")
        self.group.enter(row, error)
        assert rows is not None
        return rows

    def _check_kinds(self, rows: Rows) -> None:
        """Raise ArgumentError on all ranks if the members' outputs can't be combined. Collective."""
        self._check_members()
        row = rows.first[0] if isinstance(rows, Samples) else sliced(rows.data[0], slice(0, 1))
        everywhere = np.zeros(self.group.size, int)  # each rank of a part votes for this row
        self._voted(row, 1, dict.fromkeys(self._there, everywhere))

    def _same_kind(self, own: Sequence[tuple[int, Any]]) -> Any:
        """Return the structure of the outputs of all members; raise ArgumentError on all ranks if they differ.
        Collective. own: the number and the structure of members of this rank."""
        found = [pair for each in self.group.values(own, "the outputs of the members") for pair in each]
        if any(kind != found[0][1] for _, kind in found):
            kinds = "\n".join(f"  member {number}: {shown(kind)}" for number, kind in sorted(dict(found).items()))
            text = f"all members must predict outputs of one shape and dtype; for a row they are\n{kinds}"
            raise on_all_ranks(ArgumentError(text), self.group.comm)
        return found[0][1]

    def _share(self, ended: Mapping[int, tuple[list[Any], str]], first: Exception | None) -> None:
        """Tell all ranks how the members' trainings have ended. Collective. first: the first error of this part."""
        everyone = self.group.values([[number, *each] for number, each in ended.items()], "fit: the end of all members")
        found = {number: (epochs, text) for own in everyone for number, epochs, text in own}
        if not any(number in found and not found[number][1] for number in self._there):
            raise_together(self.group.comm, first)
        for number, (epochs, text) in found.items():
            history = History()
            history.extend(map(Epoch.of_dict, epochs))
            self.members[number] = Member(number, self.seeds[number], history, text)
            if text and number not in self.missing:
                self._miss(number, text)
        self._check_members()

    def _miss(self, number: int, reason: str) -> None:
        self.missing[number] = reason
        self.missing = dict(sorted(self.missing.items()))
        self.members[number] = self.members[number]._replace(error=reason)
        if self.group.rank == 0:
            log.warning("trainers: member %d of the ensemble is missing: %s", number, reason)

    def _check_members(self) -> None:
        if len(self.missing) == len(self.members):
            texts = "\n".join(f"  member {number}: {reason}" for number, reason in self.missing.items())
            raise on_all_ranks(TrainerError(f"the ensemble has no member any more:\n{texts}"), self.group.comm)

    def _score(self, rows: Rows, drawn: DrawnRows) -> None:
        """Compute the out-of-bag scores. Collective."""
        self.oob = {}
        if self._bagging == "rows" and not isinstance(rows, Samples):
            x, y, *_ = rows.data
            unseen = {number: drawn.unseen(number) for number in self._there}
            outputs, counts = self._voted(x, len(rows), unseen)
            seen = np.flatnonzero(counts)
            outputs, y = sliced(outputs, seen), sliced(y, seen)
            if seen.size:
                with suppress(ArgumentError):  # of models whose outputs can't be scored
                    self.oob = {**Scorer(outputs, y)(outputs), "rows": float(seen.size)}

    @property
    def _there(self) -> list[int]:
        return [number for number in range(len(self.members)) if number not in self.missing]

    # Predictions

    def predict(self, x: Any) -> Any:
        """Return the result of the members' vote for every row, on every rank. Collective.

        With voting="soft" the result is the mean of the outputs; with "hard" it is the share of the votes for each
        class. `argmax(axis=1)` of both is the class.
        """
        return self._run(lambda: self._result(*self._checked("predict", Given(x, NO_TARGETS)).data))

    def _result(self, x: Tree) -> Tree:
        """Return the result of the vote. Collective."""
        self._check_members()
        everything = np.arange(row_count(x))
        return self._voted(x, len(everything), dict.fromkeys(self._there, everything))[0]

    def _voted(self, x: Tree, rows: int, wanted: Mapping[int, np.ndarray]) -> tuple[Tree, np.ndarray]:
        """Return the mean of the votes for each row, and the number of its voters. Collective. Raises ArgumentError on
        all ranks if the members' outputs differ in shape or dtype.

        wanted: the rows for which a member votes; the ranks of its part divide them.
        """
        comm = self.group.comm
        pieces = together(comm, lambda: list(self._part.votes(x, wanted, self.voting)))
        kinds = {number: structure_of(votes) for number, _, votes in pieces}
        like = without_rows(self._same_kind(list(kinds.items())))
        totals = mapped(lambda array: np.zeros((rows, *array.shape[1:])), like)
        counts = np.zeros(rows)
        for _, at, votes in pieces:
            counts[at] += 1
            for total, vote in zip(leaves(totals), leaves(votes), strict=True):
                total[at] += vote
        with waiting(comm, "add the votes of the members"):
            for total in [counts, *leaves(totals)]:
                comm.Allreduce(MPI.IN_PLACE, total)
        dtypes, some = iter([array.dtype for array in leaves(like)]), np.maximum(counts, 1)
        return mapped(lambda total: np.ascontiguousarray((total.T / some).T, next(dtypes)), totals), counts

    def evaluate(self, x: Any, y: Any) -> dict[str, float]:
        """Return the scores of the vote, the same on all ranks. Collective.

        x, y: arrays. Of classes (y are class numbers or one-hot rows): "accuracy", and, if the outputs are
        probabilities, "loss", the mean negative log-likelihood. Of numbers: "loss", the mean squared error.
        """

        def scores() -> dict[str, float]:
            rows, targets, *_ = self._arrays("evaluate", x, y).data
            outputs = self._result(rows)
            return together(self.group.comm, lambda: Scorer(outputs, targets)(outputs))

        return self._run(scores)

    def evaluate_members(self, x: Any, y: Any) -> dict[int, dict[str, float]]:
        """Return the metrics of each member, by its number, as `MirroredTrainer.evaluate` does. Collective."""
        rows = self._run(lambda: self._arrays("evaluate_members", x, y))
        return self._run(lambda: self._metrics(rows))

    def _arrays(self, call: str, x: Any, y: Any) -> Rows:
        if y is None:
            raise ArgumentError(f"{call}: give arrays x and y")
        return self._checked(call, Given(x, y))

    def _metrics(self, rows: Rows) -> dict[int, dict[str, float]]:
        own = together(self.group.comm, lambda: self._part.metrics(self._there, rows))
        everyone = self.group.values(own, "the metrics of the members")
        of_member: dict[int, list[Any]] = {number: [] for number in self._there}
        for number, *found in [each for own in everyone for each in own]:
            of_member[number].append(found)
        metrics = {}
        for number, parts in of_member.items():
            names, counts, _ = parts[0]
            metrics[number] = means_of(names, counts, np.sum([sums for *_, sums in parts], axis=0), len(rows))
        return metrics

    # Files

    def save(self, path: str) -> None:
        """Write all members to exactly `path`, one file (.npz, no pickle). Collective; rank 0 writes.

        `EnsembleModel.load` reads it without MPI. Rank 0 needs memory for all members.
        Missing members are not in the file; it says why. Raises ModelFileError on all ranks.
        """
        self._run(lambda: self._save(path))

    def _save(self, path: str) -> None:
        self.group.enter("save")
        self._check_members()
        saved, states = [], {}
        placed = self.group.values(sorted(self.replicas), "save: the places of the members")
        for number in self._there:
            owner = next(rank for rank, own in enumerate(placed) if number in own)
            kind, config, states[number] = self._sent(number, owner)
            saved.append(SavedMember(number, self.seeds[number], kind, config))
            if self.rank:
                states.clear()
        whole = SavedEnsemble(saved, self.missing, self.voting)
        self.group.on_one(lambda: ensemble_model.write(path, whole, states))

    def _sent(self, number: int, owner: int) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
        """Return the class, the config and the state of a member that rank `owner` has, on all ranks. Collective."""
        replica, comm = self.replicas.get(number) if self.rank == owner else None, self.group.comm
        about = together(comm, lambda: replica and [type(replica).__name__, saved_config(replica)])
        kind, config = root_value(comm, about, "save: the config of a member", owner)
        state = together(comm, lambda: replica.state() if replica else {})
        return kind, config, broadcast_arrays(comm, state, owner, "save: a member")

    # Calls, failures, the end

    def _run(self, action: Callable[[], ResultT]) -> ResultT:
        """Make a collective call; after a failure the remaining ranks make it again, with the members they have."""
        self._check_open()
        return retry(self.group.topology, lambda _: action(), self._recovered)

    def _recovered(self, topology: Topology) -> Topology:
        return recover(topology, self._repair, self._survivors)

    def _survivors(self, topology: Topology) -> Topology:
        self.group.abandon()
        self._owns = True
        return topology.survivors(admit=False)

    def _repair(self, topology: Topology) -> Callable[[], None]:
        """Divide the remaining ranks into the parts that they were in. Collective."""
        self.group.replace(topology)
        part = topology.split(self._index, on_error="part")
        placed = self.group.values(sorted(self.replicas), "the places of the members")

        def commit() -> None:
            if not self._part.topology.closed:
                self._part.topology.abandon()
            self._part.topology = part
            for number in self._there:
                if not any(number in each for each in placed):
                    self._miss(number, "the ranks of its part were lost")

        return commit

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("this EnsembleTrainer is closed; create another one")

    def close(self) -> None:
        """Free what the ensemble created; the replicas stay usable. Collective. Closing twice does nothing; a failed
        rank is not an error."""
        if self.closed:
            return
        try:
            self.group.agree("close")
            self.closed = True
            self.group.release()
            self._part.topology.close()
            if self._owns:
                self.topology.close()
        except Exception as error:
            if lost(error) is None:
                raise
            self.abandon()

    def abandon(self) -> None:
        """Free everything without the other ranks. Local; the replicas stay usable."""
        self.closed = True
        self._part.topology.abandon()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CopyError('an EnsembleTrainer can\'t be copied or pickled; `save("ensemble.npz")` keeps the members')


def _folder_of(checkpoint: Checkpoint | str | None, number: int) -> Checkpoint | None:
    """Return the checkpoint of a member, in a folder of its own. Raises ArgumentError."""
    if checkpoint is None:
        return None
    whole = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    return replace(whole, folder=os.path.join(whole.folder, f"member{number}"))

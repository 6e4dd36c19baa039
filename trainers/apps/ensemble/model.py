"""Ensembles in one file: EnsembleModel, an ensemble that was loaded and predicts without MPI; how it is written."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from trainers.apps.ensemble.voting import Voting
from trainers.apps.serving.models import Model, NetworkModel
from trainers.data import Tree, cut, leaves, mapped, row_count
from trainers.errors import ArgumentError, ModelFileError
from trainers.files import model_file
from trainers.replica import Replica, load_saved
from trainers.replicas.numpy.categories import NETWORKS
from trainers.replicas.numpy.network import NumpyNetwork

KIND = "Ensemble"  # of its files
ROWS = 1024  # that a member predicts at a time

Arrays = dict[str, np.ndarray]
MakeReplica = Callable[[int], Replica]


class SavedMember(NamedTuple):
    """A member in a file. seed: from which it was made. kind: the class of its replica. config: to build it again."""

    number: int
    seed: int
    kind: str
    config: dict[str, Any]


class SavedEnsemble(NamedTuple):
    """What a file says about an ensemble, besides the arrays of the members.

    missing: the number of a member that has no model -> the reason.
    """

    members: list[SavedMember]
    missing: dict[int, str]
    voting: Voting

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {
            "members": [each._asdict() for each in self.members],
            "missing": [[number, reason] for number, reason in self.missing.items()],
            "voting": self.voting.kind,
            "logits": self.voting.logits,
        }

    @classmethod
    def of_json(cls, given: dict[str, Any]) -> "SavedEnsemble":
        """Make it from a result of `as_json`. Raises an error of several types if it is invalid."""
        members = [SavedMember(**each) for each in given["members"]]
        missing = {int(number): str(reason) for number, reason in given["missing"]}
        numbers = sorted([*(each.number for each in members), *missing])
        if not members or numbers != list(range(len(numbers))):
            raise ValueError(f"members {numbers}")
        if len({*given.get("weights", ())}) > 1:  # of former versions
            raise ValueError(f"members whose votes have weights, {given['weights']}")
        for each in members:
            types = type(each.number), type(each.seed), type(each.kind), type(each.config)
            if types != (int, int, str, dict):
                raise ValueError(f"member {each}")
        return cls(members, missing, Voting(given["voting"], given["logits"]))


def write(path: str, saved: SavedEnsemble, states: Mapping[int, Arrays]) -> None:
    """Write an ensemble to exactly `path`. states: of the members, by their numbers. Raises ModelFileError."""
    arrays = {f"{_prefix(number)}{name}": array for number, state in states.items() for name, array in state.items()}
    model_file.write(path, KIND, saved.as_json(), arrays)


def read(path: str) -> tuple[SavedEnsemble, dict[int, Arrays]]:
    """Read an ensemble; returns what the file says, and the states of the members. Raises ModelFileError."""
    config, arrays = model_file.read(path, KIND)
    try:
        saved = SavedEnsemble.of_json(config)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ModelFileError(f"{path} describes no ensemble that this version supports: {error!r}") from error
    states: dict[int, Arrays] = {}
    for member in saved.members:
        prefix = _prefix(member.number)
        state = {name.removeprefix(prefix): each for name, each in arrays.items() if name.startswith(prefix)}
        for name, each in state.items():
            model_file.check_numbers(path, name, each)
        states[member.number] = state
    if sum(map(len, states.values())) != len(arrays):
        raise ModelFileError(f"{path} is damaged: it has arrays that belong to no member")
    return saved, states


def _prefix(number: int) -> str:
    return f"member{number}."


def replica_of(path: str, member: SavedMember, state: Arrays, make_replica: MakeReplica | None) -> Replica:
    """Return the replica of a member that was read from `path`. make_replica: makes one from the seed, which is then
    loaded; None: only the networks of this library can be made. Raises ModelFileError and ArgumentError."""
    what = f"{path}, member {member.number}"
    if make_replica is None:
        if member.kind not in NETWORKS:
            raise ArgumentError(f"{what} is a {member.kind}, which a file can't make: give make_replica")
        return NETWORKS[member.kind].of_saved(what, dict(member.config), state)
    replica = make_replica(member.seed)
    if type(replica).__name__ != member.kind:
        raise ModelFileError(f"{what} is a {member.kind}, and make_replica makes a {type(replica).__name__}")
    try:
        load_saved(replica, what, dict(member.config), state)
    except ModelFileError as error:
        raise error if what in str(error) else ModelFileError(f"{what}: {error}") from error
    return replica


@contextmanager
def averaged(replica: Replica) -> Iterator[None]:
    """Context manager: the moving average, if the replica keeps one, is in the place of the parameters. Local."""
    try:
        if replica.average:
            replica.use_average()
        yield
    finally:
        replica.use_parameters()


class EnsembleModel(Model):
    """An ensemble that was loaded from a file, which predicts in this process alone. `load_model` and so the server
    take it too.

    voting: how the members vote. replicas: the members, by their numbers. missing: the number of a member that the file
    lacks, because its training failed -> the reason.
    """

    kind = KIND

    def __init__(self, saved: SavedEnsemble, replicas: Mapping[int, Replica]) -> None:
        self.voting, self.missing = saved.voting, saved.missing
        self.replicas = dict(replicas)
        first = next(iter(self.replicas.values()))
        self.columns = first.columns
        self.classes = () if first.columns is None else first.columns.classes
        if isinstance(first, NumpyNetwork):
            like = NetworkModel(first)
            first.use_parameters()
            self.shape, self.dtype, self.outputs = like.shape, like.dtype, like.outputs
            self.probabilities = like.probabilities

    @classmethod
    def load(cls, path: str, make_replica: MakeReplica | None = None) -> "EnsembleModel":
        """Load an ensemble that EnsembleTrainer.save wrote. Needs no MPI.

        make_replica: as for EnsembleTrainer; needed if the members are not networks of this library, for the structure
            of their models is not in the file. Raises ModelFileError and ArgumentError.
        """
        saved, states = read(path)
        members = saved.members
        return cls(saved, {each.number: replica_of(path, each, states[each.number], make_replica) for each in members})

    @property
    def members(self) -> int:  # type: ignore[override]
        """The number of models that vote."""
        return len(self.replicas)

    def check(self, rows: Tree, y: None = None) -> None:
        for replica in self.replicas.values():
            replica.check(rows, None)

    def predict(self, x: Tree) -> Tree:
        """Return the result of the vote for every row, as the trainer's `predict` does. Raises ArgumentError."""
        self.check(x)
        votes = {number: votes_of(replica, x, self.voting) for number, replica in self.replicas.items()}
        return self.voting.combined(votes)


def member_votes(replica: Replica, x: Tree, voting: Voting) -> Tree:
    """Return the votes of a replica for rows that it can predict at once. Local. Raises ArgumentError if its outputs
    are not a row for each of them."""
    votes, rows = voting.votes(replica.predict(x)), row_count(x)
    if any(each.ndim == 0 or len(each) != rows for each in leaves(votes)):
        shapes = ", ".join(str(each.shape) for each in leaves(votes))
        raise ArgumentError(f"a member must predict a row for each of the {rows} rows, and its outputs are {shapes}")
    return votes


def votes_of(replica: Replica, x: Tree, voting: Voting) -> Tree:
    """Return the votes of a replica for all rows of x. Local."""
    with averaged(replica), np.errstate(all="ignore"):  # the outputs show it if the model has diverged
        parts = [member_votes(replica, part, voting) for part in cut(x, max(1, row_count(x)), ROWS)]
    pieces = zip(*map(leaves, parts), strict=True)
    return mapped(lambda _: np.concatenate(next(pieces)), parts[0])

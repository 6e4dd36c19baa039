"""Makes the source of the rows of a call: the batches of a fit, the rows of an evaluation or of a prediction.

Rows are given as arrays, as a data set, as shards, or as a loader. All ranks check them together here, so that every
rank raises the same error; nothing above this module looks at the arguments again.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from allreduce.errors import DisagreementError
from allreduce.transport.control import on_all_ranks
from trainers.arguments import integer, require
from trainers.data import Arrays, Batches, BatchSource, Collate, Samples, as_arrays, as_data
from trainers.datasets.shards import ShardRows
from trainers.errors import ArgumentError, TrainerError
from trainers.fit import prefetch as fetching
from trainers.fit.loader import LoaderBatches
from trainers.fit.shards import OwnRows
from trainers.fit.weights import ClassWeights
from trainers.group import RankGroup
from trainers.options.loader import DIVIDED, Loader
from trainers.replica import Replica, check_rows
from trainers.strategies.interface import Strategy

BATCH_SIZE = 100  # rows of a global batch, by default
NO_TARGETS = object()  # passed as y for a prediction, which has no targets
SourceT = TypeVar("SourceT")
Rows = Arrays | Samples


class Given(NamedTuple):
    """The rows of a call as the user gives them; see Trainer.fit and Loader."""

    x: Any
    y: Any = None
    weights: Any = None
    collate: Collate | None = None
    rows: Any = None
    steps: Any = None
    prefetch: bool | None = None

    @classmethod
    def of(cls, x: Any, y: Any = None, weights: Any = None) -> "Given":
        """Return the rows of a fit or an evaluation. x: may be a Loader."""
        if not isinstance(x, Loader):
            return cls(x, y, weights)
        pairs = isinstance(x.data, tuple) and x.rows is None and y is None and weights is None
        given = cls.to_validate(x.data) if pairs else cls(x.data, y, weights)
        return given._replace(collate=x.collate, rows=x.rows, steps=x.steps, prefetch=x.prefetch)

    @classmethod
    def to_validate(cls, data: Any) -> "Given":
        """Return the argument validation_data of a fit: (x, y), (x, y, weights), a data set, or a Loader."""
        if isinstance(data, Loader):
            return cls.of(data)
        if isinstance(data, tuple) and len(data) == 3:
            is_data_set = all(isinstance(each, tuple | list) and len(each) in (2, 3) for each in data)
            return cls(data) if is_data_set else cls(*data)
        return cls(*data) if isinstance(data, tuple | list) and len(data) == 2 else cls(data)


def to_train(strategy: Strategy, given: Given, settings: dict[str, Any]) -> BatchSource:
    """Return the batches of a fit. Raises the same error on all ranks if they, or the settings, are invalid or differ.
    Collective. settings: the other arguments of the fit, by name."""
    if given.rows is not None and not isinstance(given.x, ShardRows):
        settings = settings | {"rows": given.rows, "steps": given.steps}

    source, row, error = tried("fit", lambda: _batches(strategy, given, settings), settings)
    try:
        enter(strategy.group, row, error, settings)
        assert source is not None
        try:
            source.meet(strategy.group.values)
        except TrainerError as refused:
            raise on_all_ranks(refused, strategy.group.comm) from None
    except BaseException:
        if source is not None:
            source.close()
        raise
    return source


def to_evaluate(strategy: Strategy, call: str, given: Given) -> Rows | Loader:
    """Return the rows to evaluate. Raises the same error on all ranks if they differ or are invalid. Collective."""
    x, group = given.x, strategy.group
    if isinstance(x, ShardRows):
        given = given._replace(x=OwnRows(x, group), rows=given.rows or DIVIDED)
    if given.rows is None:
        return to_read(strategy, call, given)
    settings = {"rows": given.rows, "steps": given.steps}
    error = None
    try:
        _check_loader(strategy, call, given)
    except ArgumentError as refused:
        error = refused
    group.enter(described(call, "x of a loader", settings), error)
    return Loader(given.x, given.rows, given.steps, given.collate)


def to_read(strategy: Strategy, call: str, given: Given, settings: Mapping[str, Any] | None = None) -> Rows:
    """Return rows that all ranks have: arrays or a data set. Raises the same error on all ranks if they are invalid or
    differ. Collective."""
    rows, row, error = tried(call, lambda: checked_rows(strategy.replica, given, {}), settings or {})
    enter(strategy.group, row, error, settings or {})
    assert rows is not None
    return rows


def tried(
    call: str, make: Callable[[], SourceT], settings: Mapping[str, Any]
) -> tuple[SourceT | None, str, Exception | None]:
    """Return make(), the call as text, and the error or None. Local."""
    source, error = None, None
    try:
        source = make()
    except TrainerError as refused:
        error = refused
    except (ValueError, TypeError) as refused:
        error = ArgumentError(f"{call}: {refused}")
    except Exception as refused:  # of a data set or a model; the other ranks must not wait for this one
        error = ArgumentError(f"{call}: {type(refused).__name__}: {refused}")
    return source, described(call, str(source), settings), error


def described(call: str, data: str, settings: Mapping[str, Any]) -> str:
    """Return a call as text, which ranks compare."""
    return f"{call}: {', '.join([data, *(f'{name}={value}' for name, value in settings.items())])}"


def enter(group: RankGroup, row: str, error: Exception | None, settings: Mapping[str, Any]) -> None:
    """As RankGroup.enter. If the ranks differ only in their rows, the error also says that the trainer divides the rows
    itself. row: the call as text."""
    try:
        group.enter(row, error)
    except DisagreementError as differ:
        text = str(differ)
        call, end = f": {row.partition(': ')[0]}: ", described("", "", settings)[2:]
        if all(call in line and line.endswith(end) for line in text.splitlines()[1:]):
            advice = "A trainer takes all rows, the same on every rank, and divides each batch among the ranks itself"
            differ.args = (f"{text}\n{advice}",)
        raise


# Each kind of rows. Local; a data set or a model may raise anything


def checked_rows(replica: Replica, given: Given, settings: Mapping[str, Any]) -> Rows:
    """Return arrays or a data set, which the replica accepts. Local."""
    weigh: ClassWeights | None = settings.get("class_weight")
    if weigh is not None:
        weigh.check(arrays=given.y is not None)
    rows: Rows
    if given.y is None or given.collate is not None:
        rows = _samples(given)
        first = rows.first if weigh is None else weigh(rows.first)
    else:
        rows = _arrays(given)
        if weigh is not None:
            rows = Arrays(weigh.of_all(rows.data))
        first = rows.data
        if len(first) > 2 and not first[2].any():
            raise ArgumentError("sample_weight (times class_weight) is 0 for all rows: there is nothing to train on")
    _check_settings(settings)
    check_rows(replica, first if len(first) > 1 else (*first, None))
    return rows


def _samples(given: Given) -> Samples:
    if given.y is not None:
        raise ArgumentError("collate is for data sets, whose rows are pairs: leave out collate, or y")
    if given.weights is not None:
        raise ArgumentError("sample_weight is for arrays: a data set gives weights in its rows, (x, y, weight)")
    return given.x if isinstance(given.x, Samples) else Samples(given.x, given.collate)


def _arrays(given: Given) -> Arrays:
    x, y, weights = given[:3]
    if y is NO_TARGETS:
        return Arrays((as_arrays(x),))
    if isinstance(x, list) and len(x) != len(y) and all(getattr(each, "ndim", 0) > 0 for each in x):
        raise ArgumentError(
            f"x is a list of {len(x)} arrays, and a list is one array of rows: for a model of several inputs give a "
            "tuple, x=(a, b), or a dict"
        )
    return Arrays(as_data((x, y) if weights is None else (x, y, weights)))


def _batches(strategy: Strategy, given: Given, settings: Mapping[str, Any]) -> BatchSource:
    weigh, replica = settings.get("class_weight"), strategy.replica
    own: Any = {"part": strategy.part, "parts": strategy.parts, "seed": settings["seed"]}
    own |= {"micro_batch": strategy.micro_batch, "weigh": weigh}
    numbered: Any = {"batch_size": settings["batch_size"], "shuffle": settings["shuffle"]}
    if isinstance(given.x, ShardRows):
        _check_shards(strategy, given, weigh)
        _check_settings(settings)
        return _accepted(replica, Batches(given.x, **numbered, **own))
    if given.rows is not None:
        _check_fit_of_loader(strategy, given, settings)
        _check_settings(settings)
        if weigh is not None:
            weigh.check(arrays=False)
        loader, saves = None if strategy.part is None else given.x, settings["checkpoint"] is not None
        return _accepted(replica, LoaderBatches(loader, given.rows, given.collate, given.steps, saves=saves, **own))
    rows = checked_rows(replica, given, settings)
    ahead = fetching.batches_ahead(given.x, given.y, given.prefetch, strategy.micro_batch is not None)
    return Batches(rows, ahead=ahead, **numbered, **own)


def _accepted(replica: Replica, source: BatchSource) -> BatchSource:
    """Return a source whose first rows the replica accepts; closes it if it raises an error."""
    try:
        if (first := source.first()) is not None:
            check_rows(replica, first)
    except BaseException:
        source.close()
        raise
    return source


def _check_shards(strategy: Strategy, given: Given, weigh: ClassWeights | None) -> None:
    others = {"y": given.y, "sample_weight": given.weights, "class_weight": weigh}
    others |= {"collate": given.collate, "rows": given.rows, "prefetch": given.prefetch}
    if names := [name for name, value in others.items() if value is not None]:
        raise ArgumentError(f"fit: shards do not take {', '.join(names)}: leave it out, or load the rows as arrays")


def _check_loader(strategy: Strategy, call: str, given: Given) -> None:
    if given.y is not None or given.weights is not None:
        raise ArgumentError(
            f'{call}: a Loader with rows="{given.rows}" reads batches (x, y) or (x, y, weights): leave out its rows, '
            "or y and sample_weight"
        )
    if not hasattr(given.x, "__iter__") and not (given.x is None and strategy.part is None):
        raise ArgumentError(f"{call}: a {type(given.x).__name__} is no loader: it can't be iterated")


def _check_fit_of_loader(strategy: Strategy, given: Given, settings: Mapping[str, Any]) -> None:
    ignores = strategy.part is None  # a server may have anything
    _check_loader(strategy, "fit", given._replace(x=None) if ignores else given)
    if reason := strategy.rows_error(given.rows):
        raise ArgumentError(f"fit: {reason}")
    if ignores and given.rows == DIVIDED and given.x is not None:
        raise ArgumentError(
            f'fit: rows="{DIVIDED}": this rank is a server, which computes nothing, so its rows would be lost: give it '
            "x=None, and divide the rows among the workers"
        )
    if settings["batch_size"] != BATCH_SIZE or settings["shuffle"] is not True:
        raise ArgumentError("fit: batch_size and shuffle are the loader's: leave them out")


def _check_settings(settings: Mapping[str, Any]) -> None:
    for name, least in (("epochs", 0), ("batch_size", 1), ("seed", 0)):
        require(integer(least).error(name, settings.get(name, least)))

"""Tuning: which options of `python -m trainers` a search varies, from a YAML file in the format of black-box tuners.

    goal: MAXIMIZE
    hyperparameterMetricTag: val_accuracy
    maxTrials: 30
    maxParallelTrials: 2
    params:
    - {parameterName: lr, type: DOUBLE, minValue: 0.0001, maxValue: 0.1, scaleType: UNIT_LOG_SCALE}
    - {parameterName: optimizer, type: CATEGORICAL, categoricalValues: [adam, momentum]}

The keys are those of AI Platform's HyperparameterSpec. The classes here are the schema of the file: YAML gives texts,
of which pydantic makes the values.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from allreduce.notices import shown
from trainers.apps.search.options import arguments, has_value, varied
from trainers.apps.search.trial import Trial
from trainers.cli.options import BY_NAME, parse
from trainers.errors import ArgumentError, as_error

SENSE = {"MAXIMIZE": "accuracy", "MINIMIZE": "loss"}  # the end of the metrics' names


class Keys(BaseModel):
    """Keys of the file. Other keys are refused, and values of other types."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Parameter(Keys):
    """An option that the search varies. name: of the option."""

    name: Annotated[str, AfterValidator(lambda name: varied(name).name)] = Field(alias="parameterName")


class Range(Parameter):
    """An option whose value is a number from `low` to `high`."""

    low: FiniteFloat = Field(alias="minValue")
    high: FiniteFloat = Field(alias="maxValue")
    scale: Literal["UNIT_LINEAR_SCALE", "UNIT_LOG_SCALE"] = Field("UNIT_LINEAR_SCALE", alias="scaleType")

    @model_validator(mode="after")
    def _fits(self) -> "Range":
        if self.low > self.high:
            raise ArgumentError(f"minValue {self.low} is larger than maxValue {self.high}")
        if self.log and self.low <= 0:
            raise ArgumentError(f"{self.scale} needs a minValue > 0, got {self.low}")
        return self

    @property
    def log(self) -> bool:
        """Whether the logarithms are spread evenly."""
        return self.scale == "UNIT_LOG_SCALE"

    @property
    def extremes(self) -> tuple[Any, ...]:
        """The values that show whether the option takes the whole range."""
        return self.low, self.high


class Double(Range):
    type: Literal["DOUBLE"]

    def suggest(self, trial: Trial) -> float:
        """Return a value for this trial. Collective over the trial's ranks."""
        return trial.suggest_float(self.name, self.low, self.high, log=self.log)


class Integer(Range):
    type: Literal["INTEGER"]
    low: int = Field(alias="minValue")
    high: int = Field(alias="maxValue")

    def suggest(self, trial: Trial) -> int:
        """Return a value for this trial. Collective over the trial's ranks."""
        return trial.suggest_int(self.name, self.low, self.high, log=self.log)


class Choices(Parameter):
    """An option whose value is one of several."""

    values: Sequence[Any]

    @model_validator(mode="after")
    def _fits(self) -> "Choices":
        if len(set(self.values)) < max(1, len(self.values)):
            raise ArgumentError(f"the values must be different texts or numbers, got {self.values!r}")
        if not has_value(BY_NAME[self.name]) and not {str(each).lower() for each in self.values} <= {"true", "false"}:
            raise ArgumentError(f"this option is given or not: its values are true and false, got {self.values!r}")
        return self

    @property
    def extremes(self) -> tuple[Any, ...]:
        """All values, for any of them may be one that the option does not take."""
        return tuple(each if has_value(BY_NAME[self.name]) else str(each).lower() == "true" for each in self.values)

    def suggest(self, trial: Trial) -> Any:
        """Return a value for this trial. Collective over the trial's ranks."""
        return trial.suggest_categorical(self.name, self.extremes)


class Categorical(Choices):
    type: Literal["CATEGORICAL"]
    values: list[str] = Field(alias="categoricalValues")


class Discrete(Choices):
    type: Literal["DISCRETE"]
    values: list[int | FiniteFloat] = Field(alias="discreteValues")


class Halving(Keys):
    """Successive halving. first: the epochs after which the first trials may end. factor: of the next such epochs."""

    first: int = Field(1, alias="firstEpochs", ge=1)
    factor: int = Field(3, ge=2)


class Tuning(Keys):
    """The settings of a search. tag: the metric, or None. parallel: the largest number of trials at a time, or None.
    prunes: whether trials that are worse than others end early."""

    goal: Literal["MAXIMIZE", "MINIMIZE"]
    tag: Literal["val_accuracy", "val_loss", "accuracy", "loss"] | None = Field(None, alias="hyperparameterMetricTag")
    trials: int = Field(10, alias="maxTrials", ge=1)
    parallel: int | None = Field(None, alias="maxParallelTrials", ge=1)
    prunes: bool = Field(True, alias="enableTrialEarlyStopping")
    halves: Halving | None = Field(None, alias="successiveHalving")
    parameters: list[Annotated[Double | Integer | Categorical | Discrete, Field(discriminator="type")]] = Field(
        alias="params", min_length=1
    )

    @model_validator(mode="after")
    def _fits(self) -> "Tuning":
        if not self.metric.endswith(SENSE[self.goal]):
            raise ArgumentError(
                f"{self.goal} would find the worst {self.metric}; give the other goal, or another metric"
            )
        if self.halves is not None and not self.prunes:
            raise ArgumentError(
                "enableTrialEarlyStopping: false can't be used with successiveHalving, which ends trials early"
            )
        names = [each.name for each in self.parameters]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ArgumentError(f"params: {', '.join(twice)} is there twice")
        return self

    @property
    def metric(self) -> str:
        """The metric of an epoch that the search compares."""
        return self.tag or f"val_{SENSE[self.goal]}"

    @property
    def direction(self) -> str:
        return self.goal.lower()

    def suggest(self, trial: Trial) -> list[str]:
        """Return the arguments of a trial. Collective over the trial's ranks.

        A parameter that has no effect with the values of others (--momentum with --optimizer adam) is left out.
        """
        return arguments(self._values(lambda each: each.suggest(trial)))

    def _values(self, value_of: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the values of the parameters that have an effect: each after the parameters that it needs."""
        values: dict[str, Any] = {}
        order = list(BY_NAME)  # an option is declared after the options that it needs
        for each in sorted(self.parameters, key=lambda each: order.index(each.name)):
            if all(_meets(values.get(name), allowed) for name, allowed in self._needs(each).items()):
                values[each.name] = value_of(each)
        return values

    def _needs(self, parameter: Parameter) -> dict[str, tuple[str, ...]]:
        """Return the other parameters on whose values this one depends, and these values; () for any."""
        option, names = BY_NAME[parameter.name], {each.name for each in self.parameters}
        needs = {**option.needs, **({"strategy": option.strategies} if option.strategies else {})}
        return {name: values for name, values in needs.items() if name in names}

    def check(self, base: Sequence[str]) -> None:
        """Raise ArgumentError if an option does not take the values of its parameter. base: arguments of all trials."""
        extremes = {each.name: each.extremes for each in self.parameters}
        usual = {name: values[0] for name, values in extremes.items()}
        for parameter in self.parameters:
            needed = {
                name: next((each for each in extremes[name] if _meets(each, allowed)), (*allowed, True)[0])
                for name, allowed in self._needs(parameter).items()
            }
            for value in parameter.extremes:
                self._check_value(base, parameter, usual | needed | {parameter.name: value})

    def _check_value(self, base: Sequence[str], parameter: Parameter, values: Mapping[str, Any]) -> None:
        try:
            parse([*base, *arguments(self._values(lambda each: values[each.name]))], shown=False)
        except ArgumentError as error:
            value = values[parameter.name]
            raise ArgumentError(f"parameter {parameter.name}: {value!r} can't be used: {error}") from error


def _meets(value: Any, allowed: tuple[str, ...]) -> bool:
    """Return whether an option has one of the allowed values; () for any value, but the option must be given."""
    return str(value) in allowed if allowed else bool(value)


def load(path: str) -> Tuning:
    """Read a YAML file. Raises ArgumentError, which names the key."""
    with as_error(ArgumentError, f"--config {path} can't be read"), open(path, encoding="utf-8") as file:
        try:
            content = yaml.load(file, yaml.BaseLoader)
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: of bytes that are no UTF-8
            raise ArgumentError(f"--config {path} is no YAML file: {error}") from error
    try:
        return read(content)
    except ArgumentError as error:
        raise ArgumentError(f"--config {path}: {error}") from error


def read(content: Any) -> Tuning:
    """Return the Tuning that the content of a YAML file describes. Raises ArgumentError, which names the keys."""
    try:
        return Tuning.model_validate(content)
    except ValidationError as error:
        raise ArgumentError("; ".join(map(_text, error.errors(include_url=False)))) from error


def _text(mistake: Any) -> str:
    """Return a mistake that pydantic has found as text: its place in the file, and what is expected there."""
    place = ".".join(map(str, mistake["loc"])) or "the file"
    own = mistake["type"] == "value_error"
    return f"{place}: {mistake['ctx']['error'] if own else mistake['msg'] + ', got ' + shown(mistake['input'], 200)}"

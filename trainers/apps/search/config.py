"""Tuning: which options of `python -m trainers` a search varies, from a YAML file in the format of black-box tuners.

    goal: MAXIMIZE
    hyperparameterMetricTag: val_accuracy
    maxTrials: 30
    maxParallelTrials: 2
    params:
    - {parameterName: lr, type: DOUBLE, minValue: 0.0001, maxValue: 0.1, scaleType: UNIT_LOG_SCALE}
    - {parameterName: optimizer, type: CATEGORICAL, categoricalValues: [adam, momentum]}

The keys are those of AI Platform's HyperparameterSpec; its file, with `trainingInput: hyperparameters:` around them,
is read too. The classes here are the schema of the file, which pydantic checks.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from allreduce.notices import near
from trainers.apps.search.options import arguments, has_value, varied
from trainers.apps.search.trial import Trial
from trainers.arguments import is_number
from trainers.cli.options import BY_NAME, parse
from trainers.errors import ArgumentError

DIRECTIONS = {"MAXIMIZE": "maximize", "MINIMIZE": "minimize"}
SENSE = {"MAXIMIZE": "accuracy", "MINIMIZE": "loss"}  # the end of the metrics' names
LINEAR, REVERSE_LOG = "UNIT_LINEAR_SCALE", "UNIT_REVERSE_LOG_SCALE"
LARGEST = 1 << 53  # in the file, larger ones may not be exact


def _number(value: Any) -> Any:
    """Return a value that is a number, or a text of one: AI Platform's examples quote them, and YAML reads 1e-3 so."""
    try:
        if is_number(float(value) if isinstance(value, str) else value):
            return value
    except ValueError:
        pass
    raise ArgumentError(f"must be a number, got {value!r}")


Number = Annotated[Any, AfterValidator(_number)]


class Keys(BaseModel):
    """Keys of the file. Other keys are refused, and values of other types. A key without a value counts as absent: of a
    parameter any key, for files may list those of all types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, content: Any) -> Any:
        if type(content) is not dict:
            return content
        absent = [key for key, each in content.items() if each is None and (cls is not Tuning or key in cls.names())]
        return {key: each for key, each in content.items() if key not in absent}

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the keys in the file."""
        return [field.alias or name for name, field in cls.model_fields.items()]


class Parameter(Keys):
    """An option that the search varies. name: of the option."""

    name: Annotated[str, AfterValidator(lambda name: varied(name).name)] = Field(alias="parameterName")


class Range(Parameter):
    """An option whose value is a number from `low` to `high`."""

    type: Literal["INTEGER", "DOUBLE"]
    low: Number = Field(alias="minValue")
    high: Number = Field(alias="maxValue")
    scale: Literal["UNIT_LINEAR_SCALE", "UNIT_LOG_SCALE", "UNIT_REVERSE_LOG_SCALE"] = Field(
        "UNIT_LINEAR_SCALE", alias="scaleType"
    )

    @model_validator(mode="after")
    def _fits(self) -> "Range":
        low, high = float(self.low), float(self.high)
        if self.type == "INTEGER" and not all(each.is_integer() and abs(each) < LARGEST for each in (low, high)):
            raise ArgumentError(f"minValue and maxValue of an INTEGER must be integers, got {low} and {high}")
        if low > high:
            raise ArgumentError(f"minValue {self.low} is larger than maxValue {self.high}")
        if self.scale != LINEAR and low <= 0:
            raise ArgumentError(f"{self.scale} needs a minValue > 0, got {self.low}")
        return self

    @property
    def extremes(self) -> tuple[Any, ...]:
        """The values that show whether the option takes the whole range."""
        kind = int if self.type == "INTEGER" else float
        return kind(float(self.low)), kind(float(self.high))

    def suggest(self, trial: Trial) -> Any:
        """Return a value for this trial. Collective over the trial's ranks."""
        suggest: Callable[..., Any] = trial.suggest_int if self.type == "INTEGER" else trial.suggest_float
        return self._value(suggest(self._name_in_study, *self.extremes, log=self.scale != LINEAR))

    @property
    def _name_in_study(self) -> str:
        return f"{self.name}, reversed" if self.scale == REVERSE_LOG else self.name

    def _value(self, suggested: Any) -> Any:
        """Return the option's value for the value in the study: a reversed scale is a logarithmic one, mirrored."""
        low, high = self.extremes
        return min(high, max(low, low + high - suggested)) if self.scale == REVERSE_LOG else suggested

    def found(self, params: Mapping[str, Any]) -> Any:
        """Return the option's value in the parameters of a trial; None if it failed before."""
        suggested = params.get(self._name_in_study)
        return None if suggested is None else self._value(suggested)


class Choices(Parameter):
    """An option whose value is one of several."""

    values: list[Any]

    @model_validator(mode="after")
    def _fits(self) -> "Choices":
        texts = {str(each) for each in self.values}
        if len(texts) < max(1, len(self.values)) or not all(
            isinstance(each, str | int | float) for each in self.values
        ):
            raise ArgumentError(f"the values must be different texts or numbers, got {self.values!r}")
        if not has_value(BY_NAME[self.name]) and not {text.lower() for text in texts} <= {"true", "false"}:
            raise ArgumentError(f"this option is given or not: its values are true and false, got {self.values!r}")
        return self

    @property
    def extremes(self) -> tuple[Any, ...]:
        """All values, for any of them may be one that the option does not take."""
        return tuple(each if has_value(BY_NAME[self.name]) else str(each).lower() == "true" for each in self.values)

    def suggest(self, trial: Trial) -> Any:
        """Return a value for this trial. Collective over the trial's ranks."""
        return trial.suggest_categorical(self.name, self.extremes)

    def found(self, params: Mapping[str, Any]) -> Any:
        """Return the option's value in the parameters of a trial; None if it failed before."""
        return params.get(self.name)


class Categorical(Choices):
    type: Literal["CATEGORICAL"]
    values: list[Any] = Field(alias="categoricalValues")


class Discrete(Choices):
    type: Literal["DISCRETE"]
    values: list[Number] = Field(alias="discreteValues")


class Halving(Keys):
    """Successive halving. first: the epochs after which the first trials may end. factor: of the next such epochs."""

    first: int = Field(1, alias="firstEpochs", ge=1)
    factor: int = Field(3, ge=2)


def _metric_of(known: dict[str, Any]) -> Any:
    return f"val_{SENSE[known['goal']]}"


class Tuning(Keys):
    """The settings of a search. metric: of an epoch. parallel: the largest number of trials at a time, or None. prunes:
    whether trials that are worse than others end early."""

    goal: Literal["MAXIMIZE", "MINIMIZE"]
    metric: Literal["val_accuracy", "val_loss", "accuracy", "loss"] = Field(
        alias="hyperparameterMetricTag", default_factory=_metric_of
    )
    trials: int = Field(10, alias="maxTrials", ge=1)
    parallel: int | None = Field(None, alias="maxParallelTrials", ge=1)
    prunes: bool = Field(True, alias="enableTrialEarlyStopping")
    halves: Halving | None = Field(None, alias="successiveHalving")
    parameters: list[Annotated[Range | Categorical | Discrete, Field(discriminator="type")]] = Field(
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
    def direction(self) -> str:
        return DIRECTIONS[self.goal]

    def suggest(self, trial: Trial) -> list[str]:
        """Return the arguments of a trial. Collective over the trial's ranks.

        A parameter that has no effect with the values of others (--momentum with --optimizer adam) is left out.
        """
        return arguments(self._values(lambda each: each.suggest(trial)))

    def _values(self, value_of: Callable[[Range | Choices], Any]) -> dict[str, Any]:
        """Return the values of the parameters that have an effect: each after the parameters that it needs."""
        values: dict[str, Any] = {}
        order = list(BY_NAME)  # an option is declared after the options that it needs
        for each in sorted(self.parameters, key=lambda each: order.index(each.name)):
            if self._applies(each, values):
                values[each.name] = value_of(each)
        return values

    def _needs(self, parameter: Parameter) -> dict[str, tuple[str, ...]]:
        """Return the other parameters on whose values this one depends, and these values; () for any."""
        option, names = BY_NAME[parameter.name], {each.name for each in self.parameters}
        needs = {**option.needs, **({"strategy": option.strategies} if option.strategies else {})}
        return {name: values for name, values in needs.items() if name in names}

    def _applies(self, parameter: Parameter, values: Mapping[str, Any]) -> bool:
        return all(_meets(values.get(name), allowed) for name, allowed in self._needs(parameter).items())

    def check(self, base: Sequence[str], fits: Callable[[Namespace], object] | None = None) -> None:
        """Raise ArgumentError if an option does not take the values of its parameter. base: arguments of all trials.
        fits: raises ArgumentError if a trial can't have these options."""
        usual = {each.name: each.extremes[0] for each in self.parameters}
        for parameter in self.parameters:
            needed = {
                name: next((each for each in self._extremes(name) if _meets(each, allowed)), (*allowed, True)[0])
                for name, allowed in self._needs(parameter).items()
            }
            for value in parameter.extremes:
                self._check_value(base, parameter, usual | needed | {parameter.name: value}, fits)

    def _check_value(
        self,
        base: Sequence[str],
        parameter: Parameter,
        values: Mapping[str, Any],
        fits: Callable[[Namespace], object] | None,
    ) -> None:
        try:
            options = parse([*base, *arguments(self._values(lambda each: values[each.name]))], shown=False)
            if fits is not None:
                fits(options)
        except ArgumentError as error:
            value = values[parameter.name]
            raise ArgumentError(f"parameter {parameter.name}: {value!r} can't be used: {error}") from error

    def _extremes(self, name: str) -> tuple[Any, ...]:
        return next(each.extremes for each in self.parameters if each.name == name)


def _meets(value: Any, allowed: tuple[str, ...]) -> bool:
    """Return whether an option has one of the allowed values; () for any value, but the option must be given."""
    return str(value) in allowed if allowed else bool(value)


# The classes of keys inside the file, by the last part of their place in it
KINDS: dict[Any, type[Keys]] = {
    "successiveHalving": Halving, "INTEGER": Range, "DOUBLE": Range, "CATEGORICAL": Categorical, "DISCRETE": Discrete,
}  # fmt: skip


def load(path: str) -> Tuning:
    """Read a YAML file. Raises ArgumentError, which names the key."""
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file, Strict)
    except OSError as error:
        raise ArgumentError(f"--config {path} can't be read: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: of a date that there is not
        raise ArgumentError(f"--config {path} is no YAML file: {error}") from error
    try:
        return read(content)
    except ValueError as error:  # also of an integer of more digits than Python shows
        raise ArgumentError(f"--config {path}: {error}") from error


class Strict(yaml.SafeLoader):
    """A loader of YAML that refuses a key that is there twice, and numbers of base 60 or 8: 1:00, 010."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [(each.tag, each.value) for each, _ in node.value if isinstance(each, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise _refused(node, f"the key {key[1]!r} is there twice")
        return super().construct_mapping(node, deep)

    def construct_decimal(self, node: Any) -> Any:
        digits = node.value.lstrip("+-")
        if ":" in digits or (digits[:1] == "0" and digits[1:].replace("_", "").isdecimal()):
            raise _refused(node, f"{node.value!r} is no decimal number; write its digits, or a text in quotes")
        return self.construct_yaml_int(node) if node.tag.endswith("int") else self.construct_yaml_float(node)


for _kind in ("int", "float"):
    Strict.add_constructor(f"tag:yaml.org,2002:{_kind}", Strict.construct_decimal)


def _refused(node: Any, text: str) -> Exception:
    refused: Exception = yaml.constructor.ConstructorError(None, None, text, node.start_mark)
    return refused


def read(content: Any) -> Tuning:
    """Return the Tuning that the content of a YAML file describes. Raises ArgumentError."""
    if isinstance(content, dict) and set(content) == {"trainingInput"}:
        content = content["trainingInput"]
        if isinstance(content, dict) and "hyperparameters" in content:
            content = content["hyperparameters"]
    try:
        return Tuning.model_validate(content)
    except ValidationError as error:
        mistakes = [each for each in error.errors(include_url=False) if each["type"] != "default_factory_not_called"]
        raise ArgumentError("; ".join(map(_text, mistakes))) from error


def _text(mistake: Any) -> str:
    """Return a mistake that pydantic has found as text: its place in the file, and what is expected there."""
    *places, key = mistake["loc"] or ["the file"]
    if mistake["type"] == "extra_forbidden":
        known = KINDS.get(places[-1], Tuning).names() if places else Tuning.names()
        return f"{'.'.join(map(str, places)) or 'the file'}: the key {key!r} is unknown{near(str(key), known)}"
    given = (
        mistake["ctx"]["error"] if mistake["type"] == "value_error" else f"{mistake['msg']}, got {mistake['input']!r}"
    )
    return f"{'.'.join(map(str, [*places, key]))}: {given}"

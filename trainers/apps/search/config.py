"""Tuning: which options of `python -m trainers` a search varies, from a YAML file in the format of black-box tuners.

    goal: MAXIMIZE
    hyperparameterMetricTag: val_accuracy
    maxTrials: 30
    maxParallelTrials: 2
    params:
    - {parameterName: lr, type: DOUBLE, minValue: 0.0001, maxValue: 0.1, scaleType: UNIT_LOG_SCALE}
    - {parameterName: optimizer, type: CATEGORICAL, categoricalValues: [adam, momentum]}

The keys are those of AI Platform's HyperparameterSpec; its file, with `trainingInput: hyperparameters:` around them,
is read too.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allreduce.notices import near
from trainers.apps.search.trial import Trial
from trainers.arguments import integer_error, is_number, require
from trainers.cli.options import BY_NAME, Option, parse
from trainers.errors import ArgumentError

GOALS = {"MAXIMIZE": "maximize", "MINIMIZE": "minimize"}
METRICS = ("val_accuracy", "val_loss", "accuracy", "loss")  # of an epoch
METRIC_OF = {"MAXIMIZE": "val_accuracy", "MINIMIZE": "val_loss"}
SENSE = {"MAXIMIZE": "accuracy", "MINIMIZE": "loss"}  # the end of the metrics' names
LINEAR, LOG, REVERSE_LOG = "UNIT_LINEAR_SCALE", "UNIT_LOG_SCALE", "UNIT_REVERSE_LOG_SCALE"
SCALES = (LINEAR, LOG, REVERSE_LOG)
NUMBERS = ("INTEGER", "DOUBLE")
PRUNES, HALVES = "enableTrialEarlyStopping", "successiveHalving"
KEYS = ("goal", "hyperparameterMetricTag", "maxTrials", "maxParallelTrials", PRUNES, HALVES, "params")
HALVING_KEYS = ("firstEpochs", "factor")
COMMON_KEYS = ("parameterName", "type")
KEYS_OF = {
    "INTEGER": ("minValue", "maxValue", "scaleType"),
    "DOUBLE": ("minValue", "maxValue", "scaleType"),
    "CATEGORICAL": ("categoricalValues",),
    "DISCRETE": ("discreteValues",),
}
TRIALS = 10  # if there is no maxTrials
LARGEST_INTEGER = 1 << 53  # in the file, larger ones may not be exact
OF_THE_SEARCH = (  # options that a search has itself, or that write the same file in each trial
    "save", "load", "json", "checkpoint", "checkpoint_every", "resume", "other_data", "trace", "tensorboard",
    "prometheus", "log_dir", "csv", "chief", "evaluator", "evaluations", "on_failure", "standby", "members", "bagging",
    "voting",
)  # fmt: skip
OF_THE_DATA = ("data", "label", "ignore", "categories")  # the same in all trials, which are compared


@dataclass(frozen=True)
class Parameter:
    """An option that the search varies. low, high: of numbers. choices: of the other types."""

    name: str
    type: str
    low: float = 0
    high: float = 0
    scale: str = LINEAR
    choices: tuple[Any, ...] = ()

    @property
    def extremes(self) -> tuple[Any, ...]:
        """The values that show whether the option takes the whole range."""
        return self.choices or (self.low, self.high)

    def suggest(self, trial: Trial) -> Any:
        """Return a value for this trial. Collective over the trial's ranks."""
        if self.choices:
            return trial.suggest_categorical(self.name, self.choices)
        suggest = trial.suggest_int if self.type == "INTEGER" else trial.suggest_float
        low: Any = self.low
        high: Any = self.high
        return self.value(suggest(self._name_in_study, low, high, log=self.scale != LINEAR))

    @property
    def _name_in_study(self) -> str:
        return f"{self.name}, reversed" if self.scale == REVERSE_LOG else self.name

    def value(self, suggested: Any) -> Any:
        """Return the option's value for the value in the study: a reversed scale is a logarithmic one, mirrored."""
        if self.scale != REVERSE_LOG:
            return suggested
        return min(self.high, max(self.low, self.low + self.high - suggested))

    def found(self, params: Mapping[str, Any]) -> Any:
        """Return the option's value in the parameters of a trial; None if it failed before."""
        suggested = params.get(self._name_in_study)
        return None if suggested is None else self.value(suggested)


@dataclass(frozen=True)
class Tuning:
    """The settings of a search. metric: of an epoch. parallel: the largest number of trials at a time, or None.

    prunes: whether trials that are worse than others end early. halves: for successive halving, the epochs after which
    the first trials may end, and the factor of the next such epochs; or None.
    """

    goal: str
    metric: str
    trials: int
    parallel: int | None
    prunes: bool
    halves: tuple[int, int] | None
    parameters: tuple[Parameter, ...]

    @property
    def direction(self) -> str:
        return GOALS[self.goal]

    def arguments(self, values: Mapping[str, Any]) -> list[str]:
        """Return the command line's arguments of some values of parameters."""
        found: list[str] = []
        for name, value in values.items():
            option = BY_NAME[name]
            if option.metavar or option.choices:
                found += [option.flag, text_of(value)]
            elif value:
                found.append(option.flag)
        return found

    def suggest(self, trial: Trial) -> list[str]:
        """Return the arguments of a trial. Collective over the trial's ranks.

        A parameter that has no effect with the values of others (--momentum with --optimizer adam) is left out.
        """
        return self.arguments(self._values(lambda each: each.suggest(trial)))

    def _values(self, value_of: Callable[[Parameter], Any]) -> dict[str, Any]:
        """Return the values of the parameters that have an effect: each after the parameters that it needs."""
        values: dict[str, Any] = {}
        order = list(BY_NAME)  # an option is declared after the options that it needs
        for each in sorted(self.parameters, key=lambda each: order.index(each.name)):
            if self._applies(each, values):
                values[each.name] = value_of(each)
        return values

    def _needs(self, parameter: Parameter) -> dict[str, tuple[str, ...]]:
        """Return the other parameters on whose values this one depends, and these values; () for any."""
        option, varied = BY_NAME[parameter.name], {each.name for each in self.parameters}
        needs = {**option.needs, **({"strategy": option.strategies} if option.strategies else {})}
        return {name: values for name, values in needs.items() if name in varied}

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
            options = parse([*base, *self.arguments(self._values(lambda each: values[each.name]))], shown=False)
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


def text_of(value: Any) -> str:
    """Return a value as it is written on the command line: numbers with all their digits."""
    return repr(value) if isinstance(value, float) else str(value)


def load(path: str) -> Tuning:
    """Read a YAML file. Raises ArgumentError, which names the key."""
    try:
        import yaml
    except ImportError as error:
        raise ArgumentError(f'--config needs pyyaml ({error}): pip install ".[search]" in the checkout') from error
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file, _strict(yaml))
    except OSError as error:
        raise ArgumentError(f"--config {path} can't be read: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: of a date that there is not
        raise ArgumentError(f"--config {path} is no YAML file: {error}") from error
    try:
        return read(content)
    except ValueError as error:  # also of an integer of more digits than Python shows
        raise ArgumentError(f"--config {path}: {error}") from error


def _strict(yaml: Any) -> Any:
    """Return a loader of YAML that refuses a key that is there twice, and numbers of base 60 or 8: 1:00, 010."""

    class Strict(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys: list[Any] = []
            for each, _ in node.value:
                key = (each.tag, each.value) if isinstance(each, yaml.ScalarNode) else None
                if key is not None and key in keys:
                    raise _refused(each, f"the key {each.value!r} is there twice")
                keys.append(key)
            return super().construct_mapping(node, deep)

        def construct_yaml_int(self, node: Any) -> Any:
            return super().construct_yaml_int(_decimal(node))

        def construct_yaml_float(self, node: Any) -> Any:
            return super().construct_yaml_float(_decimal(node))

    def _decimal(node: Any) -> Any:
        digits = node.value.lstrip("+-")
        if ":" in digits or (digits[:1] == "0" and digits[1:].replace("_", "").isdecimal()):
            raise _refused(node, f"{node.value!r} is no decimal number; write its digits, or a text in quotes")
        return node

    def _refused(node: Any, text: str) -> Exception:
        refused: Exception = yaml.constructor.ConstructorError(None, None, text, node.start_mark)
        return refused

    for kind in ("int", "float"):
        Strict.add_constructor(f"tag:yaml.org,2002:{kind}", getattr(Strict, f"construct_yaml_{kind}"))
    return Strict


def read(content: Any) -> Tuning:
    """Return the Tuning that the content of a YAML file describes. Raises ArgumentError."""
    if isinstance(content, dict) and set(content) == {"trainingInput"}:
        content = content["trainingInput"]
        if isinstance(content, dict) and "hyperparameters" in content:
            content = content["hyperparameters"]
    _check_keys("the file", content, KEYS)
    goal = _one_of("goal", content.get("goal"), tuple(GOALS))
    metric = _one_of("hyperparameterMetricTag", content.get("hyperparameterMetricTag", METRIC_OF[goal]), METRICS)
    if not metric.endswith(SENSE[goal]):
        raise ArgumentError(f"goal: {goal} would find the worst {metric}; give the other goal, or another metric")
    halves = _halves(content.get(HALVES))
    prunes = content.get(PRUNES, True)
    if not isinstance(prunes, bool):
        raise ArgumentError(f"{PRUNES} must be true or false, got {prunes!r}")
    if halves is not None and not prunes:
        raise ArgumentError(f"{PRUNES}: false can't be used with {HALVES}, which ends trials early; leave one out")
    parallel = content.get("maxParallelTrials")
    params = content.get("params")
    if not isinstance(params, list) or not params:
        raise ArgumentError(f"params must be a list of parameters, got {params!r}")
    parameters = tuple(_parameter(number, each) for number, each in enumerate(params, 1))
    names = [each.name for each in parameters]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ArgumentError(f"params: {', '.join(twice)} is there twice")
    trials = _integer("maxTrials", content.get("maxTrials", TRIALS))
    most = None if parallel is None else _integer("maxParallelTrials", parallel)
    return Tuning(goal, metric, trials, most, prunes, halves, parameters)


def _halves(content: Any) -> tuple[int, int] | None:
    """Return the epochs of the first rung, and the factor. Raises ArgumentError."""
    if content is None:
        return None
    _check_keys(HALVES, content, HALVING_KEYS)
    first = _integer(f"{HALVES}: firstEpochs", content.get("firstEpochs", 1))
    return first, _integer(f"{HALVES}: factor", content.get("factor", 3), 2)


def _parameter(number: int, content: Any) -> Parameter:
    where = f"parameter {number}"
    if not isinstance(content, dict):
        raise ArgumentError(f"{where} must be a mapping with parameterName and type, got {content!r}")
    option = _option(where, content.get("parameterName"))
    where = f"parameter {option.name}"
    kind = _one_of(f"{where}: type", content.get("type"), tuple(KEYS_OF))
    if content.get("scaleType") is not None and kind not in NUMBERS:
        raise ArgumentError(f"{where}: scaleType has no effect on {kind}; leave it out")
    _check_keys(
        where, {key: value for key, value in content.items() if value is not None}, (*COMMON_KEYS, *KEYS_OF[kind])
    )
    if kind in NUMBERS:
        return _range(where, option.name, kind, content)
    key = KEYS_OF[kind][0]
    values = content.get(key)
    if not isinstance(values, list) or not values:
        raise ArgumentError(f"{where}: {key} must be a list of values, got {values!r}")
    if kind == "DISCRETE" and not all(_is_number(value) for value in values):
        raise ArgumentError(f"{where}: discreteValues must be numbers, got {values!r}")
    if not all(isinstance(value, str | int | float) for value in values) or len({str(each) for each in values}) < len(
        values
    ):
        raise ArgumentError(f"{where}: {key} must be different texts or numbers, got {values!r}")
    if not (option.metavar or option.choices):
        return Parameter(option.name, kind, choices=tuple(_flag(where, value) for value in values))
    return Parameter(option.name, kind, choices=tuple(values))


def _option(where: str, name: Any) -> Option:
    """Return the option of a parameter. Raises ArgumentError if there is none, or a search can't vary it."""
    found = BY_NAME.get(name.lstrip("-").replace("-", "_")) if isinstance(name, str) else None
    if found is None:
        names = [each.replace("_", "-") for each in BY_NAME]
        raise ArgumentError(
            f"{where}: parameterName {name!r} is no option of python -m trainers{near(str(name), names)}"
        )
    if found.name in (*OF_THE_SEARCH, *OF_THE_DATA):
        raise ArgumentError(f"{where}: a search does not vary {found.flag}")
    return found


def _range(where: str, name: str, kind: str, content: Mapping[str, Any]) -> Parameter:
    low, high = content.get("minValue"), content.get("maxValue")
    scale = _one_of(f"{where}: scaleType", content.get("scaleType") or LINEAR, SCALES)
    if low is None or high is None or not (_is_number(low) and _is_number(high)):
        raise ArgumentError(f"{where}: minValue and maxValue must be numbers, got {low!r} and {high!r}")
    low, high = float(low), float(high)
    if kind == "INTEGER":
        if not (low.is_integer() and high.is_integer() and max(abs(low), abs(high)) < LARGEST_INTEGER):
            raise ArgumentError(f"{where}: minValue and maxValue of an INTEGER must be integers, got {low} and {high}")
        low, high = int(low), int(high)
    if low > high:
        raise ArgumentError(f"{where}: minValue {low} is larger than maxValue {high}")
    if scale != LINEAR and low <= 0:
        raise ArgumentError(f"{where}: {scale} needs a minValue > 0, got {low}")
    return Parameter(name, kind, low, high, scale)


def _flag(where: str, value: Any) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise ArgumentError(f"{where}: this option is given or not: its values are true and false, got {value!r}")
    return str(value).lower() == "true"


def _is_number(value: Any) -> bool:
    if isinstance(value, str):  # AI Platform's examples quote numbers, and YAML reads 1e-3 as a text
        try:
            value = float(value)
        except ValueError:
            return False
    return is_number(value)


def _check_keys(where: str, content: Any, known: Sequence[str]) -> None:
    if not isinstance(content, dict):
        raise ArgumentError(f"{where} must be a mapping with {', '.join(known)}, got {content!r}")
    for key in content:
        if key not in known:
            hint = near(str(key), known) or f"; use {', '.join(known)}"
            raise ArgumentError(f"{where}: the key {key!r} is unknown{hint}")


def _one_of(what: str, value: Any, known: Sequence[str]) -> str:
    if value not in known:
        raise ArgumentError(f"{what} must be one of {', '.join(known)}, got {value!r}")
    return str(value)


def _integer(what: str, value: Any, least: int = 1) -> int:
    require(integer_error(what, value, least))
    return int(value)

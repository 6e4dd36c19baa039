"""The options of `python -m trainers` in a search: which it can vary, and their values as arguments."""

from collections.abc import Mapping
from typing import Any

from allreduce.notices import near
from trainers.cli.options import BY_NAME, Option
from trainers.errors import ArgumentError

OF_THE_SEARCH = (  # options that a search has itself, or that write the same file in each trial
    "save", "load", "json", "checkpoint", "checkpoint_every", "resume", "other_data", "trace", "tensorboard",
    "prometheus", "log_dir", "csv", "on_failure", "standby", "members", "bagging", "voting",
)  # fmt: skip
OF_THE_DATA = ("data", "label", "ignore", "categories")  # the same in all trials, which are compared


def varied(name: Any) -> Option:
    """Return the option of a name. Raises ArgumentError if there is none, or a search can't vary it."""
    found = BY_NAME.get(name.lstrip("-").replace("-", "_")) if isinstance(name, str) else None
    if found is None:
        names = [each.replace("_", "-") for each in BY_NAME]
        raise ArgumentError(f"{name!r} is no option of python -m trainers{near(str(name), names)}")
    if found.name in (*OF_THE_SEARCH, *OF_THE_DATA):
        raise ArgumentError(f"a search does not vary {found.flag}")
    return found


def arguments(values: Mapping[str, Any]) -> list[str]:
    """Return the command line's arguments of some values of options, numbers with all their digits."""
    found: list[str] = []
    for name, value in values.items():
        option = BY_NAME[name]
        if has_value(option):
            found += [option.flag, repr(value) if isinstance(value, float) else str(value)]
        elif value:
            found.append(option.flag)
    return found


def has_value(option: Option) -> bool:
    """Whether the option takes a value; otherwise it is given or not."""
    return bool(option.metavar or option.choices)

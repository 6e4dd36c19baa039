"""History, the result of `fit`: one Epoch per epoch, the same on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainers.watching.callback import Callback, Logs

VALIDATION = "val_"  # Keras' prefix in logs
VALIDATED = "validation_"  # the prefix in a history
TIMES = ("seconds", "samples_per_second", "communication_share")


@dataclass(frozen=True)
class Epoch:
    """One epoch of training.

    epoch: 1, 2, ...
    loss, metrics: means over the samples of the epoch, each computed before the update of its batch.
    validation: the same for the validation data, after the epoch; empty if there are none.
    seconds: wall-clock time without validation, the mean of the ranks.
    samples_per_second: of all ranks together.
    communication_share: the fraction of `seconds` spent in AllReduce, including waits for slower ranks; the mean of
        the ranks.
    staleness: staleness[s] is the number of gradients that were s updates stale when they were applied; empty if all
        ranks take every step together.
    dropped: the number of gradients that were computed but not used.
    """

    epoch: int
    loss: float
    metrics: dict[str, float]
    seconds: float
    samples_per_second: float
    communication_share: float
    validation: dict[str, float] = field(default_factory=dict)
    staleness: tuple[int, ...] = ()
    dropped: int = 0

    @classmethod
    def of_logs(cls, epoch: int, logs: Logs) -> "Epoch":
        """The epoch of the logs that callbacks get at the end of epoch number `epoch`, which counts from 0."""
        measured = dict(logs)
        names = [name for name in measured if name.startswith(VALIDATION)]
        return cls(
            epoch=epoch + 1,
            loss=float(measured.pop("loss")),
            validation={name.removeprefix(VALIDATION): measured.pop(name) for name in names},
            staleness=tuple(map(int, measured.pop("staleness", ()))),
            dropped=int(measured.pop("dropped", 0)),
            **{name: float(measured.pop(name)) for name in TIMES},
            metrics=measured,
        )

    @classmethod
    def of_dict(cls, given: Mapping[str, Any]) -> "Epoch":
        """The epoch that `as_dict` gave, in a checkpoint say. Raises KeyError, TypeError or ValueError."""
        logs, names = dict(given), [name for name in given if name.startswith(VALIDATED)]
        logs |= {VALIDATION + name.removeprefix(VALIDATED): logs.pop(name) for name in names}
        return cls.of_logs(int(logs.pop("epoch")) - 1, logs)

    def as_dict(self) -> dict[str, Any]:
        """A flat object for JSON: loss, accuracy, ..., validation_loss, ..."""
        return {
            "epoch": self.epoch,
            "loss": self.loss,
            **self.metrics,
            **{f"{VALIDATED}{name}": value for name, value in self.validation.items()},
            **{name: getattr(self, name) for name in TIMES},
            **({"staleness": list(self.staleness)} if self.staleness else {}),
            **({"dropped": self.dropped} if self.dropped else {}),
        }

    def line(self, shares: bool = True) -> str:
        """The epoch in one line. shares: with the share of its time in which ranks wait and average."""
        values = {
            "loss": self.loss,
            **self.metrics,
            **{f"{VALIDATION}{name}": v for name, v in self.validation.items()},
        }
        measured = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        text = f"epoch {self.epoch:3d}  {measured}  {self.samples_per_second:,.0f} samples/s"
        return f"{text}  waiting + averaging {self.communication_share:.0%}" if shares else text

    def __str__(self) -> str:
        return self.line()


class History(list[Epoch], Callback):
    """The epochs of one `fit`, in order; prints as a line for each."""

    reads_model = False

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.append(Epoch.of_logs(epoch, logs or {}))

    def column(self, name: str) -> list[Any]:
        """One value of every epoch, by its name in `Epoch.as_dict`: history.column("loss")."""
        return [epoch.as_dict()[name] for epoch in self]

    def __str__(self) -> str:
        return "\n".join(map(str, self))

"""The models of sequences: small replicas, each with a shadow that does the same in one process."""

from typing import TYPE_CHECKING

import numpy as np

from trainers import NumpyNetwork
from trainers.data import order
from trainers.replica import Replica

if TYPE_CHECKING:
    from tests.sequences.fits import Fit

FEATURES, CLASSES = 4, 3
OPTIMIZERS = ("sgd", "momentum", "adam")

State = dict[str, np.ndarray]


def numpy_network(optimizer: str, seed: int) -> Replica:
    rate = 0.01 if optimizer == "adam" else 0.05
    return NumpyNetwork([FEATURES, 5, CLASSES], activation="tanh", optimizer=optimizer, seed=seed, lr=rate)


def torch_replica(optimizer: str, seed: int) -> Replica:
    import torch

    from trainers.replicas.pytorch import TorchReplica

    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(FEATURES, 5), torch.nn.Tanh(), torch.nn.Linear(5, CLASSES))
    parameters = module.parameters()
    if optimizer == "adam":
        made: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=0.01)
    else:
        made = torch.optim.SGD(parameters, lr=0.05, momentum=0.9 if optimizer == "momentum" else 0.0)
    return TorchReplica(module, torch.nn.CrossEntropyLoss(), made)


def multiply(replica: Replica, factor: float) -> None:
    """Edit the parameters in place."""
    if isinstance(replica, NumpyNetwork):
        replica.parameters *= factor
        return
    import torch

    with torch.no_grad():
        for parameter in replica.module.parameters():  # type: ignore[attr-defined]
            parameter.mul_(factor)


class Shadow:
    """A model trained by this process alone."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._gradients = np.zeros(replica.gradient_length, replica.gradient_dtype)
        replica.bind(None, self._gradients)

    def state(self) -> State:
        return self.replica.snapshot({})

    def take_on(self, state: State) -> None:
        self.replica.load_state({name: np.array(array) for name, array in state.items()})

    def train(self, call: "Fit", first: int, limit: int, kept: dict[int, State]) -> list[dict[str, float]]:
        """Do steps `first` to `limit` of a fit; record the states after the steps in `kept`.

        Returns the means of the metrics over the steps of each epoch, and those of its validation.
        """
        replica, base = self.replica, self.replica.learning_rates
        means: list[dict[str, float]] = []
        for total in range(first, limit):
            epoch, step = divmod(total, call.steps)
            if step == 0 or total == first:
                sums, rows = np.zeros(len(replica.metrics)), 0
            if call.halves:
                replica.learning_rates = [rate * 0.5 ** (epoch + 1) for rate in base]
            visited = order(call.rows, call.seed, epoch, call.shuffle)
            batch = visited[step * call.batch_size : (step + 1) * call.batch_size]
            values = np.array(replica.gradients(call.x[batch], call.y[batch], 1.0), np.float64)
            if not (call.skips and call.bad_place(epoch) == step):
                replica.update()
            sums, rows = sums + values * len(batch), rows + len(batch)
            if step + 1 == call.steps or total + 1 == limit:
                means.append(dict(zip(replica.metrics, (sums / rows).tolist(), strict=True)))
                if call.validates:
                    held = self.evaluate(*call.held)
                    means[-1] |= {f"validation_{name}": value for name, value in held.items()}
            if total + 1 in kept:
                kept[total + 1] = self.state()
        if call.halves:
            replica.learning_rates = base
        return means

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
        sums = np.array(self.replica.evaluate(x, y), np.float64)
        return dict(zip(self.replica.metrics, (sums / len(x)).tolist(), strict=True))


class Model:
    """A replica on this rank, and its shadow. known: whether the replica must equal the shadow. finite: False if it has
    diverged on purpose."""

    def __init__(self, kind: str, optimizer: str, seed: int) -> None:
        make = {"numpy": numpy_network, "torch": torch_replica}[kind]
        self.name = f"{kind} {optimizer} {seed}"
        self.replica = make(optimizer, seed)
        self.shadow = Shadow(make(optimizer, seed))
        self.reader = make(optimizer, seed)  # of files
        self.known = self.finite = True

    def settle(self, state: State) -> None:
        """Set the shadow to this state."""
        self.shadow.take_on(state)
        self.known = True

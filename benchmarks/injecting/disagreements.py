"""What one rank can have otherwise than the others, and the named error that all ranks must raise then. Pure."""

from typing import NamedTuple


class Disagreement(NamedTuple):
    """way: "calls" of a backend, a "trainer", or a "loop" of PyTorch's. error: the name of its class."""

    way: str
    error: str = "DisagreementError"


DISAGREEMENTS = {
    "length": Disagreement("calls"),
    "dtype": Disagreement("calls"),
    "op": Disagreement("calls"),
    "order of calls": Disagreement("calls"),
    "model": Disagreement("trainer"),
    "batch size": Disagreement("trainer"),
    "epochs": Disagreement("trainer"),
    "rows": Disagreement("trainer"),
    "learning rate": Disagreement("trainer"),
    "callbacks": Disagreement("trainer"),
    "NaN in a gradient": Disagreement("trainer", "NotFiniteError"),
    "parameters": Disagreement("loop"),
    "a step left out": Disagreement("loop"),
    "NaN in backward": Disagreement("loop", "NotFiniteError"),
}

"""A replica has one trainer at a time, in whose memory its gradients are, and perhaps its parameters.

A second one takes it over where every rank has the whole model; the first one says so when it is called again.
"""

from trainers.errors import ArgumentError
from trainers.replica import Replica


def refusal(replica: Replica) -> ArgumentError | None:
    """Why no trainer can be made on this replica now. Local."""
    if not isinstance(replica, Replica):
        found = replica if isinstance(replica, type) else type(replica)
        return ArgumentError(
            "a trainer takes a replica, such as NumpyNetwork(sizes), TorchReplica(module, loss, optimizer), "
            "JaxReplica(apply, loss, params, optimizer) or one of your own (trainers.replica.Replica), not "
            f"{found.__module__}.{found.__qualname__}"
        )
    trainer = replica.hold.trainer
    if trainer is None or trainer.closed or trainer.being_made or not trainer.divides_state:
        return None
    kind, holder = type(replica).__name__, type(trainer).__name__
    return ArgumentError(
        f"this {kind} has a {holder} already, in whose memory it is, and with it other ranks may have parts of its "
        f"state: close() that first, on all ranks (`with {holder}(...) as trainer:` does), or make another {kind}"
    )

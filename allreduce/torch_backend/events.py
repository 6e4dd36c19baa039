"""Events of torch.profiler. Ours run in another thread than the one that is profiled, so they are written by hand."""

import torch

from allreduce.torch_backend.arguments import NAME


def begin(name: str) -> torch.futures.Future | None:
    """Begin an event; it ends, in whatever thread, when the future that is returned gets a result.

    None where this thread is not profiled. Called where the operation is submitted, as gloo does it: what lies
    before the operation in the queue counts as its own time.
    """
    if not torch.autograd._profiler_enabled():
        return None
    ended: torch.futures.Future = torch.futures.Future()
    with torch.autograd.profiler.record_function(f"{NAME}:{name}") as event:
        event._call_end_callbacks_on_future(ended)
    return ended

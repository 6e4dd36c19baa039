"""Notes edits of scattered gradients that PyTorch does not count: `p.grad.data.mul_()`, `p.grad.numpy()`."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from trainers.pytorch.layout import Bucket
from trainers.replicas.pytorch.devices import Host

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers by their bytes


class Marks:
    """One element of each parameter's gradient, where this rank does not own all of it.

    After a reduce_scatter the elements that a rank does not own mean nothing, so a large number can be put into them.
    An edit of a whole gradient changes it, and a norm of it is so large that clipping by it is such an edit. Every
    element has ranks that do not own it, so an edit on all ranks is noticed by some. On the CPU only: looking would
    make the host wait for a GPU.

    flats: the gradients by dtype. owned: for each bucket of `plan` what this rank owns.
    """

    def __init__(
        self, flats: Mapping[str, Tensor], plan: Sequence[Bucket], owned: Sequence[slice], device: Host
    ) -> None:
        self._places: list[tuple[np.ndarray, np.ndarray, int]] = []  # memory as integers, indices, value
        if device.kind != "cpu":
            return
        found: dict[str, list[int]] = {dtype: [] for dtype in flats}
        for bucket, mine in zip(plan, owned, strict=True):
            begin, end = bucket.start + mine.start, bucket.start + mine.stop
            for slot in bucket.slots:
                if slot.start == slot.stop:
                    continue
                if slot.start < begin:
                    found[bucket.dtype].append(slot.start)
                elif slot.stop > end:
                    found[bucket.dtype].append(slot.stop - 1)
        for dtype, flat in flats.items():
            integers = BITS[flat.element_size()]
            mark = torch.tensor(torch.finfo(flat.dtype).max / 3, dtype=flat.dtype).view(integers).item()
            self._places.append((flat.view(integers).numpy(), np.array(found[dtype], np.intp), int(mark)))

    def put(self) -> None:
        """Gradients are scattered now. Local."""
        for memory, places, mark in self._places:
            memory[places] = mark

    def there(self) -> bool:
        """Whether they are as they were put. Local."""
        return all(bool((memory[places] == mark).all()) for memory, places, mark in self._places)

    def clear(self) -> None:
        """Let go of the memory. Local."""
        self._places.clear()

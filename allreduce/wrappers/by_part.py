"""Divided: sends the parameters of a model in different forms, by their names."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from allreduce import notices
from allreduce.arrays.ops import Op
from allreduce.arrays.registered import Part, Slice
from allreduce.backend import AllReduce
from allreduce.topology import Topology
from allreduce.wrappers.compressed import NOTICED, Compressed
from allreduce.wrappers.options import ByPart, Compression, PowerSGD, check_parts


class Run(NamedTuple):
    """A slice of a buffer that is sent in one form, and its parts, with positions in the buffer."""

    compression: Compression | None
    start: int
    stop: int
    parts: list[Part]


class Divided(Compressed):
    """Passes neighbouring parameters with the same compression to one compressing backend, around the same `inner`.

    Names are those of `describe`. Elements of no parameter, and parameters of no pattern, are reduced by `inner`;
    a buffer of which nothing is described has the name "", which "*" matches. Parameters without compression are sent
    with their neighbours of PowerSGD, which does not compress vectors, in fewer messages.

    make: creates the backend of a compression, around `inner`, which it does not own. Collective.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        inner: AllReduce,
        options: ByPart,
        make: Callable[[Compression], Compressed],
        check: str = "first",
        owns_inner: bool = True,
    ) -> None:
        self.options, self._make = options, make
        super().__init__(topology, inner=inner, check=check, owns_inner=owns_inner)

    def _connect(self, topology: Topology) -> None:
        super()._connect(topology)
        self._wrappers: dict[Compression, Compressed] = {}
        for _, compression in self.options.patterns:
            if compression is not None and compression not in self._wrappers:
                made = self._wrappers[compression] = self._add_part(self._make(compression))
                made.name = str(compression)  # in the names of `state`

    def describe(self, array: Any, parts: Sequence[Part] = (), whole: bool = True) -> None:
        """As AllReduce.describe. Raises OptionError too if a pattern without wildcards is the name of no parameter of
        the whole model."""
        if whole:
            check_parts(self.options, parts)
            for text in self.options.unmatched(parts).values():
                notices.once(self.rank, text)
        for compression, wrapper in self._wrappers.items():
            wrapper.describe(array, [part for part in parts if self.options.find(part.name) == compression], False)
        self.inner.describe(array, parts, whole)
        self.registered.register(array, parts)

    def _reduce_compressed(self, buffer: np.ndarray, op: Op, where: Slice | None, parts: Sequence[Part]) -> None:
        if self.options.find("") is None and buffer.size > NOTICED and not (where and where.entry.parts):
            self._say_undescribed(f"{self.options} needs the names of parameters")
        for run in self._runs(parts, buffer.size):
            piece = buffer[run.start : run.stop]
            if run.compression is None:
                self.inner.hooks.reduce(piece, op)
            else:
                moved = [part._replace(start=part.start - run.start) for part in run.parts]
                begin = where.entry.begin + (where.start + run.start) * buffer.itemsize if where else None
                self._wrappers[run.compression].reduce_parts(piece, op, moved, begin)

    def _runs(self, parts: Sequence[Part], length: int) -> list[Run]:
        """Divide a buffer of `length` elements."""
        runs: list[Run] = []
        for part, compression in self._pieces(parts, length):
            last = runs[-1] if runs else None
            if last is not None and compression is None and isinstance(last.compression, PowerSGD):
                part, compression = part._replace(shape=(part.stop - part.start,)), last.compression
            if last is not None and last.compression == compression:
                last.parts.append(part)
                runs[-1] = last._replace(stop=part.stop)
            else:
                runs.append(Run(compression, part.start, part.stop, [part]))
        return runs

    def _pieces(self, parts: Sequence[Part], length: int) -> Iterator[tuple[Part, Compression | None]]:
        """Yield the parts, also the gaps between them, and their compressions."""
        end = 0
        for part in [*parts, Part("", length, (0,))]:
            if end < part.start:
                yield Part("", end, (part.start - end,)), None
            if part.start < part.stop:
                yield part, self.options.find(part.name)
            end = part.stop

"""Writes the graph of an export: one file, or, above the limit of protobuf, a second file beside it with the constants.

`model.onnx` then names the file of its constants, such as `model.onnx.1a2b3c4d.data`. Each export has another name for
it, so a reader finds the constants that belong to its `model.onnx`, before and after the replacement.
"""

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from trainers.files.model_file import is_special, replacing
from trainers.files.onnx_graph import need_onnx

LARGEST = 2**31 - 2**24  # bytes of the constants in one file: protobuf writes less than 2 GiB in all
SMALL = 1024  # bytes of a constant that stays in the graph


class Store:
    """The place of an export. path: of the .onnx file. folder: where its constants are."""

    def __init__(self, path: str) -> None:
        self.path = path if is_special(path) else os.path.realpath(path)
        self.folder, self._name = os.path.split(self.path)
        self._made: list[str] = []

    def take_constants(self, model: Any) -> None:
        """Move the constants of a graph to a file of their own, if one file can't hold them. Changes `model`."""
        if sum(len(each.raw_data) for each in model.graph.initializer) <= LARGEST:
            return
        helper = need_onnx().external_data_helper
        name = f"{self._name}.{secrets.token_hex(4)}.data"
        self._made.append(name)
        helper.convert_model_to_external_data(model, location=name, size_threshold=SMALL)
        helper.write_external_data_tensors(model, self.folder)

    def constants_of(self, model: Any) -> set[str]:
        """Return the names of the files with the constants of a graph that this class has written."""
        found = {
            entry.value for each in model.graph.initializer for entry in each.external_data if entry.key == "location"
        }
        return {name for name in found if re.fullmatch(rf"{re.escape(self._name)}\.[0-9a-f]{{8}}\.data", name)}

    def replace(self, model: Any) -> None:
        """Replace the file by a graph, and remove the constants of the older one."""
        older = self._older()
        with replacing(self.path) as file:
            file.write(model.SerializeToString())
        kept = self.constants_of(model)
        self._remove(older - kept)
        self._made = [name for name in self._made if name not in kept]

    def _older(self) -> set[str]:
        if not os.path.isfile(self.path):
            return set()
        try:
            return self.constants_of(need_onnx().load(self.path, load_external_data=False))
        except Exception:  # of protobuf: the file is no graph
            return set()

    def _remove(self, names: Any) -> None:
        for name in names:
            with suppress(OSError):
                os.unlink(os.path.join(self.folder, name))

    def clean(self) -> None:
        """Remove the files of constants that no .onnx file names."""
        self._remove(self._made)


@contextmanager
def stored(path: str) -> Iterator[Store]:
    """Context manager: a Store; at the end of the block only files that belong to the export remain."""
    store = Store(path)
    try:
        yield store
    finally:
        store.clean()

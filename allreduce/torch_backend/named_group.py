"""What PyTorch keeps in a C++ backend, which a group written in Python has not: its names, what it can do."""

# PyTorch's stubs know them as plain attributes.
# mypy: disable-error-code="override, assignment"

import torch
import torch.distributed as dist

from allreduce.torch_backend.arguments import NAME
from allreduce_torch_autoload import device_names


class NamedGroup(dist.ProcessGroup):
    """C++ asks by the names in mixed case, Python by the others; state_dict and async_save ask for devices."""

    _name = _description = ""

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    setGroupName = _set_group_name  # noqa: N815
    setGroupDesc = _set_group_desc  # noqa: N815
    _device_types = property(lambda _: [torch.device(name) for name in device_names()])
    supports_splitting = supports_coalescing = supports_time_estimate = False

    def _get_backend(self, device: torch.device) -> "NamedGroup":
        return self

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

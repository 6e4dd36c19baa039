"""Other software ("peers") that reduces arrays on CPUs.

A peer is a function from (topology, op, dtype, elements of the longest array) to a Contender; a new one is one function
and one line in PEERS. A peer that is not installed, or can't reduce such arrays, raises an AllReduceError on all ranks.
"""

import datetime
import importlib
import importlib.util
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays import dtypes, ops
from allreduce.errors import OptionError, UnavailableError
from allreduce.topology import Topology
from allreduce.transport.control import all_values, combine, on_all_ranks, raise_together, root_value, together


@dataclass
class Contender:
    """Reduces 1-D arrays.

    call: reduces an array in place, or returns the result. array: of its allocate(); None if it has none.
    foreign: the array that it reduces in the place of one of the program, if it can't reduce such.
    """

    name: str
    call: Callable[[np.ndarray], Any]
    array: np.ndarray | None = None
    close: Callable[[], Any] = bool  # collective
    foreign: np.ndarray | None = None


TIMEOUT = datetime.timedelta(seconds=60)
COMPONENTS = ("tuned", "han", "adapt", "sm")  # of Open MPI, for collectives
TRIALS = 7  # calls of each of them
DEEPSPEED_SOURCES = ("shm_interface.cpp", "shm.cpp")


def mpi4py(topology: Topology, op: str, dtype: np.dtype, _: int) -> Contender:
    """The bare call of mpi4py, comm.Allreduce(IN_PLACE, array): the cost of Python and MPI without this library."""
    _check_mpi(topology, dtype)
    comm = topology.private()
    return Contender("mpi4py", _mpi_call(topology, op, lambda _: comm), close=lambda: topology.release(comm))


def openmpi(topology: Topology, op: str, dtype: np.dtype, _: int) -> Contender:
    """mpi4py's call with the best of Open MPI's components for this length: the fastest one of a short trial.

    Each component has a communicator that prefers it, as a high coll_tuned_priority, coll_han_priority ... would.
    """
    world = topology.world
    if MPI.get_vendor()[0] != "Open MPI":
        raise on_all_ranks(UnavailableError(f"--peers openmpi needs Open MPI; here is {MPI.get_vendor()[0]}"), world)
    _check_mpi(topology, dtype)
    comms = [world.Dup(MPI.Info.Create({"ompi_comm_coll_preference": name})) for name in COMPONENTS]
    fastest: dict[int, MPI.Intracomm] = {}

    def choose(array: np.ndarray) -> MPI.Intracomm:
        if array.size not in fastest:
            trial, seconds = np.zeros_like(array), np.zeros((len(comms), TRIALS))
            for turn in range(TRIALS):
                for row, comm in enumerate(comms):
                    world.Barrier()
                    begin = time.perf_counter()
                    comm.Allreduce(MPI.IN_PLACE, trial)
                    seconds[row, turn] = time.perf_counter() - begin
            combine(world, seconds, "choose Open MPI's component", MPI.MAX)
            fastest[array.size] = comms[int(np.median(seconds, axis=1).argmin())]
        return fastest[array.size]

    def close() -> None:
        for comm in comms:
            comm.Free()

    return Contender("openmpi", _mpi_call(topology, op, choose), close=close)


def _check_mpi(topology: Topology, dtype: np.dtype) -> None:
    if dtypes.is_half(dtype):
        raise on_all_ranks(OptionError(f"MPI can't take part: it has no {dtype}"), topology.world)


def _mpi_call(
    topology: Topology, op: str, choose: Callable[[np.ndarray], MPI.Intracomm]
) -> Callable[[np.ndarray], None]:
    """Return the call of mpi4py on the communicator that `choose` returns for an array."""
    plain = ops.OPS["sum" if op == "mean" else op].mpi
    scale = 1 / topology.size if op == "mean" else None

    def call(array: np.ndarray) -> None:
        choose(array).Allreduce(MPI.IN_PLACE, array, plain)
        if scale is not None:
            np.multiply(array, scale, out=array)

    return call


def gloo(topology: Topology, op: str, dtype: np.dtype, _: int) -> Contender:
    """torch.distributed with gloo in the same processes, as PyTorch's DDP uses it on CPUs."""
    torch = together(topology.world, _torch_with_gloo)
    distributed = torch.distributed
    join(distributed, topology)
    names = {"sum": "SUM", "mean": "SUM", "max": "MAX", "min": "MIN", "prod": "PRODUCT"}
    torch_op = getattr(distributed.ReduceOp, names[op])
    tensors: dict[tuple[int, int, np.dtype], Any] = {}  # DDP keeps its tensors too

    def call(array: np.ndarray) -> None:
        key = (array.ctypes.data, array.size, array.dtype)
        tensor = tensors.get(key)
        if tensor is None:
            tensor = tensors[key] = _tensor(torch, array)
        distributed.all_reduce(tensor, op=torch_op)
        if op == "mean":
            tensor.div_(topology.size)

    return Contender("gloo", call, close=distributed.destroy_process_group)


def deepspeed(topology: Topology, op: str, dtype: np.dtype, _: int) -> Contender:
    """DeepSpeed's all-reduce in shared memory, compiled from the sources in its package as its builder does."""
    world, torch = topology.world, together(topology.world, lambda: _imported("torch", '".[torch]" in the checkout'))
    _check(topology, "deepspeed", op in ("sum", "mean") and dtype.name in ("float32", "float16", "bfloat16"), op, dtype)
    _check_cores(topology, "deepspeed")
    together(world, lambda: _build_deepspeed(torch, True) if topology.rank == 0 else None)
    library = together(world, lambda: _build_deepspeed(torch, False))
    name = root_value(world, f"{os.getpid()}", "name DeepSpeed's segments")
    os.environ.update(LOCAL_SIZE=str(topology.size), MASTER_ADDR="benchmarks", MASTER_PORT=name)
    library.initialize(topology.size, topology.rank)
    world.Barrier()  # all ranks have the segments, so their names can go
    for path in Path("/dev/shm").glob(f"*_benchmarks_{name}_{topology.rank}"):
        path.unlink()

    def call(array: np.ndarray) -> None:
        tensor = _tensor(torch, array)
        torch.ops.deepspeed.inference_all_reduce_(tensor)
        if op == "mean":
            tensor.div_(topology.size)

    return Contender("deepspeed", call)


def mlx(topology: Topology, op: str, dtype: np.dtype, count: int) -> Contender:
    """MLX's ring over TCP, on an array of MLX; the results are new arrays. (Its other backend is MPI.)"""
    world, core = topology.world, together(topology.world, lambda: _imported("mlx.core", "mlx mlx-cpu"))
    names = {"sum": "all_sum", "mean": "all_sum", "max": "all_max", "min": "all_min"}
    _check(topology, "mlx", op in names and hasattr(core, dtype.name) and dtype != dtypes.BFLOAT16, op, dtype)
    _check_cores(topology, "mlx")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        places = [[f"127.0.0.1:{each}"] for each in all_values(world, port, "exchange MLX's ports")]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(places))
        file.flush()
        os.environ.update(MLX_HOSTFILE=file.name, MLX_RANK=str(topology.rank))
        group = together(world, lambda: core.distributed.init(strict=True, backend="ring"))
    core.set_default_device(core.cpu)
    own = core.zeros(count, getattr(core, dtype.name))
    core.eval(own)

    def call(array: np.ndarray) -> np.ndarray:
        result = getattr(core.distributed, names[op])(own[: array.size], group=group)
        result = result / topology.size if op == "mean" else result
        core.eval(result)
        return np.array(result, copy=False)

    return Contender("mlx", call, foreign=np.array(own, copy=False))


PEERS: dict[str, Callable[[Topology, str, np.dtype, int], Contender]] = {
    "gloo": gloo,
    "mpi4py": mpi4py,
    "openmpi": openmpi,
    "deepspeed": deepspeed,
    "mlx": mlx,
}


def _check_cores(topology: Topology, name: str) -> None:
    if topology.size > (os.cpu_count() or 1):
        message = f"--peers {name} needs a core for each rank: its threads poll, and would slow all others down"
        raise on_all_ranks(UnavailableError(message), topology.world)


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise UnavailableError(
            f"it needs {module}, which can't be imported ({missing}); pip install {package}"
        ) from None


def _check(topology: Topology, name: str, able: bool, op: str, dtype: np.dtype) -> None:
    """Raise the same error on all ranks if a peer can't reduce such arrays, or if there are several hosts."""
    if not able:
        raise on_all_ranks(OptionError(f"--peers {name} has no {op} of {dtype}"), topology.world)
    if not _one_host(topology):
        raise on_all_ranks(UnavailableError(f"--peers {name} is measured on one host only"), topology.world)


def _one_host(topology: Topology) -> bool:
    return len(set(all_values(topology.world, socket.gethostname(), "compare the hosts"))) == 1


def _build_deepspeed(torch: Any, compiles: bool) -> Any:
    """Return DeepSpeed's library for shared memory. compiles: this rank compiles it, unless it is there."""
    found = importlib.util.find_spec("deepspeed")
    if found is None or found.origin is None:
        raise UnavailableError("--peers deepspeed needs the sources in DeepSpeed's package; pip install deepspeed")
    sources = Path(found.origin).parent / "ops" / "csrc" / "cpu" / "comm"
    built = Path.home() / ".cache" / "allreduce_benchmarks" / f"deepspeed, torch {torch.__version__}"
    if compiles and (lock := built / "lock").exists():
        raise UnavailableError(f"--peers deepspeed is being compiled; if no job compiles it, remove {lock}")
    try:
        from torch.utils import cpp_extension

        built.mkdir(parents=True, exist_ok=True)
        return cpp_extension.load(
            "deepspeed_shm_comm",
            [str(sources / name) for name in DEEPSPEED_SOURCES],
            ["-O2", "-fopenmp"],
            extra_ldflags=["-fopenmp"],
            build_directory=str(built),
        )
    except (ImportError, OSError, RuntimeError) as failed:
        text = f"--peers deepspeed can't be compiled ({failed}); it needs a C++ compiler and ninja"
        raise UnavailableError(text) from None


def _torch_with_gloo() -> Any:
    torch = _imported("torch", '".[torch]" in the checkout')
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        raise UnavailableError("--peers gloo: this PyTorch was built without gloo; install another build")
    return torch


def join(distributed: Any, topology: Topology) -> None:
    """Make all ranks one process group, or raise the same error on all of them. Collective."""
    from allreduce.torch_backend.rendezvous import store_of_rank_0

    store = store_of_rank_0(topology, TIMEOUT)
    if _one_host(topology):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # host names often do not resolve in containers
    error = None
    try:
        distributed.init_process_group(
            "gloo", store=store, rank=topology.rank, world_size=topology.size, timeout=TIMEOUT
        )
    except (OSError, RuntimeError, ValueError) as failed:
        place = "GLOO_SOCKET_IFNAME names the network interface to use"
        error = UnavailableError(f"--peers gloo can't connect the ranks: {failed}; {place}")
    raise_together(topology.world, error)


def _tensor(torch: Any, array: np.ndarray) -> Any:
    """Return a tensor in the memory of an array."""
    if array.dtype == dtypes.BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)

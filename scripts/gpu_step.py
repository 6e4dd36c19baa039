"""A training step on GPUs: MirroredOptimizer, replicated and sharded, beside DistributedDataParallel on NCCL.

mpirun -n 8 python scripts/gpu_step.py                # one rank for each GPU
mpirun -n 2 python scripts/gpu_step.py --width 1024   # ranks that share a GPU stage through the host; DDP is left out
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from allreduce import Topology
from allreduce.transport.control import root_value
from trainers.cli.options import Parser
from trainers.pytorch import MirroredOptimizer


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--width", type=int, default=4096, help="of eight layers (default: 4096)")
    parser.add_argument("--batch", type=int, default=256, help="rows of a rank (default: 256)")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(f"PyTorch {torch.__version__} (for CUDA {torch.version.cuda}) sees no GPU that it can use")

    topology = Topology()
    device = torch.device("cuda", topology.node_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    alone = topology.node_size <= torch.cuda.device_count()
    model = network(options.width, device)
    parameters = sum(each.numel() for each in model.parameters())
    say(topology, f"{parameters / 1e6:.0f} M parameters, {topology}, {torch.cuda.get_device_name(device)}")

    x = torch.randn(options.batch, options.width, device=device)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-4)
    report(topology, "no communication", timed(topology, options.steps, lambda: step(model, plain, x)))
    for update in ("replicated", "sharded"):
        for name in ("nccl" if alone else "auto", "shared"):
            model = network(options.width, device)
            plain = torch.optim.AdamW(model.parameters(), lr=1e-4)
            with MirroredOptimizer(plain, model, name, topology=topology, update=update, check_every=0) as ours:
                times = timed(topology, options.steps, lambda model=model, ours=ours: step(model, ours, x))
                report(topology, f"MirroredOptimizer, {update}, {ours.backend.name}", times)
    if alone and topology.size > 1:
        beside_ddp(topology, options, device, x)


def beside_ddp(topology: Topology, options: argparse.Namespace, device: torch.device, x: torch.Tensor) -> None:
    port = root_value(topology.world, free_port(), "meet in torch.distributed")
    store = dist.TCPStore(port[0], port[1], topology.size, topology.rank == 0)
    dist.init_process_group("nccl", store=store, rank=topology.rank, world_size=topology.size, device_id=device)
    model = DistributedDataParallel(network(options.width, device), device_ids=[device.index])
    plain = torch.optim.AdamW(model.parameters(), lr=1e-4)
    report(topology, "DistributedDataParallel, nccl", timed(topology, options.steps, lambda: step(model, plain, x)))
    dist.destroy_process_group()


def network(width: int, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [part for _ in range(8) for part in (torch.nn.Linear(width, width), torch.nn.GELU())]
    return torch.nn.Sequential(*layers).to(device)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def timed(topology: Topology, steps: int, work: Callable[[], None]) -> list[float]:
    """Seconds of each step, after five that warm up."""
    times = []
    for number in range(steps + 5):
        torch.cuda.synchronize()
        topology.world.Barrier()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if number >= 5:
            times.append(time.perf_counter() - begin)
    return times


def report(topology: Topology, name: str, times: list[float]) -> None:
    low, high = min(times) * 1e3, max(times) * 1e3
    say(topology, f"{name:40} {statistics.median(times) * 1e3:8.2f} ms a step ({low:.2f} to {high:.2f})")


def free_port() -> tuple[str, int]:
    import socket

    with socket.socket() as listening:
        listening.bind(("", 0))
        return socket.gethostname(), listening.getsockname()[1]


def say(topology: Topology, text: str) -> None:
    if topology.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()

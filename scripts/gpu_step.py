"""Times a training step on GPUs: MirroredOptimizer, replicated and sharded, and DistributedDataParallel on NCCL.

mpirun -n 8 python scripts/gpu_step.py                # one rank for each GPU
mpirun -n 2 python scripts/gpu_step.py --width 1024   # ranks that share a GPU stage through the host; DDP is left out
"""

import argparse
import datetime
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from allreduce import Topology
from allreduce.torch_backend.rendezvous import store_of_rank_0
from benchmarks.lib import timing
from benchmarks.lib.outputs import Screen
from trainers.callbacks import CheckDivergence
from trainers.cli.parser import Parser
from trainers.pytorch import MirroredOptimizer


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--width", type=int, default=4096, help="width of the eight layers (default: 4096)")
    parser.add_argument("--batch", type=int, default=256, help="rows per rank (default: 256)")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(f"PyTorch {torch.__version__} (for CUDA {torch.version.cuda}) finds no GPU that it can use")

    topology = Topology()
    device = torch.device("cuda", topology.node_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    alone = topology.node_size <= torch.cuda.device_count()
    x = torch.randn(options.batch, options.width, device=device)
    model, plain = made(options.width, device)
    parameters = sum(each.numel() for each in model.parameters())
    if topology.rank == 0:
        print(f"{parameters / 1e6:.0f} M parameters, {topology}, {torch.cuda.get_device_name(device)}", flush=True)
    report(topology, options, "no communication", partial(step, model, plain, x))
    for update in ("replicated", "sharded"):
        for name in ("nccl" if alone else "auto", "shared"):
            model, plain = made(options.width, device)
            with MirroredOptimizer(
                plain, model, name, topology=topology, update=update, transforms=[CheckDivergence(0)]
            ) as ours:
                name = f"MirroredOptimizer, {update}, {ours.backend.name}"
                report(topology, options, name, partial(step, model, ours, x))
    if alone and topology.size > 1:
        store = store_of_rank_0(topology, datetime.timedelta(minutes=5))
        dist.init_process_group("nccl", store=store, rank=topology.rank, world_size=topology.size, device_id=device)
        model, plain = made(options.width, device)
        model = DistributedDataParallel(model, device_ids=[device.index])
        report(topology, options, "DistributedDataParallel, nccl", partial(step, model, plain, x))
        dist.destroy_process_group()


def made(width: int, device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer."""
    torch.manual_seed(0)
    layers = [part for _ in range(8) for part in (torch.nn.Linear(width, width), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Take one step, and wait until the GPU has finished it."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    torch.cuda.synchronize()


def report(topology: Topology, options: argparse.Namespace, name: str, train: Callable[[], None]) -> None:
    """Print the step times of the slowest rank, after five warm-up steps. Collective."""
    times = timing.take_turns(topology.world, {name: train}, options.steps, 5, Screen(False, None, ""))
    if topology.rank == 0:
        print(timing.table(times), flush=True)


if __name__ == "__main__":
    main()

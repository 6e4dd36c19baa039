"""Horovod's synthetic benchmark, rewritten: samples per second of a model that trains on random data.

python scripts/hvd_synthetic_benchmark.py
mpirun -n 2 python scripts/hvd_synthetic_benchmark.py --width 2048 --fp16
"""

import time

import torch

import trainers.horovod.torch as hvd  # was: import horovod.torch as hvd
from trainers.cli.parser import Parser

parser = Parser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=32, help="rows of a batch of one rank")
parser.add_argument("--width", type=int, default=1024, help="width of the hidden layers")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--warm-up", type=int, default=5, help="batches that are not timed")
parser.add_argument("--iterations", type=int, default=10)
parser.add_argument("--batches", type=int, default=5, help="batches of an iteration")
parser.add_argument("--groups", type=int, default=None, help="number of groups in which gradients are averaged")
parser.add_argument("--fp16", action="store_true", help="send gradients as float16")
options = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
layers: list[torch.nn.Module] = []
for _ in range(options.layers):
    layers += [torch.nn.Linear(options.width, options.width), torch.nn.ReLU()]
model = torch.nn.Sequential(*layers, torch.nn.Linear(options.width, 10))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01),
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if options.fp16 else hvd.Compression.none,
    groups=options.groups,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
torch.manual_seed(hvd.rank())
x, y = torch.randn(options.batch_size, options.width), torch.randint(10, (options.batch_size,))


def run(batches: int) -> float:
    """Train on this many batches; return the seconds."""
    begin = time.perf_counter()
    for _ in range(batches):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return time.perf_counter() - begin


run(options.warm_up)
rates = torch.tensor([options.batch_size * options.batches / run(options.batches) for _ in range(options.iterations)])
everyone = hvd.allreduce(rates, op=hvd.Sum)
if hvd.rank() == 0:
    size = sum(parameter.numel() for parameter in model.parameters())
    spread = 1.96 * everyone.std(correction=0).item()
    print(f"{size} parameters: {everyone.mean().item():.0f} +- {spread:.0f} samples/s on {hvd.size()} ranks")
hvd.shutdown()

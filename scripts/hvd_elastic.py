"""Horovod's elastic example, rewritten: the training continues when ranks fail.

mpirun --with-ft ulfm -n 3 python scripts/hvd_elastic.py --lose 1    # rank 1 is killed in the second epoch
mpirun -n 3 python scripts/hvd_elastic.py                            # without ULFM a failed rank ends the job
"""

import os
import signal

import torch

import trainers.horovod.torch as hvd  # was: import horovod.torch as hvd
from trainers import datasets
from trainers.cli.parser import Parser

parser = Parser(description=__doc__)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=16, help="rows of a batch of one rank")
parser.add_argument("--lr", type=float, default=0.02, help="learning rate for one rank; scaled by the number of ranks")
parser.add_argument("--lose", type=int, default=None, help="a rank that is killed in the second epoch, for a test")
options = parser.parse_args()

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
first_rank = hvd.rank()
data = datasets.load("digits")
x_train, x_test = (torch.from_numpy((x - data.shift) * data.scale).float() for x in (data.x_train, data.x_test))
y_train, y_test = torch.from_numpy(data.y_train), torch.from_numpy(data.y_test)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
sampler = hvd.elastic.ElasticSampler(x_train)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.epoch < options.epochs:
        loader = torch.utils.data.DataLoader(range(len(x_train)), options.batch_size, sampler=sampler)
        for batch, rows in enumerate(loader):
            if first_rank == options.lose and (state.epoch, batch) == (1, 5):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x_train[rows]), y_train[rows]).backward()
            optimizer.step()
            sampler.record_batch(batch, options.batch_size)
            if batch % 10 == 9:
                state.commit()  # after a failure the training continues from here
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        state.commit()


def on_reset() -> None:
    """Ranks have failed: scale the learning rate to the number of ranks."""
    for group in optimizer.param_groups:
        group["lr"] = options.lr * hvd.size()
    print(f"rank {first_rank} continues as rank {hvd.rank()} of {hvd.size()}, in epoch {state.epoch + 1}", flush=True)


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
state.register_reset_callbacks([on_reset])
train(state)
accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
if hvd.rank() == 0:
    print(f"{hvd.size()} ranks: test accuracy {accuracy:.4f}", flush=True)
hvd.shutdown()

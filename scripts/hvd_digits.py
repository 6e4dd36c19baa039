"""Horovod's MNIST example, rewritten for the data set "digits" of this package; one import differs.

python scripts/hvd_digits.py
mpirun -n 4 python scripts/hvd_digits.py --fp16
"""

import torch
import torch.utils.data.distributed

import trainers.horovod.torch as hvd  # was: import horovod.torch as hvd
from trainers import datasets
from trainers.cli.options import Parser

parser = Parser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=16, help="rows of a batch of one rank")
parser.add_argument("--lr", type=float, default=0.02, help="learning rate for one rank; scaled by the number of ranks")
parser.add_argument("--fp16", action="store_true", help="send gradients as float16")
options = parser.parse_args()

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
data = datasets.load("digits")
x_train, x_test = (torch.from_numpy((x - data.shift) * data.scale).float() for x in (data.x_train, data.x_test))
train = torch.utils.data.TensorDataset(x_train, torch.from_numpy(data.y_train))
test = torch.utils.data.TensorDataset(x_test, torch.from_numpy(data.y_test))
sampler = torch.utils.data.distributed.DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(train, options.batch_size, sampler=sampler)

model = torch.nn.Sequential(
    torch.nn.Unflatten(1, (1, 8, 8)),
    torch.nn.Conv2d(1, 16, 3),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(16 * 36, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
compression = hvd.Compression.fp16 if options.fp16 else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)

for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss of rank 0's last batch {loss.item():.4f}")

mine = torch.arange(hvd.rank(), len(test), hvd.size())  # every row of the test set once
with torch.no_grad():
    right = (model(x_test[mine]).argmax(1) == test.tensors[1][mine]).sum()
right = hvd.allreduce(right, name="right", op=hvd.Sum).item()
if hvd.rank() == 0:
    print(f"{hvd.size()} ranks: test accuracy {right / len(test):.4f}")
hvd.shutdown()

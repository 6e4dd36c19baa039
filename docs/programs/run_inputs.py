"""Train a model of two inputs, in which all classes count alike.

mpirun -n 4 python run_inputs.py
"""

import torch
from torch import nn

from trainers import MirroredTrainer, datasets
from trainers.replicas.pytorch import TorchReplica


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.of_image = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten())
        self.of_both = nn.Linear(8 * 6 * 6 + 8, 10)

    def forward(self, image, rows):
        return self.of_both(torch.cat([self.of_image(image), rows], dim=1))


def inputs(x):
    image = x.reshape(-1, 1, 8, 8) / 16
    return {"image": image, "rows": image.mean(axis=(1, 3))}


data = datasets.load("digits")
torch.manual_seed(0)
module = Digits()
optimizer = torch.optim.Adam(module.parameters(), lr=0.003)
with MirroredTrainer(TorchReplica(module, nn.CrossEntropyLoss(), optimizer)) as trainer:
    trainer.fit(
        inputs(data.x_train),  # module(image=..., rows=...) is called
        data.y_train,
        epochs=10,
        batch_size=100,
        class_weight="balanced",  # or sample_weight=one number for each row
    )
    scores = trainer.evaluate(inputs(data.x_test), data.y_test)
    outputs = trainer.predict(inputs(data.x_test))
    if trainer.rank == 0:
        print(f"accuracy {scores['accuracy']:.2f}")
        print(f"predictions {outputs.shape}")

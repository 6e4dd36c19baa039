"""Lightning, which starts its own processes.

python with_lightning.py
"""

import warnings

import lightning
import torch
import torchmetrics
from torch.utils.data import DataLoader, TensorDataset

from trainers import datasets


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )
        self.accuracy = torchmetrics.Accuracy(
            "multiclass", num_classes=10
        )  # reduced over the same ranks

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        outputs = self.network(x)
        loss = torch.nn.functional.cross_entropy(outputs, y)
        self.accuracy(outputs, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main():
    warnings.simplefilter("ignore")
    lightning.seed_everything(0)
    data = datasets.load("digits")
    x = torch.as_tensor((data.x_train - data.shift) * data.scale).float()
    loader = DataLoader(
        TensorDataset(x, torch.as_tensor(data.y_train)), batch_size=32, shuffle=True
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Digits(), loader)
    if trainer.global_rank == 0:
        loss, accuracy = (trainer.callback_metrics[name] for name in ("loss", "accuracy"))
        print(f"loss {loss:.4f}, accuracy {accuracy:.4f} on {trainer.world_size} ranks")


if __name__ == "__main__":
    main()

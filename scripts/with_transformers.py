"""The Transformers Trainer over allreduce: one line before its arguments. A tiny model of random weights and tokens.

mpirun -n 2 python scripts/with_transformers.py

The Trainer does not know the backend "allreduce" (TrainingArguments(ddp_backend="allreduce") is refused) and makes
its own process group, mostly with gloo, if there is none; it uses an existing one.
"""

import tempfile

try:
    import torch
    import torch.distributed as dist
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
except ImportError as error:
    raise SystemExit(
        f'Transformers or PyTorch is missing ({error}): pip install ".[torch,frameworks]" in the checkout'
    ) from None

from allreduce.torch_backend import require


class Shown(TrainerCallback):
    """Prints the backend that averages the gradients; raises if it is another one."""

    trainer: Trainer

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step == 0:
            line = require(self.trainer.model_wrapped)
            if state.is_world_process_zero:
                print(line)


def main() -> None:
    dist.init_process_group("allreduce")  # the only change
    torch.manual_seed(0)
    tokens = torch.randint(1, 50, (256, 8))
    rows = [{"input_ids": row, "labels": int(row[0] > 25)} for row in tokens]
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=16,
            num_train_epochs=5,
            learning_rate=3e-3,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        shown = Shown()
        trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=rows, callbacks=[shown])
        shown.trainer = trainer
        result = trainer.train()
    if dist.get_rank() == 0:
        print(f"loss {result.training_loss:.4f} on {arguments.world_size} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

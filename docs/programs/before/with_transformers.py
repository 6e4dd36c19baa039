"""The Transformers Trainer on one process. A tiny model of random weights and tokens.

python with_transformers.py
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


def main():
    torch.manual_seed(0)
    tokens = torch.randint(1, 50, (256, 8))
    rows = [{"input_ids": row, "labels": int(row[0] > 25)} for row in tokens]
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
    )
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
        trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=rows)
        result = trainer.train()
    print(f"loss {result.training_loss:.4f} on {arguments.world_size} ranks")


if __name__ == "__main__":
    main()

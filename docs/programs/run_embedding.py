"""Train a table of vectors, of which a batch uses a few rows.

mpirun -n 4 python run_embedding.py
"""

import numpy as np

from trainers import EmbeddingNetwork, MirroredTrainer

random = np.random.default_rng(0)  # the same rows on every rank
# texts of 8 words, from a vocabulary of 200,000
words = random.integers(0, 2000, size=(2000, 8)) * 100
labels = (words < 100_000).sum(axis=1) > 4  # do most of them come from its first half?
network = EmbeddingNetwork([16, 32, 2], words=200_000, table_lr=20.0, lr=0.01)
with MirroredTrainer(network) as trainer:
    trainer.fit(words, labels.astype(int), epochs=10, batch_size=100)
    scores = trainer.evaluate(words, labels.astype(int))
    if trainer.rank == 0:
        print(f"accuracy {scores['accuracy']:.2f}")

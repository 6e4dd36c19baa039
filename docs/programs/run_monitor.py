"""Callbacks: early stopping, the best model, a CSV file and a trace.

mpirun -n 4 python run_monitor.py
"""

from pathlib import Path

from trainers import MirroredTrainer, NumpyNetwork, datasets
from trainers.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint, Timeline

data = datasets.load("digits")
network = NumpyNetwork([data.features, 64, 32, len(data.classes)], seed=0, lr=0.001)
network.scale_input(data.shift, data.scale)
callbacks = [  # the same on every rank
    EarlyStopping("val_loss", patience=3, restore_best_weights=True),
    ModelCheckpoint("best.npz", save_best_only=True),  # rank 0 writes the files
    CSVLogger("log.csv"),
    Timeline("trace.json"),
]
with MirroredTrainer(network) as trainer:
    test = data.x_test, data.y_test
    trainer.fit(
        data.x_train,
        data.y_train,
        epochs=8,
        batch_size=400,
        validation_data=test,
        callbacks=callbacks,
    )
    if trainer.rank == 0:
        lines = len(Path("log.csv").read_text().splitlines())
        print(f"log.csv has {lines} lines; best.npz is there: {Path('best.npz').exists()}")

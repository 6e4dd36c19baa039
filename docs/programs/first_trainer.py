"""Train, evaluate and save with a trainer.

mpirun -n 4 python first_trainer.py
"""

from trainers import MirroredTrainer, NumpyNetwork, datasets

data = datasets.load("digits")  # all rows, on every rank
network = NumpyNetwork([data.features, 64, 32, len(data.classes)], seed=0)
network.scale_input(data.shift, data.scale)

with MirroredTrainer(network) as trainer:
    trainer.fit(data.x_train, data.y_train, epochs=10, batch_size=100)  # of all ranks together
    scores = trainer.evaluate(data.x_test, data.y_test)  # the same on every rank
    trainer.save("model.npz")  # every rank calls it; rank 0 writes
    if trainer.rank == 0:
        print(f"accuracy {scores['accuracy']:.3f}")

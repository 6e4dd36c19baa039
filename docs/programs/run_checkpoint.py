"""Train with checkpoints, and resume when the program is started again.

mpirun -n 4 python run_checkpoint.py    # kill it, and run it again: it resumes
"""

from trainers import Checkpoint, MirroredTrainer, NumpyNetwork, datasets

data = datasets.load("digits")
network = NumpyNetwork([data.features, 32, len(data.classes)])
network.scale_input(data.shift, data.scale)
checkpoint = Checkpoint("run", every="10 minutes", keep=3)
with MirroredTrainer(network) as trainer:
    test = data.x_test, data.y_test
    history = trainer.fit(
        data.x_train,
        data.y_train,
        epochs=10,
        validation_data=test,
        checkpoint=checkpoint,
        resume=True,
    )
    if trainer.rank == 0:
        print(f"{len(history)} epochs, before the stop and after it")

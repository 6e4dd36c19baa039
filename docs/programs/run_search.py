"""Search for the learning rate and the size of a network, on parts of the ranks.

mpirun -n 4 python run_search.py
"""

import allreduce
from trainers import MirroredTrainer, NumpyNetwork, datasets
from trainers.apps.search import search

data = datasets.load("iris")


def objective(trial, topology):
    units = trial.suggest_int("units", 4, 32, log=True)
    rate = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    network = NumpyNetwork([4, units, 3], lr=rate)
    network.scale_input(data.shift, data.scale)
    with MirroredTrainer(network, topology=topology) as trainer:
        trainer.fit(data.x_train, data.y_train, epochs=10, batch_size=16, progress=False)
        return trainer.evaluate(data.x_test, data.y_test)["accuracy"]


with allreduce.Topology() as topology:
    result = search(
        objective, trials=6, topology=topology, ranks_per_trial=1, directions="maximize", seed=1
    )
    if result.topology.rank == 0:
        print(
            f"{len(result.trials)} trials, the best has accuracy {result.best_value:.2f} with {result.best_params}"
        )

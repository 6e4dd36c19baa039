"""Train five networks, each on some of the ranks and on a bootstrap sample of the rows, and let them vote.

mpirun -n 4 python run_ensemble.py
"""

from trainers import EnsembleModel, EnsembleTrainer, NumpyNetwork, datasets

data = datasets.load("digits")  # ALL rows, on every rank


def make_network(seed: int) -> NumpyNetwork:
    network = NumpyNetwork([data.features, 32, len(data.classes)], seed=seed)
    network.scale_input(data.shift, data.scale)
    return network


with EnsembleTrainer(make_network, members=5, bagging="rows") as ensemble:
    ensemble.fit(data.x_train, data.y_train, epochs=15, batch_size=50, progress=False)
    whole = ensemble.evaluate(data.x_test, data.y_test)
    members = ensemble.evaluate_members(data.x_test, data.y_test)
    ensemble.save("ensemble.npz")
    if ensemble.rank == 0:
        mean = sum(scores["accuracy"] for scores in members.values()) / len(members)
        print(f"better than the mean member: {whole['accuracy'] > mean}")
        print(f"out-of-bag accuracy {ensemble.oob['accuracy']:.2f}")
        print(f"missing members: {ensemble.missing}")
        model = EnsembleModel.load("ensemble.npz")  # needs no MPI
        print(f"from the file: {model.predict(data.x_test).shape}")

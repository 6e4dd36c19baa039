"""Train with a parameter server: the last rank is the server, the others are workers.

mpirun -n 4 python run_servers.py
"""

from trainers import NumpyNetwork, ParameterServerTrainer, datasets

data = datasets.load("digits")
network = NumpyNetwork([data.features, 32, len(data.classes)])
network.scale_input(data.shift, data.scale)
with ParameterServerTrainer(network, servers=1) as trainer:
    history = trainer.fit(data.x_train, data.y_train, epochs=10)
    scores = trainer.evaluate(data.x_test, data.y_test)
    if trainer.rank == 0:
        print(f"gradients by staleness: {dict(enumerate(history[-1].staleness))}")
        print(f"accuracy {scores['accuracy']:.2f}")

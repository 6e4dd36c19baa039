"""Train with micro-batches, clipped gradients, an average of the parameters, and learning rates by step.

mpirun -n 4 python run_loop.py
"""

from trainers import EMA, Accumulate, ClipNorm, MirroredTrainer, NumpyNetwork, Schedule, datasets

data = datasets.load("digits")
network = NumpyNetwork([data.features, 64, 10], lr=0.01)
network.scale_input(data.shift, data.scale)
with MirroredTrainer(network) as trainer:
    history = trainer.fit(
        data.x_train,
        data.y_train,
        epochs=10,
        batch_size=100,  # of all ranks and micro-batches together
        transforms=[Accumulate(4), ClipNorm(1.0), EMA(0.99), Schedule("cosine", warmup=20)],
        validation_data=(data.x_test, data.y_test),  # with the average
    )
    raw = trainer.evaluate(data.x_test, data.y_test, ema=False)
    averaged = trainer.evaluate(data.x_test, data.y_test)
    trainer.save("model.npz")  # the parameters, and their average
    if trainer.rank == 0:
        print(f"norm of the gradients {history[-1].metrics['grad_norm']:.3f}")
        print(f"accuracy {raw['accuracy']:.2f}, with the average {averaged['accuracy']:.2f}")

alone = NumpyNetwork.load("model.npz")
alone.use_average()
alone.predict(data.x_test)

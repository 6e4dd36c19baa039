"""Export a model, and let onnxruntime answer.

mpirun -n 2 python run_export.py
"""

import numpy as np

from trainers import MirroredTrainer, datasets, network_of


def answer(path, rows):  # needs numpy and onnxruntime, and nothing of this library
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    label, probabilities = session.run(["label", "probabilities"], {"x": rows})
    return label, probabilities.max(axis=1)


data = datasets.load("digits")
with MirroredTrainer(network_of(data)) as trainer:
    trainer.fit(data.x_train, data.y_train, epochs=10, progress=False)
    about = trainer.export("digits.onnx", classes=data.classes)
    if trainer.rank == 0:
        print(f"rows compared: {about.rows}")
        labels, _ = answer("digits.onnx", data.x_test.astype(np.float32))
        right = labels == np.array(data.classes)[data.y_test]
        print(f"accuracy {right.mean():.3f}, the first label is {labels[0]!r}")

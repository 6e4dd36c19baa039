"""trainers.apps are on top: the trainers and the command line load none of them before one is asked for."""

import subprocess
import sys

from tests import launch

LOADS = """
import sys
import trainers, trainers.cli.main
from trainers import CentralStorageTrainer, MirroredTrainer, NumpyNetwork, ParameterServerTrainer, SpareReplicasTrainer
print([name for name in sys.modules if name.startswith("trainers.apps")])
from trainers import EnsembleModel
print("trainers.apps.ensemble.model" in sys.modules, "trainers.apps.ensemble.ensemble" in sys.modules)
"""


def test_the_trainers_load_no_app() -> None:
    done = subprocess.run([sys.executable, "-c", LOADS], cwd=launch.ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["[]", "True False"], done.stderr

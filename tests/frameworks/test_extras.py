"""Without a framework, the error of an import names the extra of this package that installs it."""

import subprocess
import sys

from tests import launch

EXTRAS = {
    "allreduce.jax": '".[jax]"',
    "allreduce.torch_backend": '".[torch]"',
    "trainers.horovod.torch": '".[torch]"',
    "trainers.keras": '".[keras,jax]" or ".[keras,torch]"',
    "trainers.pytorch": '".[torch]"',
    "trainers.replicas.jax": '".[jax]"',
    "trainers.replicas.keras": '".[keras,jax]" or ".[keras,torch]"',
    "trainers.replicas.pytorch": '".[torch]"',
}
IMPORTS = """
import importlib, sys
sys.modules |= dict.fromkeys(["jax", "keras", "torch"])
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
"""


def test_the_extra_is_named() -> None:
    command = [sys.executable, "-c", IMPORTS, *EXTRAS]
    said = subprocess.run(command, capture_output=True, text=True, cwd=launch.ROOT, timeout=60, check=True).stdout
    for name, extra in EXTRAS.items():
        (error,) = [line for line in said.splitlines() if line.startswith(f"{name}: ")]
        assert f"pip install {extra} in the checkout" in error

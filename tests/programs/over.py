"""Run a program of others with all of its process groups over one backend of torch.distributed.

    mpirun -n 2 python -m tests.programs.over allreduce train.py --batch_size=8
    mpirun -n 2 python -m tests.programs.over gloo -m accelerate.test_utils.scripts.test_sync

Says on stderr which process groups the program has started.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.torch_backend.pytorch_suite import make_groups  # which sets RANK and WORLD_SIZE, as torchrun does


def main(backend: str, program: str, *args: str) -> None:
    make_groups(backend)
    start = dist.init_process_group

    def started(*args: Any, **options: Any) -> None:
        start(*args, **options)
        print(f"process group: {dist.get_backend()}, {dist.get_world_size()} ranks", file=sys.stderr, flush=True)

    dist.init_process_group = started
    if program == "-m":
        sys.argv = list(args)
        runpy.run_module(args[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [program, *args]
        sys.path.insert(0, str(Path(program).resolve().parent))
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Gives hostile files and messages to every reader, in a separate process for each reader.

    python -m tests.fuzz --inputs 100000 --seed 1
    python -m tests.fuzz --readers "CSV,npz data set" --inputs 1000

Every input must end in success or in an error that its reader declares: no other exception, no crash, no hang, no
gigabyte of memory. Any other outcome is shown with its input, and the exit code is then 1. The seed and the number of
inputs determine the run, so it can be repeated.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
COLUMNS = ("inputs", "accepted", "refused", "defects")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.child:
        return _child(args)
    import mpi4py

    mpi4py.rc.initialize = False
    from .readers import READERS

    chosen = [each for each in READERS if args.readers is None or each.name in args.readers.split(",")]
    if not chosen:
        print(f"readers: {', '.join(each.name for each in READERS)}", file=sys.stderr)
        return 2
    share = args.inputs / sum(each.share for each in chosen)
    print(f"# {args.inputs} inputs, seed {args.seed}\n{'# reader':<26}" + "".join(f"{name:>10}" for name in COLUMNS))
    defects, shown = 0, []
    for reader in chosen:
        count = _one(reader.name, -int(-share * reader.share // 1), args.seed)
        defects += count["defects"]
        shown += [f"{reader.name}: {text}" for text in count["others"].values()]
        print(f"{reader.name:<26}" + "".join(f"{count[name]:>10}" for name in COLUMNS), flush=True)
    print("\n\n".join(shown))
    return 1 if defects else 0


def _one(name: str, inputs: int, seed: int) -> dict:
    """Return the counts of one reader's process."""
    command = [sys.executable, "-m", "tests.fuzz", "--child", "--readers", name]
    command += ["--inputs", str(inputs), "--seed", str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    *_, last = ended.stdout.splitlines() or [json.dumps(dict.fromkeys(COLUMNS, 0) | {"others": {}})]
    count: dict = json.loads(last)
    if code := ended.returncode:
        end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        count["defects"] += 1
        count["others"][end] = f"the process ended with {end} after {count['inputs']} inputs\n{ended.stderr[-6000:]}"
    return count


def _child(args: argparse.Namespace) -> int:
    """Print the counts as JSON, again and again: the last line tells how far a process came that has crashed."""
    import faulthandler
    import logging

    from .readers import READERS
    from .running import run

    faulthandler.enable()
    logging.disable(logging.CRITICAL)
    out = os.fdopen(os.dup(1), "w")
    (reader,) = (each for each in READERS if each.name == args.readers)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        run(reader, args.inputs, args.seed, Path(folder), lambda c: print(json.dumps(vars(c)), file=out, flush=True))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="of all readers together")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--readers", metavar="A,B", help="some of them (default: all)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())

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
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAD = f"{'reader':<24}{'inputs':>9}{'accepted':>10}{'refused':>9}{'other':>7}{'peak MiB':>10}{'seconds':>9}"
TOLD_SECONDS = 2.0


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
    print(f"# {args.inputs} inputs, seed {args.seed}\n# {HEAD}", flush=True)
    begin, totals, shown = time.monotonic(), [0, 0, 0, 0], []
    for reader in chosen:
        count, others = _one(reader.name, -int(-share * reader.share // 1), args.seed)
        numbers = [count["inputs"], count["accepted"], count["refused"], count["defects"]]
        totals = [total + number for total, number in zip(totals, numbers, strict=True)]
        shown += [f"{reader.name}: {text}" for text in others]
        print(_line(reader.name, numbers, count["peak_bytes"], count["seconds"]), flush=True)
    print(_line("all", totals, 0, time.monotonic() - begin))
    print("\n\n".join(shown))
    return 1 if totals[3] else 0


def _line(name: str, numbers: list[int], peak: int, seconds: float) -> str:
    inputs, accepted, refused, other = numbers
    memory = f"{peak / 2**20:.0f}" if peak else "-"
    return f"  {name:<24}{inputs:>9}{accepted:>10}{refused:>9}{other:>7}{memory:>10}{seconds:>9.0f}"


def _one(name: str, inputs: int, seed: int) -> tuple[dict, list[str]]:
    """The counts of one reader's process, and its other messages."""
    command = [
        sys.executable,
        "-m",
        "tests.fuzz",
        "--child",
        "--readers",
        name,
        "--inputs",
        str(inputs),
        "--seed",
        str(seed),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        count: dict = {
            "inputs": 0,
            "accepted": 0,
            "refused": 0,
            "defects": 0,
            "peak_bytes": 0,
            "seconds": 0.0,
            "others": {},
        }
        assert process.stdout is not None
        for line in process.stdout:
            count = json.loads(line)
            if sys.stderr.isatty():
                print(f"\r{name}: {count['inputs']} of {inputs}, {count['defects']} defects ", end="", file=sys.stderr)
        code = process.wait()
        errors.seek(0)
        said = errors.read()
    others = list(count["others"].values())
    if code:
        end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        count["defects"] += 1
        others.append(f"the process ended with {end} after {count['inputs']} inputs\n{said[-6000:]}")
    return count, others


def _child(args: argparse.Namespace) -> int:
    import faulthandler
    import logging

    from .readers import READERS
    from .running import Count, run

    faulthandler.enable()
    logging.disable(logging.CRITICAL)
    out, told = os.fdopen(os.dup(1), "w"), 0.0

    def tell(count: Count) -> None:
        nonlocal told
        if time.monotonic() - told > TOLD_SECONDS:
            told = time.monotonic()
            print(json.dumps(count.as_dict()), file=out, flush=True)

    (reader,) = (each for each in READERS if each.name == args.readers)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        count = run(reader, args.inputs, args.seed, Path(folder), tell)
    print(json.dumps(count.as_dict()), file=out, flush=True)
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

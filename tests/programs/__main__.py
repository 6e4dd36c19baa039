"""Run programs that others wrote on the ranks of mpirun, over gloo and over this library, and print the table's rows.

    python -m tests.programs --folder others              # all; clones their repositories into the folder
    python -m tests.programs --folder others nanoGPT      # the programs with this word in their names

docs/convert/programs.md has the table. A program passes if all ranks end with exit code 0, its process groups had the
backend in question, and the results that `shows` finds are there, and over this library the same as over gloo. The exit
code is 1 if a program that passes over gloo ends over this library in a way that the catalog does not expect.
Packages that a program needs must be importable; PYTHONPATH may name their folder.
"""

import argparse
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests import launch
from tests.programs.catalog import PROGRAMS, Program

LIMIT_SECONDS = 900.0  # of a job


def checkout(program: Program, folder: Path) -> Path:
    """Return the folder of a program's repository at its commit. It is cloned on the first use."""
    target = folder / program.source.rpartition("/")[2]
    if not target.exists():
        subprocess.run(["git", "clone", "-q", f"https://github.com/{program.source}", target], check=True)
    subprocess.run(["git", "-C", target, "checkout", "-q", program.commit], check=True)
    return target


def prepare(program: Program, folder: Path, work: Path) -> None:
    """Copy a program into the folder in which it runs, write its data, and edit the copy."""
    if program.commit:
        shutil.copytree(checkout(program, folder), work, ignore=shutil.ignore_patterns(".git"), dirs_exist_ok=True)
    if program.prepare:
        program.prepare(work)
    for path in work.rglob("*.py") if program.edits else ():
        text = path.read_text()
        for old, new in program.edits.items():
            text = re.sub(old, new, text, flags=re.MULTILINE)
        path.write_text(text)


def run(program: Program, backend: str, ranks: int, work: Path) -> tuple[str, list[str]]:
    """Run a program over a backend, or as it is if it has none. Return how it ended ("passed" or its error), and its
    results."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    folders = os.pathsep.join([str(work), str(launch.ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": folders, **program.environment}
    over = ["-m", "tests.programs.over", backend] if program.groups else []
    try:
        job = launch.mpirun(
            ranks, [*over, *shlex.split(program.command)], timeout=LIMIT_SECONDS, env=environment, cwd=work
        )
    except launch.JobTimeoutError:
        return f"no end in {LIMIT_SECONDS:.0f} s", []
    results = re.findall(program.shows, job.stdout, re.MULTILINE) if program.shows else []
    if job.returncode:
        print(job.stdout[-5000:], job.stderr[-5000:], sep="\n", file=sys.stderr)
        errors = re.findall(r"\b\w+(?:Error|Exception)\b: .*", job.stderr + job.stdout)
        return (errors[-1] if errors else f"exit code {job.returncode}"), results
    groups = set(re.findall(r"^process group: (.*)$", job.stderr, re.MULTILINE))
    if program.groups and groups != {f"{backend}, {ranks} ranks"}:
        return f"its process groups: {groups or 'none'}", results
    if program.shows and not results:
        return "no results", results
    return "passed", results


def row(program: Program, folder: Path, ranks: int) -> tuple[str, bool]:
    """Run a program over both backends. Return the table's row, and whether it is as expected."""
    ends, found = {}, {}
    for backend in ["gloo", "allreduce"][not program.groups :]:
        with tempfile.TemporaryDirectory(prefix="program") as work:
            prepare(program, folder, Path(work))
            ends[backend], found[backend] = run(program, backend, ranks, Path(work))
    ours, theirs = ends["allreduce"], ends.get("gloo", "-")
    if ours == theirs == "passed" and found["gloo"] != found["allreduce"]:
        ours = f"differing: {found['allreduce'][-1]} in place of {found['gloo'][-1]}"
    expected = ours == "passed" or theirs not in ("passed", "-")
    if program.refused and re.search(program.refused, ours):
        ours, expected = f"refused: {program.why}", True
    source = f"{program.source} {program.commit[:8] or version(program.source)}"
    return f"| {program.name} | {source} | {ranks} | {theirs} | {ours} |", expected


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--folder", type=Path, required=True, help="where the repositories are, or are cloned to")
    parser.add_argument("words", nargs="*", help="run the programs whose names have one of these")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    good = True
    for program in PROGRAMS:
        if options.words and not any(word in program.name for word in options.words):
            continue
        for ranks in program.ranks:
            text, expected = row(program, options.folder.resolve(), ranks)
            print(text, flush=True)
            good = good and expected
    return not good


if __name__ == "__main__":
    sys.exit(main())

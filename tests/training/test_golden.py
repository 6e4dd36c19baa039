"""No change of bits goes unseen: the SHA-256 of the parameters of trainings by each owner, transform and compression.

The bits also depend on NumPy and the processor: golden.json has the sums of some, by `arithmetic`, and the test is
skipped on others. A run with ALLREDUCE_TEST_GOLDEN=write adds those of this machine. A change of the bits has a line in
the CHANGELOG, and such a run, on a machine of the file: it removes the sums of the other machines.
"""

import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from tests import launch
from tests.conftest import in_one_job

FILE = Path(__file__).with_name("golden.json")
RANKS = 3
CASES = {
    "ring": "--allreduce ring",
    "halving_doubling": "--allreduce halving_doubling",
    "reduce_to_one": "--allreduce reduce_to_one",
    "hierarchical_copy": "--allreduce hierarchical_copy --ranks-per-node 2",
    "shared": "--allreduce shared",
    "sharded": "--allreduce ring --update sharded",
    "sharded, clipped, averaged": "--allreduce shared --update sharded --clip-norm 0.5 --ema 0.99",
    "bfloat16": "--allreduce ring --compress bfloat16",
    "int8": "--allreduce ring --compress int8",
    "powersgd": "--allreduce ring --compress powersgd",
    "exact": "--allreduce ring --exact",
    "exact, micro-batches, clipped": "--allreduce ring --exact --micro-batch 16 --clip-norm 1",
    "exact, sharded": "--allreduce ring --exact --update sharded",
    "local": "--allreduce ring --sync-every 5 --clip-norm 1 --schedule linear --warmup-steps 3",
    "diloco": "--allreduce ring --sync-every 5 --outer-optimizer diloco",
    "fragments": "--allreduce ring --sync-every 6 --outer-optimizer diloco --fragments 3",
    "central": "--strategy central_storage --clip-norm 1",
    "servers": "--strategy parameter_server --servers 1 --updates sync",
    "clipped, averaged": "--allreduce ring --clip-norm 0.5 --ema 0.99",
    "accumulated": "--allreduce ring --accumulate 3",
    "schedule": "--allreduce ring --schedule cosine --warmup-steps 10",
    "sgd": "--allreduce ring --optimizer sgd",
    "momentum, sharded": "--allreduce ring --optimizer momentum --update sharded --clip-norm 1",
    "balanced": "--allreduce ring --class-weight balanced",
    "skipped, accumulated": "--allreduce ring --check-gradients skip --clip-norm 1 --accumulate 2",
}


def arithmetic() -> str:
    """Return the SHA-256 of the processor's vector instructions and of operations of NumPy."""
    random = np.random.default_rng(0)
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    digest = hashlib.sha256(" ".join(sorted(re.findall(r"\b(?:avx|fma|sse)\w*", flags))).encode())
    for count in (7, 33, 34, 100):
        rows = random.normal(size=(count, 64)).astype(np.float32)
        weights = random.normal(size=(64, 32)).astype(np.float32)
        hidden = rows @ weights
        products = hidden, hidden @ weights.T, rows.T @ hidden
        for value in (*products, np.exp(hidden / 8), np.log(np.abs(hidden)), hidden.sum(0)):
            digest.update(value.tobytes())
    return digest.hexdigest()


@pytest.mark.jobs
@pytest.mark.parametrize("mpi", launch.MPIS)
def test_trainings_have_the_bits_of_the_file(mpi: str, tmp_path: Path) -> None:
    golden, here = json.loads(FILE.read_text()), arithmetic()
    writes = os.environ.get("ALLREDUCE_TEST_GOLDEN") == "write" and mpi == "openmpi"
    cases = CASES if mpi == "openmpi" else dict([*CASES.items()][::6])  # the messages of MPICH take longer
    if here not in golden and not writes:
        pytest.skip("NumPy or this processor gives other bits than those with which golden.json was written")
    common = ["--data", "digits", "--epochs", "5", "--json"]
    lines = [("trainers.cli.main", [*common, f"{case}.json", *cases[case].split()], tmp_path) for case in cases]
    outcomes = in_one_job(RANKS, lines, tmp_path, mpi=mpi, timeout=170)
    errors = {case: ranks[0]["stderr"] for case, ranks in zip(cases, outcomes, strict=True) if ranks[0]["code"] != 0}
    assert errors == {}
    found = {}
    for case in cases:
        digests = json.loads((tmp_path / f"{case}.json").read_text())["parameters_sha256"]
        assert len(set(digests)) == 1, case
        found[case] = digests[0]
    if writes:
        changed = golden.get(here, found) != found
        golden = {here: found} if changed else golden | {here: found}
        FILE.write_text(json.dumps(golden, indent=1) + "\n")
    assert found == {case: golden[here][case] for case in cases}
    assert mpi != "openmpi" or golden[here].keys() == CASES.keys()

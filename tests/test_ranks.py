"""The driver: runs tests/ranks under each MPI on 1 to 5 ranks, one job each.

-k, -m and -x apply to the tests inside. The words of the driver's test name count too, so `-k "mpich and ring"` runs
the tests of `ring` under MPICH, and `-k "4ranks"` those on four ranks.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import changed, launch
from tests.conftest import lacking
from tests.ranks import jobs

CHANGED = bool(os.environ.get("ALLREDUCE_TEST_CHANGED"))  # set by `scripts/test.sh --changed`
QUICK = bool(os.environ.get("ALLREDUCE_TEST_QUICK"))  # set by `scripts/test.sh --quick`
TORCH = bool(os.environ.get("ALLREDUCE_TEST_TORCH"))  # by `scripts/test.sh --torch VERSION`
RANKS = (1, 2, 3) if QUICK or TORCH else (1, 2, 3, 4, 5)
MPIS = ("openmpi",) if QUICK or TORCH else launch.MPIS
LIMIT_SECONDS = (
    1800.0  # of a job, beside another one on slow cores; the watchdog in ranks/conftest.py ends a hanging test
)


@pytest.mark.parametrize("ranks", [f"{ranks}ranks" for ranks in RANKS])
@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.rank_driver
def test_ranks(
    mpi: str, ranks: str, tmp_path: Path, request: pytest.FixtureRequest, record_property: Callable[[str, Any], None]
) -> None:
    count = int(ranks.removesuffix("ranks"))
    environment = {
        "ALLREDUCE_TEST_REPORTS": str(tmp_path),
        "ALLREDUCE_TEST_WORDS": f"{mpi} {ranks} {request.node.name}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # no test uses a plugin, and each rank would import them all
    }
    files = _files(mpi, count)
    if not files:
        pytest.skip("no file for ranks has changed")
    try:
        job = launch.mpirun(count, [*_pytest(request.config), *files], mpi=mpi, timeout=_limit(), env=environment)
    except launch.MissingEnvironmentError as error:
        lacking(error)
        return
    reports = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))]
    record_property("seconds", reports[0]["seconds"] if reports else {})
    shown = f"\n{job.stdout}\n{job.stderr}"
    if job.returncode:
        pytest.fail(f"{count} ranks under {mpi} ended with code {job.returncode}:{shown}", pytrace=False)
    assert [report["rank"] for report in reports] == list(range(count)), f"not all ranks came to an end:{shown}"
    assert len({report["collected"] for report in reports}) == 1, f"ranks ran different tests: {reports}{shown}"
    if reports[0]["collected"] == 0:
        pytest.skip("no test for ranks matches")
    assert len({report["ran"] for report in reports}) == 1, f"ranks ran different tests: {reports}{shown}"
    if reports[0]["ran"] == 0 and (CHANGED or request.config.option.keyword or request.config.option.markexpr):
        pytest.skip("every test for ranks that matches was skipped there")
    assert reports[0]["ran"] > 0, f"every test was skipped:{shown}"
    print(job.stdout)  # shown by -rP


def _pytest(config: pytest.Config) -> list[str]:
    options = ["-k", config.option.keyword] * bool(config.option.keyword)
    options += ["-m", config.option.markexpr] * bool(config.option.markexpr)
    options += [f"--maxfail={config.option.maxfail}"] * bool(config.option.maxfail)
    return ["-m", "pytest", "-p", "no:cacheprovider", "-q", "-rsfE", "--color=no", "--durations=8", *options]


def _files(mpi: str, ranks: int) -> list[str]:
    """Return the files, or the folder, that a job runs."""
    folder = launch.ROOT / "tests" / "ranks"
    if TORCH:
        return [str(folder / name) for name in ("pytorch", "torch_backend")]
    if QUICK:
        return list(map(str, jobs.files("quick", ranks)))
    if CHANGED:
        wanted = set(changed.tests_on_ranks())
        return [str(path) for path in jobs.files(mpi, ranks) if path.relative_to(launch.ROOT).as_posix() in wanted]
    return [str(folder)]


def _limit() -> float:
    return float(os.environ.get("ALLREDUCE_TEST_LIMIT", LIMIT_SECONDS))

"""python -m allreduce doctor: the findings for given facts about ranks, and the command itself."""

import json
from pathlib import Path

import pytest

from allreduce import __main__ as command_line
from allreduce.doctor import command
from allreduce.doctor.findings import OK, PROBLEM, WIDTH, Finding, count, exit_code, report, spans, summary
from allreduce.doctor.pairs import Results
from allreduce.errors import OptionError
from tests import launch
from tests.conftest import JobRunner, Program, in_one_job
from tests.doctor.doctor_ranks import NEEDS, cluster, measured, worse


def test_a_good_cluster_is_ok_in_few_lines() -> None:
    ranks = cluster(32, 32)
    results = measured(ranks)
    findings = command.judge(ranks, NEEDS, results)
    assert worse(findings) == []
    assert exit_code(findings) == 0
    shown = report(findings)
    assert len(shown.splitlines()) < 50
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert "gradients of 25M parameters take 0.83 s a step or more" in " ".join(shown.split())


def test_a_look_that_failed_is_a_finding_and_the_others_are_judged() -> None:
    ranks, failed = cluster(2, 2), {command.FAILED: "OSError: no such thing"}
    for rank, module in ((0, "memory"), (2, "network"), (3, "cores"), (3, "gpus")):
        ranks[rank].facts[module] = failed
    findings = command.judge(ranks, NEEDS, measured(ranks))
    told = [finding.text for finding in findings if finding.name == "check"]
    assert told == [f"failed on rank {rank}: OSError: no such thing" for rank in (3, 0, 3, 2)]
    assert exit_code(findings) == 2
    for each in ranks:
        each.facts["cores"] = each.facts["network"] = failed
    told = [finding.text for finding in command.judge(ranks, NEEDS, Results([], []))]
    assert told.count("failed on ranks 0-3: OSError: no such thing") == 2


def test_report() -> None:
    findings = [
        Finding(OK, "short", "all is well", area="a"),
        Finding(PROBLEM, "longer name", "x " * 100, "do this", "b"),
    ]
    shown = report(findings)
    assert shown.splitlines()[:3] == ["", "a", "  ok       short        all is well"]
    assert "\n                        -> do this\n" in shown
    assert shown.endswith("\n1 problem, 1 ok; exit code 2\n")
    assert summary(findings[:1]) == "1 finding, all ok"
    assert "all is well" in report([Finding(OK, "/tmp" * 40, "all is well")])
    for path in ("", "no/x"):
        with pytest.raises(OptionError, match="can't be written"):
            command.check_target(path)


def test_words() -> None:
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    given = {"25M": 25_000_000, "1.5b": 1_500_000_000, "7_000": 7000, "10": 10}
    assert {text: command.parameters(text) for text in given} == given
    assert count(350_000_000) == "350M"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["docter"], "invalid choice: 'docter'"),
        (["doctor", "--jso=x"], "did you mean '--json'?"),
        (["doctor", "--parameters", "-3"], "must be a number of parameters such as 350M, 1.5B or 25000000, got '-3'"),
        (["doctor", "--parameters", "many"], "must be a number of parameters"),
        (["doctor", "--seconds", "nan"], "must be a number of seconds from 0 to 3600, got 'nan'"),
        (["--versio"], "did you mean '--version'?"),
    ],
)
def test_bad_options(arguments: list[str], words: str) -> None:
    with pytest.raises(OptionError) as refused:
        command_line.parse(arguments, shown=True)
    assert words in str(refused.value)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["doctor", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as stop:
            command_line.parse(arguments, shown=True)
        assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert shown.count("mpirun -n 4 python -m allreduce doctor") == 3
    assert "64 means bad options" in shown


FAILS_ON_RANK_1 = """
import sys
from allreduce import __main__ as command_line
from allreduce.doctor.command import CHECKS

good = CHECKS["memory"]

def fail(topology):
    if topology.rank == 1:
        raise OSError("no memory here")
    return good.gather(topology)

CHECKS["memory"] = good._replace(gather=fail)
sys.exit(command_line.main(sys.argv[1:]))
"""


@pytest.mark.jobs
@pytest.mark.parametrize("mpi", launch.MPIS)
def test_a_job_with_a_look_that_fails_on_one_rank(mpi: str, mpirun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS_ON_RANK_1)
    job = mpirun(3, ["fails.py", "doctor", "--seconds", "1", "--json", "found.json"], mpi=mpi, cwd=tmp_path)
    assert job.returncode == 2, job.stdout + job.stderr
    assert "Traceback" not in job.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["exit_code"] == 2
    failed = [finding for finding in found["findings"] if finding["level"] == PROBLEM]
    assert [finding["text"] for finding in failed] == ["failed on rank 1: OSError: no memory here"]
    assert {finding["area"] for finding in found["findings"]} == {
        "MPI", "cores", "memory", "GPUs", "versions", "pairs of ranks",
    }  # fmt: skip
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2]
    assert found["ranks"][0]["facts"]["mpi"]["library"].startswith({"openmpi": "Open MPI", "mpich": "MPICH"}[mpi])
    assert found["ranks"][0]["facts"]["cores"]["threads"] == 1
    assert {tuple(pair["ranks"]) for pair in found["pairs"]} <= {(0, 1), (0, 2), (1, 2)}
    assert found["pairs"]
    assert all(pair["latency_s"] > 0 < pair["bytes_per_s"] for pair in found["pairs"])
    assert job.stdout.count("allreduce doctor: 3 ranks on 1 node") == 1


FAILS_TO_JUDGE = """
import sys
from allreduce import __main__ as command_line
from allreduce.doctor.command import CHECKS
CHECKS["cores"] = CHECKS["cores"]._replace(judge=None)
sys.exit(command_line.main(["doctor", "--seconds", "0"]))
"""


@pytest.mark.jobs
def test_an_error_of_its_own_is_no_warning(mpirun: JobRunner) -> None:
    """The doctor's own error does not give the exit code 1, which means warnings."""
    job = mpirun(1, ["-c", FAILS_TO_JUDGE])
    assert "TypeError" in job.stderr
    assert job.returncode == 2


@pytest.mark.jobs
def test_commands_on_two_ranks_speak_once(tmp_path: Path) -> None:
    given = "doctor --json - --seconds 0", "docter", "--help", "doctor --json no/x"
    lines: list[Program] = [("allreduce.__main__", line.split(), tmp_path) for line in given]
    as_json, wrong, shown, unwritable = in_one_job(2, lines, tmp_path)
    assert json.loads(as_json[0]["stdout"])["pairs"] == []
    assert as_json[0]["stderr"].startswith("allreduce doctor: 2 ranks on 1 node\n")
    assert as_json[0]["code"] == as_json[1]["code"] == json.loads(as_json[0]["stdout"])["exit_code"]
    assert [outcome["code"] for outcome in wrong + shown + unwritable] == [64, 64, 0, 0, 64, 64]
    assert "invalid choice: 'docter'" in wrong[0]["stderr"]
    assert "no/x: this file can't be written" in unwritable[0]["stderr"]
    for outcomes in (as_json, wrong, shown, unwritable):
        assert outcomes[1]["stdout"] == outcomes[1]["stderr"] == ""

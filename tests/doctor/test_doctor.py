"""The doctor: its findings for given facts about ranks, hosts and pairs of ranks, and the command itself."""

import json
import re
import sys
import threading
from collections.abc import Iterable
from ipaddress import ip_address, ip_network
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from allreduce import __main__ as command_line
from allreduce.doctor import command, host, network, pairs
from allreduce.doctor.findings import (
    EXTRA,
    OK,
    PROBLEM,
    WARNING,
    WIDTH,
    Finding,
    Needs,
    Rank,
    count,
    exit_code,
    report,
    spans,
    summary,
)
from allreduce.doctor.pairs import FEW, PairTimes, Results
from allreduce.errors import OptionError
from allreduce.process import launcher, proc, variables
from allreduce.topology import Topology
from tests import launch
from tests.conftest import JobRunner, Program, in_one_job
from tests.gpu import fake_cupy

GIB = 1 << 30
NEEDS = Needs(25_000_000)
LINK: Any = {"name": "eth0", "address": "10.0.0.1", "network": "10.0.0.0/24", "speed": 1000}


def facts_of(node: int, node_rank: int) -> dict[str, Any]:
    """Return the facts of a rank on a good host, in a cluster of such hosts."""
    interfaces = [LINK | {"address": f"10.0.0.{node + 1}"}]
    return {
        "mpi": {
            "library": "Open MPI v5.0.11", "threads": "MPI_THREAD_MULTIPLE", "unguarded": "", "launch": None,
        },
        "cores": {"cores": [node_rank], "of": 64, "quota": None, "threads": 1},
        "memory": {
            "shared_path": "/dev/shm", "shared_bytes": 64 * GIB, "shared_free": 64 * GIB, "available": 128 * GIB,
            "cma": True,
        },
        "gpus": {
            "device": None, "missing": '"nccl" needs CuPy: it is not installed', "present": 0, "visible": None,
            "cuda_aware": False,
        },
        "versions": {
            "versions": {"Python": "3.11.7", "numpy": "2.4.6", "allreduce": "0.1.0 (code 1)"},
            "cpu": "EPYC",
            "kernels": "C",
        },
        "network": None if node_rank else {"interfaces": interfaces, "infiniband": []},
    }  # fmt: skip


def cluster(*sizes: int) -> list[Rank]:
    """Return the facts of ranks on good hosts, with these numbers of ranks each."""
    places = [(node, node_rank) for node, size in enumerate(sizes) for node_rank in range(size)]
    return [Rank(rank, node, f"host{node}", facts_of(node, place)) for rank, (node, place) in enumerate(places)]


def measured(ranks: list[Rank], **slow: tuple[float, float]) -> Results:
    """Return the times of all pairs of ranks. slow: "r0_1" -> latency and bandwidth of ranks 0 and 1."""
    kinds = {True: (1e-6, 8e9), False: (50e-6, 0.12e9)}
    pairs = [
        PairTimes(one.rank, other.rank, *slow.get(f"r{one.rank}_{other.rank}", kinds[one.node == other.node]))
        for one, other in combinations(ranks, 2)
    ]
    return Results(pairs, [])


def judged(key: str, ranks: list[Rank], needs: Needs = NEEDS) -> list[Finding]:
    """Return the findings of one check."""
    return list(command.judge_one(key, ranks, needs))


def worse(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != OK]


def changed(key: str, ranks: list[Rank], facts: dict[int, dict[str, Any]]) -> list[Rank]:
    """Return the ranks, some of which get other facts of one check."""
    for rank, changes in facts.items():
        ranks[rank].facts[key] |= changes
    return ranks


def only(findings: Iterable[Finding]) -> Finding:
    """Return the only finding that is not ok."""
    (found,) = worse(findings)
    assert found.advice
    return found


def finds(key: str, ranks: list[Rank], facts: dict[int, dict[str, Any]], *words: str, needs: Needs = NEEDS) -> None:
    """Assert that a check of ranks that have other facts has one finding that is not ok, with these words."""
    found = only(judged(key, changed(key, ranks, facts), needs))
    shown = f"{found.level}, {found.name}: {found.text} -> {found.advice}"
    assert [each for each in words if each not in shown] == [], shown


def test_mpi() -> None:
    launch = launcher.Launch("srun", "N", 4, "use mpirun")
    told = "srun has started 4 processes (N=4), and MPI sees 1 rank"
    advice = "use mpirun. If each process should be a separate job, set ALLREDUCE_ALONE=1"
    finds("mpi", cluster(1), {0: {"launch": (str(launch), launch.advice)}}, PROBLEM, told, advice)
    finds("mpi", cluster(2, 2), {3: {"threads": "MPI_THREAD_SERIALIZED"}}, "MPI_THREAD_SERIALIZED on rank 3")
    told = "Open MPI v5.0.11 on ranks 0-1, 3; MPICH Version: 5.0.2 on rank 2"
    finds("mpi", cluster(2, 2), {2: {"library": "MPICH Version: 5.0.2"}}, told)
    unguarded = {"unguarded": "ranks can crash: no compiler; install one"}  # on one rank, whichever it is
    finds("mpi", cluster(2), {1: unguarded}, WARNING, "rank 1: ranks can crash: no compiler -> install one")


def test_cores() -> None:
    ranks, few = cluster(3, 3), {rank: {"cores": [0, 1], "of": 2} for rank in range(6)}
    finds("cores", ranks, few, "host0: 3 ranks on 2 cores; host1: 3 ranks on 2 cores", "at most 2 ranks")
    finds("cores", ranks, {0: {"of": 64}}, "bound to 2 of 64 cores")
    finds("cores", cluster(4), {0: {"quota": 1.5}}, "--cpus")
    bound = {2: {"cores": [0]}, 3: {"cores": [3, 4]}}
    finds("cores", cluster(4), bound, f"{PROBLEM}, binding", "ranks 0, 2 on 1 core (0)")
    threads = {rank: {"cores": list(range(8)), "threads": 8} for rank in range(4)}
    finds("cores", cluster(4), threads, "32 threads for 8 cores", "OMP_NUM_THREADS=2")
    finds("cores", cluster(3, 1), {}, "3 on host0, 1 on host1")


def test_memory() -> None:
    ranks, asked = cluster(4), Needs(25_000_000, asked=True)
    told = "host0: 64 MiB free, 495 MiB wanted for a model of 25M parameters"
    finds("memory", ranks, {0: {"shared_free": 64 << 20}}, f"{WARNING}, /dev/shm", told)
    finds("memory", ranks, {}, PROBLEM, needs=asked)
    assert worse(judged("memory", ranks, Needs(1_000_000, asked=True))) == []
    finds("memory", ranks, {0: {"shared_free": 1 << 20}}, PROBLEM, "bus errors", needs=Needs(10))
    finds("memory", cluster(4, 4), {4: {"available": GIB}}, "host1: 1 GiB free, 1.49 GiB wanted")
    ranks = [rank._replace(host="box") for rank in cluster(2, 2)]  # two containers of one name
    finds("memory", ranks, {0: {"shared_free": 1 << 19}}, "box: 512 KiB free", "bus errors")
    finds("memory", cluster(2, 2), {2: {"cma": False}, 3: {"cma": False}}, "host1: ranks may not")


def with_versions(ranks: list[Rank], *which: int, **versions: str) -> list[Rank]:
    for rank in which:
        ranks[rank].facts["versions"]["versions"] |= versions
    return ranks


def test_versions_that_differ() -> None:
    ranks = with_versions(cluster(32, 32), *range(32, 64), numpy="1.26.4", torch="2.13.0")
    found = [(each.name, each.text) for each in worse(judged("versions", ranks))]
    told = "2.4.6 on ranks 0-31; 1.26.4 on ranks 32-63", "missing on ranks 0-31; 2.13.0 on ranks 32-63"
    assert found == [("numpy", told[0]), ("torch", told[1])]
    finds("versions", with_versions(cluster(1, 1), 1, allreduce="0.1.0 (code 2)"), {}, PROBLEM)
    finds("versions", cluster(1, 1), {1: {"cpu": "Xeon"}}, "EPYC on rank 0; Xeon on rank 1")


def test_versions_that_are_newer_than_those_tried() -> None:
    newest = host.TRIED["torch"][-1]
    for version, told in ((newest, False), (f"{newest}+cpu", False), ("2.4.1", False), ("2.99.0a0", True)):
        found = judged("versions", with_versions(cluster(1, 1), 0, 1, torch=version))
        late = [(each.level, each.name) for each in worse(found)]
        assert late == [(WARNING, "torch, tried")] * told
        assert all(f"torch {newest}" in each.advice for each in worse(found))
        (line,) = (each for each in found if each.name == "newest tried")
        assert f"torch {newest}" in line.text


def test_the_versions_that_were_tried_are_those_that_are_asked_for() -> None:
    """The versions that the extra and the tests require."""
    oldest = host.TRIED["torch"][0].removesuffix(".0")
    assert f'torch = ["torch>={oldest}"]' in (launch.ROOT / "pyproject.toml").read_text()
    (pinned,) = re.findall("^torch==(.*)$", (launch.ROOT / "tests" / "constraints.txt").read_text(), re.M)
    assert pinned in host.TRIED["torch"]


def with_gpus(ranks: list[Rank], number: int) -> list[Rank]:
    """Give each host this number of GPUs."""
    places = [sum(other.node == rank.node for other in ranks[: rank.rank]) for rank in ranks]
    for rank, place in zip(ranks, places, strict=True):
        device = {"identity": f"{rank.host}-{place % number}", "name": "H200", "bytes": 141 * GIB}
        rank.facts["gpus"] |= {"device": device, "missing": "", "cuda_aware": True}
    return ranks


def test_gpus() -> None:
    findings = judged("gpus", with_gpus(cluster(2, 2), 2))
    assert worse(findings) == []
    assert findings[0].text == "H200, 141 GiB"
    finds("gpus", with_gpus(cluster(3), 2), {}, "duplicates: ", "ranks 0, 2 on host0")
    ranks = cluster(1, 1)
    with_gpus(ranks[:1], 1)
    finds("gpus", ranks, {}, 'rank 1: "nccl" needs CuPy')
    finds("gpus", with_gpus(cluster(2), 2), {1: {"cuda_aware": False}}, "no on rank 1: ", "pinned")
    ranks, told = cluster(1, 1), "host1 has 2 GPUs, and no rank can use one: "
    finds("gpus", ranks, {1: {"present": 2, "visible": ""}}, told, "CUDA_VISIBLE_DEVICES=: unset it")
    finds("gpus", ranks, {1: {"visible": None}}, "extra")  # CuPy is missing, as where PyTorch alone is installed


def test_without_its_libraries_the_doctor_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("psutil", "threadpoolctl"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert host._threads() == 3
    topology = Topology(MPI.COMM_SELF)
    facts = {key: check.gather(topology) for key, check in command.CHECKS.items()}
    topology.close()
    found = [each for key in command.CHECKS for each in judged(key, [Rank(0, 0, "host0", facts)])]
    assert [each.name for each in found if EXTRA in each.text + each.advice] == []
    assert network.interfaces() is None
    ranks = cluster(1, 1)
    ranks[1].facts["network"]["interfaces"] = None
    assert [each.name for each in judged("network", ranks) if EXTRA in each.text] == ["interfaces"]


def test_cupy_is_asked_for_the_gpu_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch, comm=MPI.COMM_SELF)
    with Topology(MPI.COMM_SELF) as topology:
        facts = host.gather_gpus(topology)
    assert facts["missing"] == ""
    assert (facts["device"]["name"], facts["device"]["bytes"]) == ("H200", 141 * GIB)
    assert "0000:00:00.0" in facts["device"]["identity"]


def test_limits_of_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "CONTROL_GROUP", tmp_path)
    assert proc.core_quota() is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert proc.core_quota() == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert proc.core_quota() is None
    assert (proc.available_bytes() or 0) > 1 << 20
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert proc.available_bytes() == 600
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 250\nactive_file 50\n")
    assert proc.available_bytes() == 850


def test_interfaces_of_this_host() -> None:
    pytest.importorskip("psutil")
    found = network.interfaces()
    assert found is not None
    assert not [each for each in found if each["network"].startswith("127.")]
    assert all(ip_address(each["address"]) in ip_network(each["network"]) for each in found)


def test_network() -> None:
    docker = {"name": "docker0", "address": "172.17.0.1", "network": "172.17.0.0/16", "speed": None}
    ranks = cluster(2, 2)
    bridges = {rank: {"interfaces": [*ranks[rank].facts["network"]["interfaces"], docker]} for rank in (0, 2)}
    told = "172.17.0.1 is the address of host0 and host1 (docker0)"
    finds("network", ranks, bridges, told, "btl_tcp_if_exclude lo,docker0")
    told = "no network in common (host0: eth0 10.0.0.1, docker0 172.17.0.1; host1: eth0 10.9.0.1)"
    finds("network", ranks, {2: {"interfaces": [LINK | {"address": "10.9.0.1", "network": "10.9.0.0/24"}]}}, told)
    finds("network", cluster(2, 2), {2: {"infiniband": ["mlx5_0"]}}, "missing on host0")


def timers() -> list[threading.Timer]:
    return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_ranks_that_do_not_meet_hear_what_may_be_in_the_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> Any:
        raise PermissionError("no sockets here")

    monkeypatch.setattr(network, "interfaces", refuse)
    with network.advise_if_late(seconds=60):
        (timer,) = timers()
    timer.join(30)
    assert capsys.readouterr().err == ""
    with network.advise_if_late(seconds=0):
        for timer in timers():
            timer.join(30)
    told = capsys.readouterr().err
    assert "the ranks are not connected yet" in told
    assert "has no known network" in told
    said = network.connecting_advice("host0", [LINK])
    assert "This host, host0, has eth0 in 10.0.0.0/24.\n" in said
    assert "--mca btl_tcp_if_include 10.0.0.0/24" in said


@pytest.mark.parametrize("name", variables.ANY_RANK)
def test_one_rank_says_that_they_do_not_meet(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in variables.ANY_RANK:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "1")
    with network.advise_if_late(seconds=60):
        assert not timers()


def test_hosts_of_one_name_are_told_apart() -> None:
    ranks = command.ranks_of(["box", "box", "box"], [[0, {}], [1, {}], [1, {}]])
    assert [rank.host for rank in ranks] == ["box#0", "box#1", "box#1"]


# Pairs of ranks


def test_64_ranks_with_one_slow_pair_name_it() -> None:
    ranks = cluster(32, 32)
    found = only(pairs.judge(ranks, NEEDS, measured(ranks, r3_40=(51e-6, 0.03e9)), None))
    assert (found.level, found.name) == (WARNING, "slow pairs")
    assert "ranks 3 and 40 (host0 - host1): 51 us, 0.03 GB/s" in found.text
    assert found.text.count("ranks ") == 1
    late = only(pairs.judge(ranks, NEEDS, measured(ranks, r5_6=(2e-3, 8e9)), None))
    assert "ranks 5 and 6 (host0): 2e+03 us" in late.text
    assert "bound" in late.advice


def test_half_of_the_pairs_are_slow_beside_the_other_half() -> None:
    ranks = cluster(1, 1, 1, 1)
    bad_host = {f"r{min(2, rank)}_{max(2, rank)}": (50e-6, 0.0129e9) for rank in (0, 1, 3)}
    results = measured(ranks, **bad_host)
    assert sorted(pair[:2] for pair in results.measured) == sorted(chain(*pairs.plan([0, 1, 2, 3])))
    findings = list(pairs.judge(ranks, NEEDS, results, None))
    assert "0.12 GB/s (median of 6 pairs)" in findings[0].text
    assert "ranks 0 and 2 (host0 - host2)" in only(findings).text


def test_two_pairs_are_too_few_to_call_one_slow() -> None:
    two = [PairTimes(0, 1, 1e-6, 8e9), PairTimes(2, 3, 1e-6, 1e9)]
    assert pairs.slow(two, [0, 0, 1, 1]) == []
    three = [PairTimes(0, 1, 9e-3, 8e9), PairTimes(0, 2, 1e-6, 8e9), PairTimes(1, 2, 1e-6, 8e9)]
    assert [pair[:2] for pair in pairs.slow(three, [0] * 3)] == [(0, 1)]


def test_of_two_measurements_the_better_values_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(5e-6, 8e9), (2e-6, 1e9)])
    monkeypatch.setattr(pairs, "_measure_pair", lambda *_: next(times))
    comm: Any = SilentRank()
    assert pairs.measure(comm, [[(0, 1)]] * 2, 10) == Results([PairTimes(0, 1, 2e-6, 8e9)], [])


@pytest.mark.parametrize("sizes", [(1,), (2,), (5,), (3, 1), (2, 2), (4, 3, 1), (1,) * 7, (32, 32), (8,) * 1000])
def test_each_rank_meets_its_neighbour_and_each_node_others_near_and_far(sizes: tuple[int, ...]) -> None:
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    rounds, first, last = pairs.plan(nodes), {}, {}
    for rank, node in enumerate(nodes):
        first.setdefault(node, rank)
        last[node] = rank
    for pairs_of_round in rounds:
        busy = [rank for pair in pairs_of_round for rank in pair]
        assert busy
        assert len(busy) == len(set(busy))
    planned = [pair for pairs_of_round in rounds for pair in pairs_of_round]
    wanted = [(rank, rank + 1) for rank, node in enumerate(nodes) if rank < last[node]]
    wanted += [
        (rank, other)
        for rank, node in enumerate(nodes)
        for other in range(rank + 2, last[node] + 1)
        if sizes[node] <= FEW
    ]
    for distance in range(1, FEW) if len(sizes) <= FEW else (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        wanted += [(first[node], first[node + distance]) for node in range(len(sizes) - distance)]
    assert sorted(planned) == sorted(wanted)
    assert len(rounds) <= 4 * FEW + 2 * len(sizes).bit_length()


def test_no_answer_and_a_slow_link_and_slow_memory() -> None:
    ranks = cluster(1, 1)
    silent = only(pairs.judge(ranks, NEEDS, Results([], [(0, 1)]), None))
    assert (silent.level, silent.text) == (PROBLEM, "ranks 0 and 1 (host0 - host1)")
    unused = only(pairs.judge(ranks, NEEDS, measured(ranks), 12.5e9))
    assert "an interface has 12.5 GB/s" in unused.advice
    assert network.link_speed([rank._replace(facts=rank.facts["network"]) for rank in ranks]) == 125e6
    crowded = only(pairs.judge(cluster(2), NEEDS, Results([PairTimes(0, 1, 4e-3, 1e9)], []), None))
    assert crowded.name == "same node"


class SilentRequest:
    def Test(self) -> bool:  # noqa: N802, MPI's name
        return False


class SilentRank:
    """A communicator of two ranks; the other rank never answers."""

    rank, size = 0, 1  # of size 1 for agreements

    def Isend(self, *_: Any) -> SilentRequest:  # noqa: N802, MPI's name
        return SilentRequest()

    Irecv = Isend

    def __getattr__(self, name: str) -> Any:
        return getattr(MPI.COMM_SELF, name)


def test_a_rank_that_does_not_answer_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "ANSWER_SECONDS", 0.01)
    comm: Any = SilentRank()
    results = pairs.measure(comm, [[(0, 1)], [(0, 2)]], 10)
    assert results == Results([], [(0, 1)])


# The command


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

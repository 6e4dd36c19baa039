"""python -m allreduce doctor: what is made of what ranks have found, and the command itself."""

import json
import threading
from itertools import combinations
from pathlib import Path
from typing import Any

import launch
import pytest
from conftest import JobRunner, in_one_job
from mpi4py import MPI

from allreduce import __main__ as command_line
from allreduce.doctor import (
    clock,
    command,
    cores,
    examination,
    gpus,
    measuring,
    meeting,
    memory,
    mpi,
    network,
    pairs,
    report,
    versions,
)
from allreduce.doctor.findings import OK, PROBLEM, WARNING, Finding, Needs, Rank, exit_code, spans
from allreduce.doctor.pairs import Measured
from allreduce.errors import OptionError

GIB = 1 << 30
NEEDS = Needs(25_000_000)
LINK: Any = {"name": "eth0", "address": "10.0.0.1", "network": "10.0.0.0/24", "speed": 1000}


def facts_of(node: int, node_rank: int) -> dict[str, Any]:
    """A rank on a good host, in a cluster of such."""
    reached = {"name": f"host{node}", "first": "host0", "resolves": f"10.0.0.{node + 1}", "first_resolves": "10.0.0.1"}
    interfaces = [LINK | {"address": f"10.0.0.{node + 1}"}]
    return {
        "mpi": {
            "library": "Open MPI v5.0.11", "threads": "MPI_THREAD_MULTIPLE", "ulfm": False, "ranks": 64, "started": 64,
        },
        "cores": {"cores": [node_rank], "of": 64, "quota": None, "threads": 1},
        "memory": {
            "shared_path": "/dev/shm", "shared_bytes": 64 * GIB, "shared_free": 64 * GIB, "available": 128 * GIB,
            "malloc": "glibc 2.36", "reach": True,
        },
        "gpus": {
            "devices": [], "driver": None, "trouble": "", "cupy": None, "mine": None, "present": 0, "visible": None,
            "cuda_aware": False,
        },
        "versions": {"versions": {"Python": "3.11.7", "numpy": "2.4.6", "allreduce": "0.1.0 (code 1)"}, "cpu": "EPYC"},
        "network": None if node_rank else {**reached, "interfaces": interfaces, "infiniband": []},
    }  # fmt: skip


def cluster(*sizes: int) -> list[Rank]:
    """Ranks on good hosts, of so many ranks each."""
    places = [(node, node_rank) for node, size in enumerate(sizes) for node_rank in range(size)]
    return [Rank(rank, node, f"host{node}", facts_of(node, place)) for rank, (node, place) in enumerate(places)]


def measured(ranks: list[Rank], **slow: tuple[float, float]) -> list[Measured]:
    """All pairs. slow: "r0_1" -> latency and bandwidth of ranks 0 and 1."""
    kinds = {True: (1e-6, 8e9), False: (50e-6, 0.12e9)}
    return [
        Measured(one.rank, other.rank, *slow.get(f"r{one.rank}_{other.rank}", kinds[one.node == other.node]))
        for one, other in combinations(ranks, 2)
    ]


def worse(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != OK]


def only(findings: list[Finding]) -> Finding:
    """The one finding that is not ok."""
    (found,) = worse(findings)
    assert found.advice
    return found


def test_a_good_cluster_is_ok_in_few_lines() -> None:
    ranks = cluster(32, 32)
    results = measuring.Results(measured(ranks), [])
    findings = examination.judge(ranks, NEEDS, [0.0, 0.0002], results)
    assert worse(findings) == []
    assert exit_code(findings) == 0
    shown = report.text("64 ranks", findings)
    assert len(shown.splitlines()) < 50
    assert max(map(len, shown.splitlines())) <= report.WIDTH
    assert "\033" not in shown
    assert "gradients of 25M parameters take 0.83 s a step or more" in " ".join(shown.split())
    assert "0.2 ms between hosts" in shown


def test_64_ranks_with_one_slow_pair_name_it() -> None:
    ranks = cluster(32, 32)
    found = only(pairs.judge(ranks, NEEDS, measured(ranks, r3_40=(51e-6, 0.03e9)), None))
    assert (found.level, found.name) == (WARNING, "slow pairs")
    assert "ranks 3 and 40 (host0 - host1): 51 us, 0.03 GB/s" in found.text
    assert found.text.count("ranks ") == 1
    late = only(pairs.judge(ranks, NEEDS, measured(ranks, r5_6=(2e-3, 8e9)), None))
    assert "ranks 5 and 6 (host0): 2e+03 us" in late.text
    assert "bound" in late.advice


def test_what_slow_pairs_have_in_common_is_said() -> None:
    ranks = cluster(2, 2, 2, 2)
    bad_rank = {f"r{min(5, rank)}_{max(5, rank)}": (50e-6, 0.01e9) for rank in (0, 1, 2, 3, 6, 7)}
    (found,) = [each for each in pairs.judge(ranks, NEEDS, measured(ranks, **bad_rank), None) if each.level != OK]
    assert "all of them have rank 5 (host2) in common" in found.advice
    assert "and 1 more" in found.text
    bad_host = {f"r{one}_{other}": (50e-6, 0.01e9) for one in (0, 1) for other in (2, 3)}
    bad_host |= {f"r{one}_{other}": (50e-6, 0.01e9) for one in (2, 3) for other in (4, 5)}
    assert (
        "all of them have host host1 in common"
        in only(pairs.judge(ranks, NEEDS, measured(ranks, **bad_host), None)).advice
    )


def test_half_of_the_pairs_are_slow_beside_the_other_half() -> None:
    ranks = cluster(1, 1, 1, 1)
    bad_host = {f"r{min(2, rank)}_{max(2, rank)}": (50e-6, 0.0129e9) for rank in (0, 1, 3)}
    findings = pairs.judge(ranks, NEEDS, measured(ranks, **bad_host), None)
    assert "0.12 GB/s (median of 6 pairs)" in findings[0].text
    assert "all of them have rank 2 (host2) in common" in only(findings).advice


def test_two_pairs_are_too_few_to_call_one_slow_and_second_looks_forgive_chance() -> None:
    two = [Measured(0, 1, 1e-6, 8e9), Measured(2, 3, 1e-6, 1e9)]
    assert pairs.slow(two, [0, 0, 1, 1]) == []
    first = [Measured(0, 1, 9e-3, 8e9), Measured(0, 2, 1e-6, 8e9), Measured(1, 2, 1e-6, 8e9)]
    assert [pair[:2] for pair in pairs.slow(first, [0] * 3)] == [(0, 1)]
    assert pairs.slow(pairs.better(first, [Measured(0, 1, 2e-6, 1e9)]), [0] * 3) == []


@pytest.mark.parametrize("sizes", [(1,), (2,), (5,), (3, 1), (2, 2), (4, 3, 1), (1, 1, 1, 1), (32, 32)])
def test_every_pair_comes_once_and_a_node_has_one_at_a_time(sizes: tuple[int, ...]) -> None:
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    rounds = pairs.plan(nodes)
    planned = [tuple(sorted(pair)) for pairs_of_round in rounds for pair in pairs_of_round]
    assert sorted(planned) == list(combinations(range(len(nodes)), 2))
    for pairs_of_round in rounds:
        busy = [node for pair in pairs_of_round for node in {nodes[rank] for rank in pair}]
        assert pairs_of_round
        assert len(busy) == len(set(busy))


def test_every_rank_is_measured_early_and_huge_jobs_have_a_limit() -> None:
    early = {
        rank
        for pairs_of_round in pairs.plan([rank // 32 for rank in range(64)])[:70]
        for rank in sum(pairs_of_round, ())
    }
    assert early == set(range(64))
    assert sum(map(len, pairs.plan([rank // 64 for rank in range(4096)]))) == pairs.MOST_PAIRS


def test_no_answer_and_a_slow_link_and_slow_memory() -> None:
    ranks = cluster(1, 1)
    assert only(pairs.unreachable([(0, 1)], ranks)).text == "ranks 0 and 1 (host0 - host1)"
    assert exit_code(pairs.unreachable([(0, 1)], ranks)) == 2
    unused = only(pairs.judge(ranks, NEEDS, measured(ranks), 12.5e9))
    assert "an interface promises 12.5 GB/s" in unused.advice
    assert network.speed(ranks) == 125e6
    crowded = only(pairs.judge(cluster(2), NEEDS, [Measured(0, 1, 4e-3, 1e9)], None))
    assert crowded.name == "same node"


def test_mpi() -> None:
    alone = cluster(1)
    alone[0].facts["mpi"] |= {"ranks": 1, "started": 4}
    found = only(mpi.judge(alone, NEEDS))
    assert found.level == PROBLEM
    assert "4 processes were started, and MPI sees 1 rank" in found.text
    ranks = cluster(2, 2)
    ranks[3].facts["mpi"]["threads"] = "MPI_THREAD_SERIALIZED"
    assert "MPI_THREAD_SERIALIZED on rank 3" in only(mpi.judge(ranks, NEEDS)).text
    ranks = cluster(2, 2)
    ranks[2].facts["mpi"]["library"] = "MPICH Version: 5.0.2"
    assert "Open MPI v5.0.11 on ranks 0-1, 3; MPICH Version: 5.0.2 on rank 2" in only(mpi.judge(ranks, NEEDS)).text
    for change, words in (({"ulfm": True}, "in force"), ({}, "--with-ft ulfm"), ({"library": "MPICH 5"}, "--resume")):
        ranks = cluster(1)
        ranks[0].facts["mpi"] |= change
        (said,) = [finding for finding in mpi.judge(ranks, NEEDS) if finding.name == "a lost rank"]
        assert words in said.text
        assert said.level == OK


def test_cores() -> None:
    ranks = cluster(3, 3)
    for rank in ranks:
        rank.facts["cores"] |= {"cores": [0, 1], "of": 2}
    found = only(cores.judge(ranks, NEEDS))
    assert "host0: 3 ranks on 2 cores; host1: 3 ranks on 2 cores" in found.text
    assert "at most 2 ranks" in found.advice
    ranks[0].facts["cores"]["of"] = 64
    assert "bound to 2 of 64 cores" in only(cores.judge(ranks, NEEDS)).advice
    ranks = cluster(4)
    ranks[0].facts["cores"]["quota"] = 1.5
    assert "--cpus" in only(cores.judge(ranks, NEEDS)).advice
    ranks = cluster(4)
    ranks[2].facts["cores"]["cores"] = ranks[0].facts["cores"]["cores"]
    ranks[3].facts["cores"]["cores"] = [3, 4]
    found = only(cores.judge(ranks, NEEDS))
    assert (found.level, found.name) == (PROBLEM, "binding")
    assert "ranks 0, 2 on 1 core (0)" in found.text
    ranks = cluster(4)
    for rank in ranks:
        rank.facts["cores"] |= {"cores": list(range(8)), "threads": 8}
    found = only(cores.judge(ranks, NEEDS))
    assert "32 threads for 8 cores" in found.text
    assert "OMP_NUM_THREADS=2" in found.advice
    assert "3 on host0, 1 on host1" in only(cores.judge(cluster(3, 1), NEEDS)).text


def test_memory() -> None:
    ranks = cluster(4)
    ranks[0].facts["memory"]["shared_free"] = 64 << 20
    found = only(memory.judge(ranks, NEEDS))
    assert (found.level, found.name) == (WARNING, "/dev/shm")
    assert "host0: 64 MiB free, 495 MiB wanted for a model of 25M parameters" in found.text
    assert only(memory.judge(ranks, Needs(25_000_000, asked=True))).level == PROBLEM
    assert worse(memory.judge(ranks, Needs(1_000_000, asked=True))) == []
    ranks[0].facts["memory"]["shared_free"] = 1 << 20
    found = only(memory.judge(ranks, Needs(10)))
    assert found.level == PROBLEM
    assert "bus errors" in found.advice
    ranks = cluster(4, 4)
    ranks[4].facts["memory"]["available"] = GIB
    assert "host1: 1 GiB available, 1.49 GiB wanted" in only(memory.judge(ranks, NEEDS)).text
    ranks = cluster(2, 2)
    for rank in ranks[2:]:
        rank.facts["memory"] |= {"reach": False}
    assert "host1: ranks may not" in only(memory.judge(ranks, NEEDS)).text
    ranks[0].facts["memory"]["malloc"] = "jemalloc"
    assert "jemalloc on rank 0" in worse(memory.judge(ranks, NEEDS))[0].text


def test_versions_that_differ() -> None:
    ranks = cluster(32, 32)
    for rank in ranks[32:]:
        rank.facts["versions"]["versions"] |= {"numpy": "1.26.4", "torch": "2.13.0"}
    found = worse(versions.judge(ranks, NEEDS))
    assert [finding.name for finding in found] == ["numpy", "torch"]
    assert found[0].text == "2.4.6 on ranks 0-31; 1.26.4 on ranks 32-63"
    assert found[1].text == "missing on ranks 0-31; 2.13.0 on ranks 32-63"
    ranks = cluster(1, 1)
    ranks[1].facts["versions"]["versions"] |= {"allreduce": "0.1.0 (code 2)"}
    assert only(versions.judge(ranks, NEEDS)).level == PROBLEM
    ranks = cluster(1, 1)
    ranks[1].facts["versions"]["cpu"] = "Xeon"
    assert "EPYC on rank 0; Xeon on rank 1" in only(versions.judge(ranks, NEEDS)).text


def with_gpus(ranks: list[Rank], number: int) -> list[Rank]:
    """Each host has so many of them."""
    cupy = {"version": "14.2", "runtime": 12080, "nccl": 23204, "trouble": ""}
    places = [sum(other.node == rank.node for other in ranks[: rank.rank]) for rank in ranks]
    for rank, place in zip(ranks, places, strict=True):
        devices = [{"uuid": f"{rank.host}-{n}", "name": "H200", "bytes": 141 * GIB} for n in range(number)]
        rank.facts["gpus"] |= {
            "devices": devices, "driver": 12080, "cupy": cupy, "mine": place % number, "cuda_aware": True,
        }  # fmt: skip
    return ranks


def test_gpus() -> None:
    ranks = with_gpus(cluster(2, 2), 2)
    findings = gpus.judge(ranks, NEEDS)
    assert worse(findings) == []
    assert "host1 (H200, 141 GiB): rank 2: GPU 0, rank 3: GPU 1" in findings[0].text
    assert [finding.text for finding in findings if finding.name == "NCCL"] == ["2.32.4"]
    found = only(gpus.judge(with_gpus(cluster(3), 2), NEEDS))
    assert "ranks 0, 2 on host0" in found.text
    assert found.name == "duplicates"
    ranks = cluster(1, 1)
    with_gpus(ranks[:1], 1)
    assert "rank 1 sees none" in only(gpus.judge(ranks, NEEDS)).text
    ranks[1].facts["gpus"]["trouble"] = "cuInit says 999"
    assert "rank 1 sees none, and others do (cuInit says 999)" in only(gpus.judge(ranks, NEEDS)).text
    ranks = with_gpus(cluster(2), 2)
    ranks[0].facts["gpus"]["cupy"] = None
    assert "not installed on rank 0" in only(gpus.judge(ranks, NEEDS)).text
    ranks[0].facts["gpus"]["cupy"] = {"version": "14.2", "runtime": None, "nccl": None, "trouble": "driver too old"}
    assert only(gpus.judge(ranks, NEEDS)).level == PROBLEM
    ranks = with_gpus(cluster(2), 2)
    ranks[0].facts["gpus"]["cuda_aware"] = False
    assert "pinned" in only(gpus.judge(ranks, NEEDS)).text
    ranks = cluster(2)
    ranks[0].facts["gpus"] |= {"present": 2, "visible": ""}
    assert "host0 has 2 GPUs, and no rank sees one" in only(gpus.judge(ranks, NEEDS)).text


def test_gpus_of_ranks_that_differ_from_the_first() -> None:
    ranks = with_gpus(cluster(3), 3)
    good = ranks[0].facts["gpus"]["cupy"]
    ranks[1].facts["gpus"]["cupy"] = None
    ranks[2].facts["gpus"]["cupy"] = good | {"trouble": "driver too old"}
    found = worse(gpus.judge(ranks, NEEDS))
    assert [finding.level for finding in found] == [WARNING, PROBLEM]
    assert "does not work on rank 2: driver too old" in found[1].text
    ranks = with_gpus(cluster(2), 2)
    ranks[1].facts["gpus"]["cupy"] = good | {"nccl": None}
    assert "CuPy finds none on rank 1" in only(gpus.judge(ranks, NEEDS)).text
    ranks[1].facts["gpus"]["cupy"] = good | {"nccl": 22105}
    assert only(gpus.judge(ranks, NEEDS)).text == "2.32.4 on rank 0; 2.21.5 on rank 1"
    ranks = with_gpus(cluster(2), 2)
    ranks[1].facts["gpus"]["cuda_aware"] = False
    assert "no on rank 1: arrays" in only(gpus.judge(ranks, NEEDS)).text
    ranks = cluster(1, 1)
    ranks[1].facts["gpus"] |= {"present": 2, "visible": ""}
    assert "host1 has 2 GPUs, and no rank sees one" in only(gpus.judge(ranks, NEEDS)).text


class FakeDriver:
    """libcuda with two devices; an argument by reference holds what it refers to in `_obj`."""

    def __init__(self, started: int = 0) -> None:
        self._started = started

    def cuInit(self, flags: int) -> int:  # noqa: N802, CUDA's names
        return self._started

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = 12080
        return 0

    def cuDeviceGetCount(self, number: Any) -> int:  # noqa: N802
        number._obj.value = 2
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:  # noqa: N802
        name.value = b"H200"
        return 0

    def cuDeviceGetUuid(self, uuid: Any, device: Any) -> int:  # noqa: N802
        uuid.raw = bytes([device.value] * 16)
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, device: Any) -> int:  # noqa: N802
        size._obj.value = 141 * GIB
        return 0


class DriverOfParts(FakeDriver):
    """Two parts of one GPU, which the older question does not tell apart."""

    def cuDeviceGetUuid(self, uuid: Any, device: Any) -> int:  # noqa: N802
        uuid.raw = bytes([9] * 16)
        return 0

    cuDeviceGetUuid_v2 = FakeDriver.cuDeviceGetUuid  # noqa: N815


def test_the_driver_is_asked_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: FakeDriver())
    version, devices = gpus._devices()
    assert version == 12080
    assert [device["uuid"] for device in devices] == ["00" * 16, "01" * 16]
    assert {(device["name"], device["bytes"]) for device in devices} == {("H200", 141 * GIB)}
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: DriverOfParts())
    assert [device["uuid"] for device in gpus._devices()[1]] == ["00" * 16, "01" * 16]
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: FakeDriver(started=999))
    with pytest.raises(OSError, match="cuInit of the NVIDIA driver says 999"):
        gpus._devices()


def test_limits_of_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "CONTROL_GROUP", tmp_path)
    assert cores._quota() is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cores._quota() == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores._quota() is None
    monkeypatch.setattr(memory, "GROUPS", ((tmp_path / "max", tmp_path / "current"),))
    assert memory._left_in_container() == memory.UNLIMITED
    (tmp_path / "max").write_text("1000\n")
    (tmp_path / "current").write_text("400\n")
    assert memory._left_in_container() == 600


def test_network() -> None:
    ranks = cluster(2, 2)
    docker = {"name": "docker0", "address": "172.17.0.1", "network": "172.17.0.0/16", "speed": None}
    for rank in (ranks[0], ranks[2]):
        rank.facts["network"]["interfaces"] = [*rank.facts["network"]["interfaces"], docker]
    found = only(network.judge(ranks, NEEDS))
    assert "172.17.0.1 is the address of host0 and host1 (docker0)" in found.text
    assert "btl_tcp_if_exclude lo,docker0" in found.advice
    ranks[2].facts["network"]["interfaces"] = [LINK | {"address": "10.9.0.1", "network": "10.9.0.0/24"}]
    found = only(network.judge(ranks, NEEDS))
    assert "no network in common (host0: eth0 10.0.0.1, docker0 172.17.0.1; host1: eth0 10.9.0.1)" in found.text
    for change, words in (
        ({"resolves": ""}, "host1: its own name leads nowhere"),
        ({"first_resolves": ""}, "host1 can't resolve host0"),
        ({"resolves": "127.0.1.1"}, "host1: its own name leads to itself alone"),
        ({"infiniband": ["mlx5_0"]}, "missing on host0"),
    ):
        ranks = cluster(2, 2)
        ranks[2].facts["network"] |= change
        assert words in only(network.judge(ranks, NEEDS)).text


def test_ranks_that_do_not_meet_hear_what_may_be_in_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    with meeting.said_when_late(seconds=60):
        (timer,) = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    timer.join(30)
    assert capsys.readouterr().err == ""
    with meeting.said_when_late(seconds=0):
        (timer,) = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)] or (None,)
        if timer is not None:
            timer.join(30)
    assert "the ranks have not met yet" in capsys.readouterr().err
    said = meeting.advice("host0", [LINK, LINK | {"name": "lo", "network": "127.0.0.0/8"}])
    assert "This host, host0, has eth0 in 10.0.0.0/24.\n" in said
    assert "--mca btl_tcp_if_include 10.0.0.0/24" in said
    assert "has no network." in meeting.advice("host0", [])


@pytest.mark.parametrize("name", meeting.NUMBERS)
def test_one_rank_says_that_they_do_not_meet(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "1")
    with meeting.said_when_late(seconds=60):
        assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_a_host_that_does_not_tell_of_its_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> Any:
        raise PermissionError("no sockets here")

    monkeypatch.setattr(network, "interfaces", refuse)
    meeting._say()
    assert "has no network." in capsys.readouterr().err


class SilentRequest:
    def Test(self) -> bool:  # noqa: N802, MPI's name
        return False


class SilentRank:
    """A communicator of two ranks, of which the other one never answers."""

    rank, size = 0, 1  # of size 1 for agreements

    def Isend(self, *_: Any) -> SilentRequest:  # noqa: N802, MPI's name
        return SilentRequest()

    Irecv = Isend

    def __getattr__(self, name: str) -> Any:
        return getattr(MPI.COMM_SELF, name)


def test_a_rank_that_does_not_answer_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "ANSWER_SECONDS", 0.01)
    comm: Any = SilentRank()
    results = measuring.measure(comm, [[(0, 1)], [(0, 2)]], 10, lambda *_: None)
    assert results == measuring.Results([], [(0, 1)])


def test_clocks() -> None:
    found = only(clock.judge(cluster(1, 1, 1), [0.0, 0.01, -7.5]))
    assert found.text == "clocks differ from that of host0: host2 by -7.5 s"


def test_a_look_that_failed_is_a_finding_and_the_others_are_judged() -> None:
    ranks = cluster(2, 2)
    for rank, module in ((0, "memory"), (2, "network"), (3, "cores"), (3, "gpus")):
        ranks[rank].facts[module] = {examination.FAILED: "OSError: no such thing"}
    findings = examination.judge(ranks, NEEDS, [0.0, 0.0], measuring.Results(measured(ranks), []))
    failed = [finding for finding in findings if finding.name == "looking"]
    assert [finding.text for finding in failed] == [
        f"failed on rank {rank}: OSError: no such thing" for rank in (3, 0, 3, 2)
    ]
    assert exit_code(findings) == 2
    alone = cluster(2)
    alone[0].facts["network"] = {examination.FAILED: "OSError: x"}
    examination.judge(alone, NEEDS, [], measuring.Results(measured(alone), []))
    everywhere = cluster(2)
    for each in everywhere:
        each.facts["cores"] = {examination.FAILED: "OSError: x"}
    findings = examination.judge(everywhere, NEEDS, [], measuring.Results([], []))
    assert "failed on ranks 0-1: OSError: x" in [finding.text for finding in findings]


def test_hosts_of_one_name_are_told_apart() -> None:
    ranks = examination._ranks(["box", "box", "box"], [[0, {}], [1, {}], [1, {}]])
    assert [rank.host for rank in ranks] == ["box#0", "box#1", "box#1"]


def test_report() -> None:
    findings = [Finding("a", "short", OK, "all is well"), Finding("b", "longer name", PROBLEM, "x " * 100, "do this")]
    shown = report.text("title", findings)
    assert shown.splitlines()[:4] == ["title", "", "a", "  ok       short        all is well"]
    assert "\n                        -> do this\n" in shown
    assert shown.endswith("\n1 problem, 1 ok; exit code 2\n")
    assert "\033[31mproblem\033[0m" in report.text("title", findings, coloured=True)
    assert report.summary(findings[:1]) == "1 finding, all ok"
    assert "all is well" in report.text("title", [Finding("a", "/tmp" * 40, OK, "all is well")])
    for path in ("", "no/x"):
        with pytest.raises(OptionError, match="can't be written"):
            report.check_target(path)


def test_words() -> None:
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert [command.parameters(text) for text in ("25M", "1.5b", "7_000", "10")] == [
        25_000_000,
        1_500_000_000,
        7000,
        10,
    ]
    assert memory.count(350_000_000) == "350M"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["docter"], "no command is called 'docter'; did you mean doctor?"),
        (["doctor", "--jsn=x"], "did you mean --json?"),
        (["doctor", "--parameters", "-3"], "'-3' is no number of parameters such as 350M"),
        (["doctor", "--parameters", "many"], "is no number of parameters"),
        (["doctor", "--seconds", "nan"], "is no number of seconds"),
        (["--versoin"], "did you mean --version?"),
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
    assert "64 is for bad options" in shown


FAILS_ON_RANK_1 = """
import sys
from allreduce import __main__ as command_line
from allreduce.doctor import memory

look = memory.look

def fail(place):
    if place.topology.rank == 1:
        raise OSError("no memory here")
    return look(place)

memory.look = fail
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
        "MPI", "cores", "memory", "GPUs", "versions", "network", "clocks", "pairs of ranks",
    }  # fmt: skip
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2]
    assert found["ranks"][0]["facts"]["mpi"]["library"].startswith({"openmpi": "Open MPI", "mpich": "MPICH"}[mpi])
    assert found["ranks"][0]["facts"]["cores"]["threads"] == 1
    assert {tuple(pair["ranks"]) for pair in found["pairs"]} <= {(0, 1), (0, 2), (1, 2)}
    assert found["pairs"]
    assert all(pair["latency_s"] > 0 < pair["bytes_per_s"] for pair in found["pairs"])
    assert job.stdout.count("allreduce doctor: 3 ranks on 1 node") == 1
    assert "\033" not in job.stdout


FAILS_TO_JUDGE = """
import sys
from allreduce import __main__ as command_line
from allreduce.doctor import cores
cores.judge = None
sys.exit(command_line.main(["doctor", "--seconds", "0"]))
"""


@pytest.mark.jobs
def test_an_error_of_its_own_is_no_warning(mpirun: JobRunner) -> None:
    """Of which the exit code is 1."""
    job = mpirun(1, ["-c", FAILS_TO_JUDGE])
    assert "TypeError" in job.stderr
    assert job.returncode == 2


@pytest.mark.jobs
def test_commands_on_two_ranks_speak_once(tmp_path: Path) -> None:
    lines = [
        ("allreduce.__main__", arguments, str(tmp_path))
        for arguments in (
            ["doctor", "--json", "-", "--seconds", "0"],
            ["docter"],
            ["--help"],
            ["doctor", "--json", "no/x"],
        )
    ]
    as_json, wrong, shown, unwritable = in_one_job(2, lines, tmp_path)
    assert json.loads(as_json[0]["stdout"])["pairs"] == []
    assert as_json[0]["stderr"].startswith("allreduce doctor: 2 ranks on 1 node\n")
    assert as_json[0]["code"] == as_json[1]["code"] == json.loads(as_json[0]["stdout"])["exit_code"]
    assert [outcome["code"] for outcome in wrong + shown + unwritable] == [64, 64, 0, 0, 64, 64]
    assert "did you mean doctor?" in wrong[0]["stderr"]
    assert "no/x: this can't be written" in unwritable[0]["stderr"]
    for outcomes in (as_json, wrong, shown, unwritable):
        assert outcomes[1]["stdout"] == outcomes[1]["stderr"] == ""

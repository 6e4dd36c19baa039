"""The doctor's findings about hosts: MPI, cores, memory, versions, GPUs, network."""

import re
import sys
import threading
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from allreduce.doctor import command, host, network
from allreduce.doctor.findings import EXTRA, PROBLEM, WARNING, Needs, Rank
from allreduce.process import launcher, proc, variables
from allreduce.topology import Topology
from tests import launch
from tests.doctor.doctor_ranks import GIB, LINK, cluster, judged, only, worse
from tests.gpu import fake_cupy


def test_mpi() -> None:
    alone = cluster(1)
    launch = launcher.Launch("srun", "N", 4, "use mpirun")
    alone[0].facts["mpi"]["launch"] = str(launch), launch.advice
    found = only(judged("mpi", alone))
    assert found.level == PROBLEM
    assert "srun has started 4 processes (N=4), and MPI sees 1 rank" in found.text
    assert "use mpirun. If each process should be a separate job, set ALLREDUCE_ALONE=1" in found.advice
    ranks = cluster(2, 2)
    ranks[3].facts["mpi"]["threads"] = "MPI_THREAD_SERIALIZED"
    assert "MPI_THREAD_SERIALIZED on rank 3" in only(judged("mpi", ranks)).text
    ranks = cluster(2, 2)
    ranks[2].facts["mpi"]["library"] = "MPICH Version: 5.0.2"
    assert "Open MPI v5.0.11 on ranks 0-1, 3; MPICH Version: 5.0.2 on rank 2" in only(judged("mpi", ranks)).text
    ranks = cluster(2)  # one rank that isn't guarded is enough for a warning, whichever it is
    ranks[1].facts["mpi"]["unguarded"] = "ranks can crash: no compiler; install one"
    found = only(judged("mpi", ranks))
    assert (found.level, found.text, found.advice) == (WARNING, "rank 1: ranks can crash: no compiler", "install one")


def test_cores() -> None:
    ranks = cluster(3, 3)
    for rank in ranks:
        rank.facts["cores"] |= {"cores": [0, 1], "of": 2}
    found = only(judged("cores", ranks))
    assert "host0: 3 ranks on 2 cores; host1: 3 ranks on 2 cores" in found.text
    assert "at most 2 ranks" in found.advice
    ranks[0].facts["cores"]["of"] = 64
    assert "bound to 2 of 64 cores" in only(judged("cores", ranks)).advice
    ranks = cluster(4)
    ranks[0].facts["cores"]["quota"] = 1.5
    assert "--cpus" in only(judged("cores", ranks)).advice
    ranks = cluster(4)
    ranks[2].facts["cores"]["cores"] = ranks[0].facts["cores"]["cores"]
    ranks[3].facts["cores"]["cores"] = [3, 4]
    found = only(judged("cores", ranks))
    assert (found.level, found.name) == (PROBLEM, "binding")
    assert "ranks 0, 2 on 1 core (0)" in found.text
    ranks = cluster(4)
    for rank in ranks:
        rank.facts["cores"] |= {"cores": list(range(8)), "threads": 8}
    found = only(judged("cores", ranks))
    assert "32 threads for 8 cores" in found.text
    assert "OMP_NUM_THREADS=2" in found.advice
    assert "3 on host0, 1 on host1" in only(judged("cores", cluster(3, 1))).text


def test_memory() -> None:
    ranks = cluster(4)
    ranks[0].facts["memory"]["shared_free"] = 64 << 20
    found = only(judged("memory", ranks))
    assert (found.level, found.name) == (WARNING, "/dev/shm")
    assert "host0: 64 MiB free, 495 MiB wanted for a model of 25M parameters" in found.text
    assert only(judged("memory", ranks, Needs(25_000_000, asked=True))).level == PROBLEM
    assert worse(judged("memory", ranks, Needs(1_000_000, asked=True))) == []
    ranks[0].facts["memory"]["shared_free"] = 1 << 20
    found = only(judged("memory", ranks, Needs(10)))
    assert found.level == PROBLEM
    assert "bus errors" in found.advice
    ranks = cluster(4, 4)
    ranks[4].facts["memory"]["available"] = GIB
    assert "host1: 1 GiB free, 1.49 GiB wanted" in only(judged("memory", ranks)).text
    ranks = [rank._replace(host="box") for rank in cluster(2, 2)]  # two containers of one name
    ranks[0].facts["memory"]["shared_free"] = 1 << 19
    found = only(judged("memory", ranks))
    assert "box: 512 KiB free" in found.text
    assert "bus errors" in found.advice
    ranks = cluster(2, 2)
    for rank in ranks[2:]:
        rank.facts["memory"] |= {"cma": False}
    assert "host1: ranks may not" in only(judged("memory", ranks)).text


def test_versions_that_differ() -> None:
    ranks = cluster(32, 32)
    for rank in ranks[32:]:
        rank.facts["versions"]["versions"] |= {"numpy": "1.26.4", "torch": "2.13.0"}
    found = worse(judged("versions", ranks))
    assert [finding.name for finding in found] == ["numpy", "torch"]
    assert found[0].text == "2.4.6 on ranks 0-31; 1.26.4 on ranks 32-63"
    assert found[1].text == "missing on ranks 0-31; 2.13.0 on ranks 32-63"
    ranks = cluster(1, 1)
    ranks[1].facts["versions"]["versions"] |= {"allreduce": "0.1.0 (code 2)"}
    assert only(judged("versions", ranks)).level == PROBLEM
    ranks = cluster(1, 1)
    ranks[1].facts["versions"]["cpu"] = "Xeon"
    assert "EPYC on rank 0; Xeon on rank 1" in only(judged("versions", ranks)).text


def test_versions_that_are_newer_than_those_tried() -> None:
    ranks = cluster(1, 1)
    newest = host.TRIED["torch"][-1]
    for version, told in ((newest, False), (f"{newest}+cpu", False), ("2.4.1", False), ("2.99.0a0", True)):
        for rank in ranks:
            rank.facts["versions"]["versions"] |= {"torch": version}
        found = worse(judged("versions", ranks))
        assert [finding.name for finding in found] == ["torch, tried"] * told
        assert all(finding.level == WARNING and f"torch {newest}" in finding.advice for finding in found)
        (line,) = (finding for finding in judged("versions", ranks) if finding.name == "newest tried")
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
    ranks = with_gpus(cluster(2, 2), 2)
    findings = list(judged("gpus", ranks))
    assert worse(findings) == []
    assert findings[0].text == "H200, 141 GiB"
    found = only(judged("gpus", with_gpus(cluster(3), 2)))
    assert "ranks 0, 2 on host0" in found.text
    assert found.name == "duplicates"
    ranks = cluster(1, 1)
    with_gpus(ranks[:1], 1)
    assert 'rank 1: "nccl" needs CuPy' in only(judged("gpus", ranks)).text
    ranks = with_gpus(cluster(2), 2)
    ranks[1].facts["gpus"]["cuda_aware"] = False
    found = only(judged("gpus", ranks))
    assert "no on rank 1: " in found.text
    assert "pinned" in found.text
    ranks = cluster(1, 1)
    ranks[1].facts["gpus"] |= {"present": 2, "visible": ""}
    hidden = only(judged("gpus", ranks))
    assert "host1 has 2 GPUs, and no rank can use one: " in hidden.text
    assert "CUDA_VISIBLE_DEVICES=: unset it" in hidden.advice
    ranks[1].facts["gpus"]["visible"] = None  # CuPy is missing, as where PyTorch alone is installed
    assert "extra" in only(judged("gpus", ranks)).advice


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
    ranks = cluster(2, 2)
    docker = {"name": "docker0", "address": "172.17.0.1", "network": "172.17.0.0/16", "speed": None}
    for rank in (ranks[0], ranks[2]):
        rank.facts["network"]["interfaces"] = [*rank.facts["network"]["interfaces"], docker]
    found = only(judged("network", ranks))
    assert "172.17.0.1 is the address of host0 and host1 (docker0)" in found.text
    assert "btl_tcp_if_exclude lo,docker0" in found.advice
    ranks[2].facts["network"]["interfaces"] = [LINK | {"address": "10.9.0.1", "network": "10.9.0.0/24"}]
    found = only(judged("network", ranks))
    assert "no network in common (host0: eth0 10.0.0.1, docker0 172.17.0.1; host1: eth0 10.9.0.1)" in found.text
    ranks = cluster(2, 2)
    ranks[2].facts["network"] |= {"infiniband": ["mlx5_0"]}
    assert "missing on host0" in only(judged("network", ranks)).text


def test_ranks_that_do_not_meet_hear_what_may_be_in_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    with network.advise_if_late(seconds=60):
        (timer,) = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    timer.join(30)
    assert capsys.readouterr().err == ""
    with network.advise_if_late(seconds=0):
        (timer,) = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)] or (None,)
        if timer is not None:
            timer.join(30)
    assert "the ranks are not connected yet" in capsys.readouterr().err
    said = network.connecting_advice("host0", [LINK])
    assert "This host, host0, has eth0 in 10.0.0.0/24.\n" in said
    assert "--mca btl_tcp_if_include 10.0.0.0/24" in said
    assert "has no known network" in network.connecting_advice("host0", [])


@pytest.mark.parametrize("name", variables.ANY_RANK)
def test_one_rank_says_that_they_do_not_meet(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in variables.ANY_RANK:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "1")
    with network.advise_if_late(seconds=60):
        assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_a_host_that_does_not_tell_of_its_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> Any:
        raise PermissionError("no sockets here")

    monkeypatch.setattr(network, "interfaces", refuse)
    network._print_advice()
    assert "has no known network" in capsys.readouterr().err


def test_hosts_of_one_name_are_told_apart() -> None:
    ranks = command.ranks_of(["box", "box", "box"], [[0, {}], [1, {}], [1, {}]])
    assert [rank.host for rank in ranks] == ["box#0", "box#1", "box#1"]

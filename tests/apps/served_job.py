"""A served model as a job that a test watches: its metrics and versions, the processes of its ranks, chaos."""

import argparse
import contextlib
import http.client
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from allreduce.process import proc
from benchmarks import serving
from benchmarks.lib.results import FileError
from trainers.replicas.numpy.network import NumpyNetwork

LOAD_SECONDS = 180.0  # on a busy machine


class Job:
    """A server that runs. code: its exit code, when it has ended."""

    def __init__(self, started: serving.Job) -> None:
        self.process, self.port, self.text = started.process, started.port, started.text
        self.code: int | None = None

    def get(self, path: str) -> Any:
        """Return the JSON of a GET."""
        return json.loads(self._got(path))

    def metrics(self) -> str:
        """Return the text for Prometheus."""
        return self._got("/metrics").decode()

    def _got(self, path: str) -> bytes:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request("GET", path)
            return connection.getresponse().read()

    def states(self) -> dict[int, str]:
        """Return the state of each version."""
        return {int(each["version"]): each["state"] for each in self.get(serving.PATH)["model_version_status"]}

    def wait_for(self, states: dict[int, str]) -> None:
        deadline = time.monotonic() + LOAD_SECONDS
        while self.states() != states:
            if time.monotonic() > deadline:
                raise FileError(f"the server has the versions {self.states()}, and {states} are expected")
            time.sleep(0.05)

    def ranks(self) -> dict[int, int]:
        """Return the process of each rank."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.getsid(int(folder.name)) != self.process.pid and not self._is_child(int(folder.name)):
                    continue
                variables = (folder / "environ").read_bytes().split(b"\0")
            except (OSError, ProcessLookupError):
                continue
            for each in variables:
                if each.startswith(b"OMPI_COMM_WORLD_RANK="):
                    found[int(each.partition(b"=")[2])] = int(folder.name)
        return found

    def _is_child(self, pid: int) -> bool:
        """Whether a process is the job's, or a child of one that is."""
        while pid > 1 and pid != self.process.pid:
            stat = proc.stat(pid)
            pid = stat.parent if stat else 0
        return pid == self.process.pid

    def end(self) -> None:
        """End by SIGTERM to a rank: mpirun itself would kill the ranks a moment later."""
        if self.process.poll() is None:
            os.kill(self.ranks().get(0, self.process.pid), signal.SIGTERM)
        self.code = self.process.wait(serving.STOP_SECONDS)


@contextlib.contextmanager
def server(ranks: int, options: Sequence[str], folder: Path, *launcher: str) -> Iterator[Job]:
    """Context manager: start a server, yield it when it answers, end it. launcher: more options of mpirun."""
    with serving.server(ranks, options, folder, *launcher) as started:
        job = Job(started)
        yield job
        job.end()


def chaos(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the result of requests during which a rank is killed and a version is replaced."""
    bodies, inputs = serving.requests_of(options.sizes, options.rows)
    networks = [NumpyNetwork(options.sizes, seed=seed) for seed in (1, 2)]
    models = folder / "models"
    for number, network in enumerate(networks, 1):
        network.save(str(folder / f"{number}.npz"))
    (models / "0001").mkdir(parents=True)
    shutil.copy(folder / "1.npz", models / "0001" / "model.npz")
    right = [[network.predict(each) for network in networks] for each in inputs]
    done = threading.Event()
    given = ["--model", str(models), "--poll-seconds", "0.1", "--max-batch", str(options.max_batch)]
    with server(3, given, folder, "--with-ft", "ulfm") as job:
        load, reached = serving.Load(job.port, bodies, options.clients), [0]

        def trouble() -> None:
            while reached[0] < options.requests // 4 and not done.is_set():
                time.sleep(0.001)
            os.kill(job.ranks()[2], signal.SIGKILL)
            (models / "0002").mkdir()
            shutil.copy(folder / "2.npz", models / "0002" / "model.npz")
            job.wait_for({2: "AVAILABLE", 1: "AVAILABLE"})
            shutil.rmtree(models / "0001")
            job.wait_for({2: "AVAILABLE"})
            done.set()

        def ends(number: int) -> bool:
            reached[0] = max(reached[0], number)
            return number >= options.requests

        thread = threading.Thread(target=trouble)
        thread.start()
        elapsed = load.run(ends)
        thread.join()
        metrics = job.metrics()
    wanted = ("allreduce_serving_retries_total", "allreduce_serving_ranks ", "allreduce_serving_newest_version")
    noted = {line.split()[0]: float(line.split()[1]) for line in metrics.splitlines() if line.startswith(wanted)}
    return serving.result_of(load, right, elapsed) | {"exit_code": job.code, "replaced": done.is_set(), **noted}

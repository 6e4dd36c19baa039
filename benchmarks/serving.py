"""Measures `python -m trainers serve`: requests a second and their latency, on several numbers of ranks.

    python -m benchmarks.serving --ranks 1,2 --json out.json

It makes a NumpyNetwork with random parameters, starts a server on each number of ranks in turn, and sends requests over
connections that stay open, a fixed number at a time. Every answer is checked. The servers take turns for some rounds,
and the medians of the rounds are compared. --onnx adds a server of one rank with the same network as an ONNX file,
computed by onnxruntime.

The clients are threads on the same machine, and the web server runs on rank 0: both take part of the cores. More ranks
help if the model is so large that its computation takes more (see --sizes).
"""

import argparse
import contextlib
import http.client
import itertools
import json
import operator
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib import cli, outputs
from benchmarks.lib.results import FileError
from trainers.replicas.numpy.network import NumpyNetwork

NAME = "model"
PATH = f"/v1/models/{NAME}"
PREDICT = f"{PATH}:predict"
START_SECONDS, STOP_SECONDS = 180.0, 60.0  # on a busy machine
TOLERANCE = 1e-4  # of an answer: a product of several rows has other rounding
BODIES = 32  # different requests
LOST_SECONDS = 60.0  # without an answer
AGAIN_SECONDS = 0.02  # until a request that met an overload is sent again
OVERLOAD = 429
SIZES = [64, 4096, 4096, 4096, 10]  # 34 million parameters; 8 rows cost 10 ms on a core, and the web server 0.5 ms


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    numbers = cli.several(cli.at_least(1))
    add("--ranks", type=numbers, default=[1, 2], metavar="N,N", help="of the servers (default: 1,2)")
    add("--sizes", type=numbers, default=SIZES, metavar="N,N", help=f"(default: {_shown(SIZES)})")
    add("--rows", type=cli.at_least(1), default=8, metavar="N", help="of a request (default: 8)")
    add("--clients", type=cli.at_least(1), default=32, metavar="N", help="requests at a time (default: 32)")
    add(
        "--seconds", type=cli.at_least(0.1, float), default=5.0, metavar="S", help="of a server in a round (default: 5)"
    )
    add("--rounds", type=cli.at_least(1), default=3, metavar="N", help="in which the servers take turns (default: 3)")
    add("--max-batch", type=cli.at_least(1), default=32, metavar="N", help="rows (default: 32)")
    add("--onnx", action="store_true", help="measure onnxruntime behind the same web server, too")
    cli.add_json_option(parser)


def _shown(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


# Requests and answers


@dataclass
class Load:
    """Sends POST requests, some at a time over connections that stay open, and takes the answers.

    port: of the server. bodies: sent in turn. clients: connections.

    Attributes: seconds: of each answer; answers: the index of its body, its code, its body. They are judged after the
    load. An overload is counted, and the request is sent again. lost: the errors of connections.
    """

    port: int
    bodies: Sequence[bytes]
    clients: int
    seconds: list[float] = field(default_factory=list)
    answers: list[tuple[int, int, bytes]] = field(default_factory=list)
    overloads: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def run(self, ends: Callable[[int], bool]) -> float:
        """Send requests until ends(the number of the next one), and return the seconds until the last answer."""
        numbers = itertools.count()
        threads = [threading.Thread(target=self._client, args=(numbers, ends)) for _ in range(self.clients)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin

    def _client(self, numbers: Iterator[int], ends: Callable[[int], bool]) -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=LOST_SECONDS)) as connection:
            while not ends(number := next(numbers)):
                index, begin = number % len(self.bodies), time.perf_counter()
                try:
                    while (answer := _post(connection, self.bodies[index]))[0] == OVERLOAD:
                        self.overloads.append(number)
                        time.sleep(AGAIN_SECONDS)
                except (OSError, http.client.HTTPException) as error:
                    self.lost.append(type(error).__name__)
                    connection.close()  # the next request opens it again
                    time.sleep(AGAIN_SECONDS)
                else:
                    self.seconds.append(time.perf_counter() - begin)
                    self.answers.append((index, *answer))


def _post(connection: http.client.HTTPConnection, body: bytes) -> tuple[int, bytes]:
    """Return the code and the body of an answer."""
    connection.request("POST", PREDICT, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read()


def result_of(load: Load, right: Sequence[Sequence[np.ndarray]], elapsed: float) -> dict[str, Any]:
    """Return requests a second, percentiles in milliseconds, and the outcomes: counts of "right", "wrong", "lost: ...",
    and of "overload". right: for each body the answers that are right."""
    outcomes = Counter([f"lost: {error}" for error in load.lost] + ["overload"] * len(load.overloads))
    for (index, code, body), count in Counter(load.answers).items():
        outcomes[_judged(right[index], code, body)] += count
    times = np.array(load.seconds or [0.0]) * 1e3
    return {
        "requests": len(load.seconds),
        "per_second": len(load.seconds) / elapsed,
        "p50_ms": float(np.percentile(times, 50)),
        "p99_ms": float(np.percentile(times, 99)),
        "outcomes": dict(outcomes),
    }


def _judged(right: Sequence[np.ndarray], code: int, body: bytes) -> str:
    if code != 200:
        return f"lost: {code} {body[:200].decode(errors='replace')}"
    found = np.array(json.loads(body)["predictions"], np.float32)
    alike = any(found.shape == each.shape and np.allclose(found, each, atol=TOLERANCE) for each in right)
    return "right" if alike else "wrong"


# A server


@contextlib.contextmanager
def server(ranks: int, options: Sequence[str], folder: Path, *launcher: str) -> Iterator["Job"]:
    """Context manager: start a server, yield it when it answers, end it. launcher: more options of mpirun."""
    mpirun = Path(sys.executable).with_name("mpirun")
    command = [str(mpirun) if mpirun.exists() else "mpirun", "-n", str(ranks), "--oversubscribe", *launcher]
    command += ["--bind-to", "none", sys.executable, "-m", "trainers"]  # rank 0 has several threads
    command += ["serve", "--name", NAME, "--port", "0", *options]
    given = {"OMP_NUM_THREADS": "1", **os.environ}
    log = folder / f"server-{time.monotonic_ns()}.txt"
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=given, start_new_session=True)
    job = Job(process, log)
    try:
        job.wait_until_it_answers()
        yield job
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass
class Job:
    """The job of a server. port: where it listens."""

    process: "subprocess.Popen[bytes]"
    log: Path
    port: int = 0

    def wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not (found := [line for line in self.text().splitlines() if line.startswith("serving ")]):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise FileError(f"the server did not start:\n{self.text()[-2000:]}")
            time.sleep(0.05)
        self.port = int(found[0].rpartition("/v1/")[0].rpartition(":")[2])

    def text(self) -> str:
        return self.log.read_text(errors="replace")


# Measurements


def requests_of(sizes: Sequence[int], rows: int) -> tuple[list[bytes], list[np.ndarray]]:
    """Return the bodies of requests, and their rows."""
    random = np.random.default_rng(0)
    inputs = [random.integers(0, 17, (rows, sizes[0])).astype(np.float32) / 16 for _ in range(BODIES)]
    return [json.dumps({"instances": each.tolist()}).encode() for each in inputs], inputs


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the result of each server by its name."""
    network = NumpyNetwork(options.sizes, seed=1)
    bodies, inputs = requests_of(options.sizes, options.rows)
    right = [[network.predict(each)] for each in inputs]
    network.save(str(folder / "model.npz"))
    contenders = [(f"{ranks} rank{'s' * (ranks > 1)}", ranks, "model.npz") for ranks in options.ranks]
    if options.onnx:
        from trainers.apps.export.export import write

        write(str(folder / "model.onnx"), network, None)
        contenders.append(("1 rank, onnxruntime", 1, "model.onnx"))
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for name, ranks, model in contenders:
            given = ["--model", str(folder / model), "--max-batch", str(options.max_batch)]
            with server(ranks, given, folder) as job:
                Load(job.port, bodies, options.clients).run(partial(operator.le, 4 * options.clients))  # warm
                load, end = Load(job.port, bodies, options.clients), time.monotonic() + options.seconds
                elapsed = load.run(partial(_is_past, end))
            own = result_of(load, right, elapsed)
            found.setdefault(name, []).append(own)
            print(row(name, own), flush=True)
    return {name: _median(rounds) for name, rounds in found.items()}


def _median(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of the numbers, and the sums of the outcomes."""
    numbers = {key: float(np.median([each[key] for each in rounds])) for key in ("per_second", "p50_ms", "p99_ms")}
    outcomes: Counter[str] = sum((Counter(each["outcomes"]) for each in rounds), Counter())
    return numbers | {"outcomes": dict(outcomes), "rounds": list(rounds)}


def _is_past(end: float, number: int) -> bool:
    return time.monotonic() > end


def row(name: str, result: dict[str, Any]) -> str:
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in result["outcomes"].items())
    times = f"p50 {result['p50_ms']:7.1f} ms  p99 {result['p99_ms']:7.1f} ms"
    speed = f"{result['per_second']:9.1f} requests/s"
    return f"{name:<22}{speed}  {times}  {outcomes}"


def is_right(result: dict[str, Any]) -> bool:
    return set(result["outcomes"]) <= {"right", "overload"}


def _run(options: argparse.Namespace) -> int:
    print(f"{options.clients} clients, {options.rows} rows a request, a network of {_shown(options.sizes)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="serving-") as own:
        results = measure(options, Path(own))
    base = next(iter(results.values()))["per_second"]
    print(f"medians of {options.rounds} rounds:")
    for name, each in results.items():
        print(f"{row(name, each)}; {each['per_second'] / base:.2f} x")
    if options.json:
        outputs.write(options.json, json.dumps({**vars(options), "results": results}, indent=1) + "\n")
    return 0 if all(map(is_right, results.values())) else 1


main = cli.serial_command("benchmarks.serving", __doc__, add_options, _run)

if __name__ == "__main__":
    sys.exit(main())

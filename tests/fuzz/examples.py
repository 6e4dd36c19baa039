"""Hostile inputs made by hand: what each reader must refuse, and the words that tell a user why.

Values are made when they are read, because some unpack to gigabytes.
"""

import functools
import gzip
import json
import struct
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.lib.results import to_json
from tests.benchmarks.made_runs import made_run
from tests.fuzz import files
from trainers.files.model_file import HEADER

Example = tuple[Callable[[], Any], str]  # returns the reader's input; a regular expression that its error has
ZEROS = gzip.compress(bytes(1 << 26))  # 64 MiB of zeros; members of a gzip file may follow each other
RED = "\x1b[31mred"
HARM = "<script>alert(1)</script>$\\frac$"  # no script, and no formula


@functools.cache
def npz(method: int = zipfile.ZIP_STORED, claim: int | None = None, twice: str = "", **x: Any) -> bytes:
    """Return a data set. claim: the sizes of its members according to its directory. twice: the name of two more. x:
    the shape, descr and bytes of its first array, whose header need not describe them."""
    x = {"shape": "(4, 2)", "descr": "'<f4'", "nbytes": 32, **x}
    first = files.header(np.zeros(x["nbytes"], np.uint8), x["descr"], x["shape"])
    members = [("x.npy", first), ("y.npy", files.npy(np.zeros(4, int)))] + [(f"{twice}.npy", first)] * 2 * bool(twice)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile notices the second name too
        return files.archive(members, method, claim, b"")


def images(*sizes: int, more: bytes = b"") -> dict[str, bytes]:
    """Return a folder whose images have the header of an array of these sizes, packed, and then other bytes."""
    header = struct.pack(f">HBB{len(sizes)}I", 0, 8, len(sizes), *sizes)
    return {"train-images-idx3-ubyte": gzip.compress(header) + more, "train-labels-idx1-ubyte": files.LABELS[0]}


def model(config: dict[str, Any] | None = None, **arrays: Any) -> bytes:
    """Return a model file of NumpyNetwork([4, 3]) with adam, some of its entries replaced; "__" stands for a dot."""
    header = files.model_header()
    header["config"] |= config or {}
    replaced = {name.replace("__", "."): files.npy(np.asarray(value)) for name, value in arrays.items()}
    members = {**files.model(), HEADER: files.npy(np.array(json.dumps(header))), **replaced}
    return files.archive([(f"{name}.npy", each) for name, each in members.items()], zipfile.ZIP_STORED, None, b"")


def run(**values: Any) -> bytes:
    """Return the record of a run with changed values. result: those of a result. machine: those of the machine."""
    record = json.loads(to_json(made_run(sizes=[8, 64])))
    record["results"][0].update(values.pop("result", {}))
    record["machine"].update(values.pop("machine", {}))
    return json.dumps({**record, **values}).encode()


BOMBS: dict[str, Callable[[], bytes]] = {
    "a header of terabytes": lambda: npz(shape="(1099511627776, 2)", nbytes=0),
    "deflated": lambda: npz(zipfile.ZIP_DEFLATED, shape="(300, 1048576)", descr="'|u1'", nbytes=300 << 20),
    "a stored member that lies": lambda: npz(claim=1 << 24, shape="(2097152, 2)"),
    "a long name twice": lambda: npz(twice="x" * 60_000),
    "lzma, which may take gigabytes to unpack": lambda: npz(zipfile.ZIP_LZMA),
    "a zip in a bomb": lambda: ZEROS * 64,
}
IDX: dict[str, Example] = {
    "100 dimensions": (lambda: images(*[1] * 100, more=b"x"), "has magic number 0x00000864"),
    "a bomb": (lambda: {**images(1), "train-images-idx3-ubyte": ZEROS * 64}, "has magic number 0x00000000"),
    "a bomb behind a header": (lambda: images(7, 3, 2, more=ZEROS * 64), "is too long"),
    "a bomb that its header owns to": (
        lambda: images(1 << 12, 1 << 10, 1 << 10, more=ZEROS * 64),
        "unpacks to more th",
    ),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "huge sizes": {"sizes": [10**9, 10**9]},
    "sizes beyond int": {"sizes": [10**30, 3]},
    "a huge rate": {"optimizer_options": {"lr": 10**400}},
    "an unhashable optimizer": {"optimizer": {}},
}
STATES: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"parameters": np.array(["a"] * 15)}, "parameters is <U1, not numbers"),
    "dates": ({"input__shift": np.zeros(4, "M8[s]")}, "not numbers"),
    "complex": ({"parameters": np.zeros(15, complex)}, "not the state of a NumpyNetwork"),
    "0-d moment": ({"optimizer__first_moment": np.float32(0)}, "is another one: optimizer.first_moment"),
    "NaN parameters": ({"parameters": np.full(15, np.nan, np.float32)}, "parameters has elements"),
    "infinite moment": ({"optimizer__second_moment": np.full(15, np.inf, np.float32)}, "has diverged"),
    "steps": ({"optimizer__steps": np.array(-1)}, "-1 steps"),
    "wide shift": ({"input__shift": np.zeros((1, 4), np.float32)}, "is another one: input.shift"),
    "a header of numbers": ({HEADER: np.zeros(100000)}, "is not a model file"),
    "a deep header": ({HEADER: np.array("[" * 100000)}, "is not a model file"),
}
RUNS = [
    run(result={"backend": ["ring"]}),
    run(result={"time_us": 10**400}),
    run(result={"algbw": "fast"}),
    run(result={"busbw": float("nan")}),
    run(result={"wrong": float("inf")}),
    run(result={"size": True}),
    run(machine={"cores": "many"}),
    run(machine={"cpu": [1]}),
    run(node_sizes=[1 << 62]),
    run(node_sizes=[1.5]),
    run(result={"backend": RED}),
    run(machine={"cpu": RED}),
    run(machine={RED: 1}),
    run(date=7),
    run(skipped=[1]),
    run(results=[]),
    b"[" * 100_000,
    run(version=RED * 1000),
]
TRACES = ["[{}", "[{},]", "[{} {}]", '[{"a": 1', "{}", '{"traceEvents": {}}', "[1]", "", "["]
EVENT = {"name": "x", "cat": "compute", "ph": "X", "ts": 0, "dur": 10, "pid": 0, "tid": 0}
EVENTS = [{"ts": None}, {"ts": -1}, {"dur": 1e999}, {"pid": 10**9}, {"args": [1]}, {"ph": "none"}]


WHOLE: dict[str, Callable[[], Any]] = {  # without a fault
    "npz data set": lambda: ("set.npz", npz()),
    "IDX": lambda: images(6, 4, 4, more=gzip.compress(bytes(96))),
    "model": model,
    "restored model": model,
    "compare": lambda: (run(), run()),
    "scaling": run,
    "report": lambda: run(
        result={"backend": HARM}, machine={"cpu": HARM, HARM: HARM}, command=HARM, date=HARM, skipped={HARM: HARM}
    ),
    "timeline": lambda: json.dumps([EVENT | {"cat": "wait", "args": {"last": 1}}]).encode(),  # without a call
    "timeline's picture": lambda: json.dumps(files.trace()[0]).encode(),
}


def constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def examples() -> dict[str, dict[str, Example]]:
    """Return the examples of each reader, by its name."""
    states = {name: (constant(model(**arrays)), words) for name, (arrays, words) in STATES.items()}
    configs = {name: (constant(model(config)), "describes no network") for name, config in CONFIGS.items()}
    bombs = {name: (made, r"model\.npz") for name, made in BOMBS.items()}
    return {
        "npz data set": {name: (lambda made=made: ("set.npz", made()), r"set\.npz") for name, made in BOMBS.items()},
        "IDX": {name: (made, rf"train-images-idx3-ubyte.*{words}") for name, (made, words) in IDX.items()},
        "model": {**bombs, **configs, **states},
        "restored model": {**bombs, **states},
        "compare": {str(number): (constant((each, each)), r"a\.json") for number, each in enumerate(RUNS)},
        "scaling": {str(number): (constant(each), r"a\.json") for number, each in enumerate(RUNS)},
        "timeline": {
            **{text: (constant(text.encode()), r"json is not a trace") for text in TRACES},
            **{
                str(change): (constant(json.dumps([EVENT | change]).encode()), r"json.*create\(trace=\) wrote$")
                for change in EVENTS
            },
        },
    }

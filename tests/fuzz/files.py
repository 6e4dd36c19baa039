"""Valid files of each kind, from which hostile files are made."""

import gzip
import io
import json
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from allreduce.transport.cost import Machine
from allreduce.tuning import constants
from benchmarks.lib.results import to_json
from tests.benchmarks.made_runs import made_run
from trainers.files import checkpoint, model_file
from trainers.replicas.numpy.network import NumpyNetwork

X = np.arange(24, dtype=np.float32).reshape(6, 4) / 10
Y = np.array([0, 1, 2, 0, 1, 2])


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    head = struct.pack(">HBB", 0, kind, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.tobytes()


IMAGES = [
    idx(np.arange(96, dtype=np.uint8).reshape(6, 4, 4)),
    idx(np.ones((6, 2, 2), ">f8"), 0x0E),
    idx(np.ones((6, 3), ">i2"), 0x0B),
    struct.pack(">HBB3I", 0, 0x0E, 3, *[2**32 - 1] * 3),
]
LABELS = [idx(Y.astype(np.uint8)), idx(Y.astype(">i4"), 0x0C)]
TABLES = [
    b"a,b,label\n1,2,0\n3,4.5,1\n-1e3,0,2\n",
    b"1,2,cat\n3,4,dog\n5,6,cat\n",
    b'"1","2","a b"\n3,4,c\n',
    b"\xef\xbb\xbf1;2\n",
    b"1,nan,0\r\n2,inf,1\r\n",
    ("1,2,κλάση\n" * 3).encode(),
    b"1,\x1b[31m,0\n",
    b"1,2,\x1b]0;a\x07\n1,2,b\n",
]

NAMED = [
    b"a,b,label\n1,x,no\n2,y,yes\n,x,no\n4.5,,yes\n",
    b'a,b,label\n"1","x, y",0\n2,y,1\n3,x,0\n',
    b"\xef\xbb\xbfa,b,label\r\n1e3,x,k\r\n\r\n-2,y,l\r\n",
    b"a,b,label\n" + b"".join(b"%d,v%d,%d\n" % (row, row % 40, row % 2) for row in range(80)),
    b"a\tb\tlabel\n1\tx\tno\n2\ty\tyes\n",
]
COLUMNS = {
    "columns": [
        {"name": "a", "mean": 2.5, "scale": 0.5, "missing": True},
        {"name": "b", "values": ["x", "y"]},
    ],
    "label": "label",
    "classes": ["no", "yes"],
    "ignored": [],
}


def npy(array: np.ndarray) -> bytes:
    memory = io.BytesIO()
    np.lib.format.write_array(memory, array, allow_pickle=False)
    return memory.getvalue()


def header(array: np.ndarray, descr: str, shape: str, extra: str = "") -> bytes:
    """Return the bytes of a .npy file with any header."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, {extra}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", min(len(text), 65535)) + text + array.tobytes()


def archive(members: list[tuple[str, bytes]], method: int, claim: int | None, comment: bytes) -> bytes:
    """Return a .npz; names may occur twice. claim: the sizes of the members according to its directory."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", method) as file:
        for name, content in members:
            file.writestr(zipfile.ZipInfo(name) if method == zipfile.ZIP_STORED else name, content)
        for member in file.filelist if claim is not None else []:
            member.file_size = claim or 0
        file.comment = comment[:1000]
    return memory.getvalue()


def data_sets() -> list[dict[str, bytes]]:
    return [
        {"x": npy(X), "y": npy(Y)},
        {"x_train": npy(X), "y_train": npy(Y), "x_test": npy(X[:2]), "y_test": npy(Y[:2])},
        {"x": npy(X.astype(np.uint8)), "y": npy(Y.astype(np.float64))},
    ]


def network() -> NumpyNetwork:
    return NumpyNetwork([4, 3], optimizer="adam", seed=1)


def model() -> dict[str, bytes]:
    made = network()
    return {
        "model": npy(model_file.header_of("NumpyNetwork", made.config)),
        **{name: npy(np.asarray(array)) for name, array in made.state().items()},
    }


def model_header() -> dict[str, Any]:
    return json.loads(str(model_file.header_of("NumpyNetwork", network().config)))  # type: ignore[no-any-return]


def saved(total: int = 3, step: int = 1) -> checkpoint.Saved:
    made = network()
    epoch = {"epoch": 1, "loss": 0.5, "accuracy": 0.5, "seconds": 1.0, "samples_per_second": 9.0}
    progress = checkpoint.Progress(
        epoch=1,
        step=step,
        total=total,
        ranks=2,
        seconds=0.5,
        settings={"batch_size": 4, "seed": 0},
        shapes=[[name, list(shape)] for name, shape in made.shapes.items()],
        rates=made.learning_rates,
        history=[{**epoch, "communication_share": 0.1}],
        values=np.zeros((step, len(made.metrics) + 1)),
    )
    local = [{"random": np.arange(3), "watching.step": np.array(1)}, {"random": np.arange(3)}]
    return checkpoint.Saved("NumpyNetwork", made.config, dict(made.state()), progress, local)


def checkpoint_members(folder: Path) -> tuple[bytes, dict[str, bytes], dict[str, Any]]:
    """Return the members of a checkpoint file, and its own header."""
    path = folder / "made.npz"
    checkpoint.write(str(path), saved())
    content = path.read_bytes()
    path.unlink()
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        members = {name.removesuffix(".npy"): file.read(name) for name in file.namelist()}
    said = json.loads(str(np.load(io.BytesIO(members[model_file.CHECKPOINT]))))
    return content, members, said


def decision() -> dict[str, Any]:
    entries = {constants.Key((2,), False): Machine(), constants.Key((2, 2), True): Machine(alpha=1e-3)}
    return json.loads(constants.dumps(entries))  # type: ignore[no-any-return]


def results() -> list[dict[str, Any]]:
    """Return files as `benchmarks.bandwidth --json` writes them."""
    runs = [made_run(ranks, slower, [64, 65536, 1 << 20]) for ranks, slower in ((2, 1.0), (4, 1.5))]
    return [json.loads(to_json(replace(run, skipped={"nccl": "no"}), "an advice")) for run in runs]


def trace() -> list[Any]:
    def event(rank: int, begin: float, kind: str, **about: Any) -> dict[str, Any]:
        made = {"name": kind, "cat": kind, "ph": "X", "ts": begin, "dur": 5.0, "pid": rank, "tid": 0}
        return {**made, "args": about} if about else made

    events = [
        {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "rank 0"}},
        event(0, 0.0, "compute"),
        event(0, 5.0, "wait", series="ring", call=0, last=1),
        event(1, 9.5, "reduce", series="ring", call=0, last=1),
        event(1, 20.0, "update"),
    ]
    return [{"displayTimeUnit": "ms", "otherData": {"ranks": 2}, "traceEvents": events}, events]


def recorded() -> list[Any]:
    """Return parts of a trace, as ranks send them."""
    about = {"bytes": 64, "op": "sum"}
    calls = [[0, 0, 0, "ring", 10, 10, 20, about], [1, 0, 1, "ring", 30, 31, 40, about]]
    return [[[[0, "compute", 0, 9], [0, "waited 0 1", 31, 45]], calls, 0], [[], [], 0]]


def shapes() -> list[Any]:
    """Return the layout of a state, as its root announces it."""
    state = network().state() | {"measured": np.zeros(3)}
    return [[[name, np.asarray(array).dtype.str, list(np.asarray(array).shape)] for name, array in state.items()]]


def message() -> bytes:
    """Return a message with a rank's own state."""
    return model_file.pack({"random": np.arange(3), "watching.step": np.array(1)})


def bomb(size: int) -> bytes:
    return gzip.compress(bytes(size), 1)

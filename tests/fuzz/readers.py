"""All functions that read a file or a message, each with hostile inputs."""

import faulthandler
import json
import logging
import os
import tempfile
import zipfile
import zlib
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from mpi4py import MPI

from allreduce.algorithms import class_of
from allreduce.errors import AllReduceError, CommunicationError
from allreduce.transport.cost import Layout
from allreduce.tuning import constants
from benchmarks import compare, scaling, timeline
from benchmarks.lib import plot, report
from benchmarks.lib.advice import advice
from benchmarks.lib.results import FileError, load
from benchmarks.predicting import fitting
from benchmarks.timeline import load as load_trace
from tests.apps.server import PREDICT, request
from tests.training.test_values import VALUES
from trainers import datasets
from trainers.apps.serving.web import RefusedError
from trainers.apps.tables.streams import open_stream
from trainers.datasets.columns import Columns
from trainers.errors import ArgumentError, CheckpointError, DataError, ModelFileError
from trainers.files import checkpoint, model_file, values
from trainers.files.model_file import CHECKPOINT, HEADER
from trainers.fit import checkpointing
from trainers.replicas.numpy.network import NumpyNetwork
from trainers.strategies.servers.mailbox import ASK, PUSH, Header
from trainers.strategies.servers.options import CHOICES
from trainers.watching.csv_logger import CSVLogger

from . import files, peers
from .layouts import PIPE, Content, contents, lay, lay_all
from .mutations import Strategy, gzipped, mutated, texts, trees
from .running import Count, Reader, quietly, run

# Data sets


def _read_idx(value: dict[str, Content | None], folder: Path) -> None:
    lay_all(folder, value)
    datasets.load(str(folder))


def _idx() -> "Strategy[Any]":
    def part(seeds: list[bytes]) -> "Strategy[Any]":
        return st.one_of(st.sampled_from(seeds), contents(gzipped(mutated(seeds, 3))))

    def named(ending: str, images: Any, labels: Any, tests: Any) -> dict[str, Any]:
        return {
            f"train-images-idx3-ubyte{ending}": images,
            f"train-labels.idx1-ubyte{ending}": labels,
            f"t10k-images-idx3-ubyte{ending}": tests,
            f"t10k-labels-idx1-ubyte{ending}": None if tests is None else labels,
        }

    images, labels = part(files.IMAGES), part(files.LABELS)
    return st.builds(named, st.sampled_from(("", ".gz")), images, labels, st.none() | images)


def _read_data(value: tuple[str, Content], folder: Path) -> None:
    name, content = value
    datasets.load(lay(folder / name, content))


def _csv() -> "Strategy[Any]":
    cells = st.one_of(
        st.sampled_from(("1", "2.5", "cat", "", " ", '"', "nan", "1e999", "0x1p3", "\0", "\x1b[2J")),
        st.text(max_size=6),
    )
    rows = st.lists(st.lists(cells, min_size=1, max_size=4).map(",".join), max_size=6)
    ends = st.sampled_from(("\n", "\r\n", "\r", "\x0b", "\x85", "\u2028", "\n\n"))
    made = st.builds(lambda lines, end: end.join(lines).encode(errors="surrogatepass"), rows, ends)
    codings = st.sampled_from(("utf-8", "utf-16", "latin-1", "utf-8-sig"))
    coded = st.builds(lambda text, coding: text.decode(errors="replace").encode(coding, "replace"), made, codings)
    everything = gzipped(st.one_of(mutated(files.TABLES), made, coded))
    return st.tuples(st.sampled_from(("set.csv", "set.csv.gz")), contents(everything))


def _read_named(value: tuple[str, Content], folder: Path) -> None:
    """Learn the columns of a table, and read it by columns that are known."""
    name, content = value
    path = lay(folder / name, content)
    with suppress(DataError):
        for piece in open_stream(path, Columns.from_dict(files.COLUMNS), 5, {}).pieces():
            assert (x := piece()) is None or np.isfinite(x).all()
    data = datasets.load(path, "label")
    assert np.isfinite(data.x_train).all()
    assert data.columns is not None
    assert Columns.from_dict(json.loads(json.dumps(data.columns.as_dict()))) == data.columns


def _named() -> "Strategy[Any]":
    cells = st.sampled_from(
        ("1", "2.5", "x", "", " ", '"', '"a,b"', "nan", "1e300", "1e999", "1_0", "\0", "?", "\x1b[2J", "\r")
    )
    rows = st.lists(st.lists(cells, min_size=2, max_size=4).map(",".join), max_size=8)
    made = rows.map(lambda lines: "\n".join(["a,b,label", *lines]).encode())
    everything = gzipped(st.one_of(mutated(files.NAMED), made))
    return st.tuples(st.sampled_from(("set.csv", "set.csv.gz", "set.tsv")), contents(everything))


def _read_stream(value: tuple[str, Content], folder: Path) -> None:
    name, content = value
    found = [piece() for piece in open_stream(lay(folder / name, content), None, None, {}).pieces()]
    assert all(x is None or x.dtype.kind in "iufb" for x in found)


def _streams() -> "Strategy[Any]":
    arrays = [files.npy(files.X), files.npy(files.Y), files.npy(np.ones((3, 2, 2), np.uint8))]
    single = st.tuples(st.just("x.npy"), contents(gzipped(st.one_of(mutated(arrays, 3), _claimed()))))
    packed = st.tuples(st.just("x.npz"), contents(_members([{"x": arrays[0]}, {"x": arrays[2], "y": arrays[1]}])))
    tables = st.tuples(st.sampled_from(("x.csv", "x.tsv")), contents(gzipped(mutated(files.TABLES))))
    return st.one_of(single, packed, tables)


def _read_columns(value: Any, _: Path) -> None:
    columns = Columns.from_dict(value)
    columns.encode([["1"]] * len(columns.columns), str)
    str(columns)


def _claimed() -> "Strategy[bytes]":
    """Draw .npy files whose headers need not describe them."""
    kinds = st.sampled_from(
        ("'<f4'", "'<i8'", "'|u1'", "'|O'", "'<U4'", "'|S0'", "'<M8[s]'", "[('a', '<f4')]", "'<c16'", "('<f4', (2,))",
         "3", "'|V0'")
    )  # fmt: skip
    shapes = st.sampled_from(
        ("(4, 2)", "(6, 4)", "()", "(0,)", "(-1,)", f"({2**62},)", f"({10**30}, 2)", "(0, 4294967295, 65536)", "[4]",
         "'4'")
    )  # fmt: skip
    sizes = st.lists(st.integers(-2, 10), max_size=40).map(lambda sizes: str(tuple(sizes)))
    arrays = st.sampled_from((files.X, files.Y, np.zeros(0), np.ones(3, np.uint8)))
    return st.builds(files.header, arrays, kinds, st.one_of(shapes, sizes), st.sampled_from(("", "'x': 1", "(" * 500)))


def _members(good: list[dict[str, bytes]], headers: "dict[str, Strategy[bytes]] | None" = None) -> "Strategy[bytes]":
    """Draw archives with some of these members altered, or damaged archives."""
    own = headers or {}
    numbers = st.sampled_from([np.nan, np.inf, -1, 2**40, 1e300]).map(lambda value: np.full((6, 4), value))
    others = st.sampled_from((np.array("text"), np.zeros(7, bool), np.ones((6, 4), complex), np.ones((1,) * 32)))
    plain = st.one_of(numbers, others).map(files.npy)
    names = sorted({name for each in good for name in each})

    def members(which: dict[str, bytes], changes: list[tuple[str, bytes]], extra: list[tuple[str, bytes]]) -> Any:
        return [(f"{name}.npy", content) for name, content in ({**which, **dict(changes)}).items()] + extra

    def change(name: str) -> "Strategy[tuple[str, bytes]]":
        valid = [each[name] for each in good if name in each]
        likely = [own[name]] * 3 if name in own else []
        return st.tuples(st.just(name), st.one_of(*likely, mutated(valid, 3), _claimed(), plain))

    ends = ("x.npy", "x", "../x.npy", "\x1b[31m.npy", f"{CHECKPOINT}.rank-1.a.npy", f"{CHECKPOINT}.rank7.a.npy")
    extra = st.tuples(st.sampled_from(ends), st.just(b""))
    altered = st.one_of(*map(change, names))
    listed = st.builds(members, st.sampled_from(good), st.lists(altered, max_size=2), st.lists(extra, max_size=1))
    rare = zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA
    methods = st.sampled_from((zipfile.ZIP_STORED,) * 6 + (zipfile.ZIP_DEFLATED,) * 2 + rare)
    claims = st.sampled_from((None,) * 12 + (0, 1, 1 << 40))
    comments = st.sampled_from((b"",) * 5 + (b"PK\x05\x06" * 9, b"\0" * 900))
    whole = st.builds(files.archive, listed, methods, claims, comments)
    return st.one_of(whole, whole, mutated([_stored(each) for each in good], 4))


def _stored(members: dict[str, bytes]) -> bytes:
    named = [(f"{name}.npy", content) for name, content in members.items()]
    return files.archive(named, zipfile.ZIP_STORED, None, b"")


def _npz() -> "Strategy[Any]":
    return st.tuples(st.just("set.npz"), contents(gzipped(_members(files.data_sets()))))


# Models and checkpoints


def _read_model(value: Content, folder: Path) -> None:
    made = NumpyNetwork.load(lay(folder / "model.npz", value))
    assert np.isfinite(made.parameters).all()
    if made.sizes[0] < 1000:
        with np.errstate(all="ignore"):
            made.predict(np.zeros((2, made.sizes[0]), np.float32))


def _restore_model(value: Content, folder: Path) -> None:
    files.network().restore(lay(folder / "model.npz", value))


def _text_array(seeds: list[Any]) -> "Strategy[bytes]":
    return texts(seeds).map(lambda text: files.npy(np.array(text.decode(errors="replace"))))


def _models() -> "Strategy[Any]":
    return contents(_members([files.model()], {HEADER: _text_array([files.model_header()])}))


def _read_checkpoints(value: dict[str, Content], folder: Path) -> None:
    lay_all(folder, value)
    found = checkpoint.newest(str(folder))
    for name in value:
        with suppress(CheckpointError):
            checkpoint.read(str(folder / name))
    if found is None:
        return
    path, saved = found
    network = files.network()
    checkpointing.check(path, saved, network, {"batch_size": 4, "seed": 0}, 3)
    network.learning_rates = saved.progress.rates
    network.load_state(saved.state)
    for own in saved.local:
        model_file.unpack(model_file.pack(own))
    checkpoint.prune(str(folder), saved.progress.total, 1)
    checkpoint.clean(str(folder))


def _checkpoints() -> "Strategy[Any]":
    with tempfile.TemporaryDirectory() as folder:
        whole, members, said = files.checkpoint_members(Path(folder))
    names = [f"checkpoint-{number:08d}.npz" for number in (1, 2, 3, 10**20 - 1)]
    names.append(".checkpoint-00000001.npz.01234567")
    ours = {HEADER: _text_array([files.model_header()])}

    def signed(tree: Any, altered: dict[str, bytes]) -> bytes:
        """Return the content with right checksums, so that the rest of it is checked too."""
        held = {**members, **altered}
        if isinstance(tree, dict):
            sums = {name: zlib.crc32(each) for name, each in held.items() if name != CHECKPOINT}
            tree = {**tree, "checksums": sums}
        return _stored({**held, CHECKPOINT: files.npy(np.array(json.dumps(tree)))})

    def altered(name: str) -> "Strategy[tuple[str, bytes]]":
        damaged = mutated([members[name]], 2)
        return st.tuples(st.just(name), ours[name] | damaged if name in ours else damaged)

    changes = st.lists(st.sampled_from(sorted(members)).flatmap(altered), max_size=1).map(dict)
    one = st.one_of(
        st.builds(signed, trees([said], 2), changes),
        mutated([whole], 2),
        _members([members], {CHECKPOINT: _text_array([said]), **ours}),
    )
    return st.dictionaries(st.sampled_from(names), contents(one), min_size=1, max_size=3)


# What this library says of itself, in JSON


def _read_decisions(value: Content, folder: Path) -> str:
    path = Path(lay(folder / "table.json", value))
    entries = constants.read(path)
    constants.dumps(entries)
    for key, machine in entries.items():
        for size in (0, 4096, 1 << 40):
            seconds = class_of("ring").cost(size, Layout(key.node_sizes), machine)
            assert seconds >= 0
    return ""


def _decisions() -> "Strategy[Any]":
    return contents(texts([files.decision()]))


def _said_by_auto(value: Content, folder: Path) -> str:
    """Return the messages of rank 0 about a table: a wrong table must not stop a training."""
    path = Path(lay(folder / "table.json", value))
    return constants._read(peers.OneNode(), path)[1]  # type: ignore[arg-type]


def _read_results(value: tuple[Content, Content], folder: Path) -> str:
    paths = [lay(folder / name, content) for name, content in zip(("a.json", "b.json"), value, strict=True)]
    code, said = quietly(compare.main, paths)  # type: ignore[arg-type]
    for path in paths:
        with suppress(FileError):
            advice(load(path))
    return _outcome(code, said)


def _outcome(code: int, said: str) -> str:
    if code == 2:
        raise FileError(said.rstrip("\n"))
    return said


def _read_fit(value: Content, folder: Path) -> str:
    points, _ = fitting.read([lay(folder / "a.json", value)])
    fitting.fit(points[:20], fitting.Machine(), rounds=1)
    return ""


def _read_scaling(value: Content, folder: Path) -> str:
    return _outcome(*quietly(scaling.main, ["--fit", lay(folder / "a.json", value), "--max-ranks", "4"]))  # type: ignore[arg-type]


class _Page(HTMLParser):
    """Counts the scripts and files that a page would run or load."""

    def __init__(self) -> None:
        super().__init__()
        self.harmful = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.harmful += tag in ("img", "iframe", "object") or any(name.startswith("on") for name, _ in attrs)


def _read_page(value: Content, folder: Path) -> str:
    run = load(lay(folder / "a.json", value))
    page, parser = report.page(run), _Page()
    parser.feed(page)
    assert not parser.harmful
    assert "<script" not in page
    assert "alert(1)</script>" not in page
    plot.draw(run)
    return advice(run)


def _results() -> "Strategy[Any]":
    return contents(texts(files.results()))


def _read_trace(value: Content, folder: Path) -> str:
    return _outcome(*quietly(timeline.main, [lay(folder / "$\\frac$.json", value)]))  # type: ignore[arg-type]


def _draw_trace(value: Content, folder: Path) -> str:
    path = lay(folder / "$\\frac$.json", value)
    timeline.draw(load_trace(path), os.path.basename(path))
    return ""


def _read_log(value: Content, folder: Path) -> None:
    logger = CSVLogger(lay(folder / "log.csv", value), append=True)
    logger.set_trainer(peers.Alone())
    logger.on_train_begin()
    logger.on_epoch_end(0, {"loss": 1.0})
    logger.on_train_end()


def _logs() -> "Strategy[Any]":
    seeds = [b"epoch,loss\n0,1.5\n", b'epoch,"a\nb"\n', b"epoch,loss", b"\xef\xbb\xbfepoch\n", b"a" * 70000]
    return contents(mutated(seeds)).filter(lambda content: content != PIPE)  # a pipe waits for its reader, as pipes do


# Messages


def _read_own(value: bytes, _: Path) -> None:
    model_file.unpack(value)


def _own() -> "Strategy[Any]":
    return st.one_of(mutated([files.message()]), _members([{"random": files.npy(files.Y)}]))


def _read_values(value: bytes, _: Path) -> None:
    values.decode(np.frombuffer(value, np.uint8))


def _read_random(value: Any, _: Path) -> None:
    before = checkpointing.random_state()
    try:
        checkpointing.load_random_state({"random": np.frombuffer(json.dumps(value).encode(), np.uint8)})
        np.random.random(3)
        np.random.randn(3)
    finally:
        checkpointing.load_random_state(before)


def _randoms() -> "Strategy[Any]":
    kind, of_python, of_numpy = json.loads(checkpointing.random_state()["random"].tobytes())
    places = (of_numpy[3], -1, 625, 1 << 30, 1 << 62)
    return trees([[kind, of_python, [*of_numpy[:3], place, *of_numpy[4:]]] for place in places], 2)


def _notes() -> "Strategy[Any]":
    facts = [[kind, 1, 1, 1, "a call"] for kind in range(5)]
    others = [[0, 0, 10**30, -1, "\x1b[2J\ud800" * 400]]
    ranks = [[[0, 10**30], [1, 0], [-1, 1], [1, 1]], [1]], [[[0, 1]], [1, 2]]
    messages = [[[given, *each] for each in ranks] for given in (facts, others)]
    return st.lists(st.one_of(texts([*messages, messages[0][1:]]), st.binary(max_size=600)), max_size=3)


def _sizes() -> "Strategy[Any]":
    sizes = trees([[3], [1 << 38], [1 << 39], [-1], [1, 1], [True], [2.5]], 2)
    return sizes.filter(lambda value: isinstance(value, list))


def _pushes() -> "Strategy[Any]":
    number = st.one_of(st.integers(-1, 8), st.sampled_from((-(2**63), 2**63 - 1, 2**31, 2**40)))
    likely = st.builds(Header, st.integers(0, 2), st.integers(0, 5), st.integers(0, 2), st.integers(0, 1), st.just(0))
    head = st.one_of(likely, likely, st.builds(Header, number, number, number, number, number))
    message = st.tuples(st.integers(0, 2), st.sampled_from((ASK, ASK, PUSH)), head)
    return st.tuples(st.booleans(), st.sampled_from(CHOICES["stale"]), st.lists(message, max_size=30))


def _requests() -> "Strategy[Any]":
    right = {"instances": [[1.5, -2, 3, 4], [0.25, 5, 6, 7]]}
    heads = (
        b"Content-Type: application/octet-stream", b"Content-Encoding: gzip", b"Content-Length: -1",
        b"Content-Length: 99999999999999999999", b"Content-Length: 70000", b"Transfer-Encoding: chunked", b": ",
        b"X: " + b"y" * 70_000, b"Content-Length: 1\r\nContent-Length: 2", b"Expect: 100-continue",
        b"Upgrade: websocket\r\nConnection: upgrade",
    )  # fmt: skip
    paths = (
        "/v1/models/m/versions/1:predict", "/v1/models/m", "/v1/models/m/metadata", "/metrics", "/", "*",
        "/v1/models/../../etc/passwd:predict", "/v1/models/%2e%2e%2fetc:predict", "/v1/models/m/versions/2:predict",
        "/v1/models/m/versions/99999999999999999999:predict", "/v1/models/m:classify", "/v1/models/",
        "/v1/models/m/versions/-1", "/v1/models/m%00", "http://elsewhere/v1/models/m", "/v1/models/\xff",
    )  # fmt: skip
    body = json.dumps(right).encode()
    methods = st.sampled_from(("GET", "POST", "PUT", "HEAD", "DELETE", "get", "G T"))
    return st.one_of(
        texts([right]).map(lambda text: request(PREDICT, text)),
        st.builds(request, st.sampled_from(paths), st.just(body), methods),
        st.lists(st.sampled_from(heads), min_size=1, max_size=2).map(lambda few: request(PREDICT, body, "POST", *few)),
        mutated([request(PREDICT, body)]),
    )


FILES = (DataError,)


def images(content: Content) -> dict[str, Content]:
    return {"train-images-idx3-ubyte": content, "train-labels-idx1-ubyte": files.LABELS[0]}


def as_it_is(content: Content) -> Content:
    return content


READERS = [
    Reader("IDX", _idx(), _read_idx, FILES, laid=images),
    Reader("CSV", _csv(), _read_data, FILES, laid=lambda content: ("set.csv.gz", content)),
    Reader("npz data set", _npz(), _read_data, FILES, laid=lambda content: ("set.npz", content)),
    Reader("table", _named(), _read_named, FILES, laid=lambda content: ("set.tsv", content)),
    Reader("rows to predict", _streams(), _read_stream, FILES, laid=lambda content: ("x.npy", content)),
    Reader("columns", trees([files.COLUMNS]), _read_columns, (ValueError,)),
    Reader("model", _models(), _read_model, (ModelFileError,), laid=as_it_is),
    Reader("restored model", _models(), _restore_model, (ModelFileError,), 0.5, laid=as_it_is),
    Reader("checkpoints", _checkpoints(), _read_checkpoints, (CheckpointError, ModelFileError)),
    Reader("constants", _decisions(), _read_decisions, (constants.ContentError, OSError), laid=as_it_is),
    Reader("auto's table", _decisions(), _said_by_auto, ()),
    Reader("compare", st.tuples(_results(), _results()), _read_results, (FileError,)),
    Reader("fit", _results(), _read_fit, (FileError,), 0.3, laid=as_it_is),
    Reader("scaling", _results(), _read_scaling, (FileError,), 0.02),
    Reader("report", _results(), _read_page, (FileError,), 0.02),
    Reader("timeline", contents(texts(files.trace())), _read_trace, (FileError,), laid=as_it_is),
    Reader("timeline's picture", contents(texts(files.trace())), _draw_trace, (FileError,), 0.02),
    Reader("CSV log", _logs(), _read_log, (ArgumentError,)),
    Reader("a rank's trace", texts(files.recorded()), peers.read_trace, (AllReduceError,)),
    Reader("a rank's own state", _own(), _read_own, (CheckpointError,)),
    Reader("values", mutated([values.encode(VALUES[:-1]).tobytes()]), _read_values, (ValueError,)),
    Reader("random state", _randoms(), _read_random, (KeyError, IndexError, TypeError, ValueError, OverflowError)),
    Reader("notes", _notes(), peers.read_notes, (AllReduceError,)),
    Reader("sizes of parcels", _sizes(), peers.read_sizes, (CommunicationError,)),
    Reader("workers' parcels", _pushes(), peers.read_pushes, (CommunicationError,)),
    Reader("requests", _requests(), peers.read_request, (RefusedError,), 3),
]  # fmt: skip


def read_alone(name: str, inputs: int, seed: int) -> Count:
    """Return the counts of one reader, in a process of its own."""
    if not MPI.Is_initialized():  # as in the children of a program
        MPI.Init()
    faulthandler.enable()
    logging.disable(logging.CRITICAL)
    (reader,) = (each for each in READERS if each.name == name)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        return run(reader, inputs, seed, Path(folder))

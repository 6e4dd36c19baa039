"""The page of docs/run/export.md that runs an exported model in a browser, by onnxruntime-web."""

import functools
import http.server
import json
import re
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests import launch
from tests.conftest import lacking
from tests.docs.browser import browse
from trainers import MirroredTrainer, datasets, network_of

PACKAGE = "onnxruntime-web@1.30.0"
FILES = ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
ROWS = 5

pytestmark = pytest.mark.expensive


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, and logs nothing."""

    def guess_type(self, path: object) -> str:
        return "text/javascript" if str(path).endswith(".mjs") else super().guess_type(str(path))

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address of a web server of this machine, which serves tmp_path."""
    handler = functools.partial(Handler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def fetch_runtime(folder: Path) -> None:
    """Write the files of onnxruntime-web to a folder; skip the test where npm or its registry is not to be had."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    try:
        command = ["npm", "pack", "--silent", PACKAGE]
        subprocess.run(command, cwd=folder, capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"npm pack {PACKAGE} failed: {type(error).__name__}")
    (path,) = folder.glob("*.tgz")
    with tarfile.open(path) as archive:
        for name in FILES:
            source = archive.extractfile(f"package/dist/{name}")
            assert source is not None
            (folder / name).write_bytes(source.read())
    path.unlink()


def test_the_page_answers_as_the_model_does(tmp_path: Path, address: str) -> None:
    if not all(map(find_spec, ("onnx", "onnxruntime"))):
        lacking('onnx or onnxruntime is not installed: pip install ".[export]" in the checkout')
    fetch_runtime(tmp_path)
    data = datasets.load("digits")
    with MirroredTrainer(network_of(data, (16,))) as trainer:
        trainer.fit(data.x_train, data.y_train, epochs=2, progress=False)
        trainer.export(str(tmp_path / "digits.onnx"), classes=data.classes)
        expected = trainer.predict(data.x_test[:ROWS])
    shutil.copy(launch.ROOT / "docs" / "programs" / "export_browser.html", tmp_path / "index.html")
    (tmp_path / "rows.json").write_text(json.dumps(data.x_test[:ROWS].tolist()))
    text = browse(f"{address}/index.html", "--virtual-time-budget=60000").stdout
    found = re.search(r'<p id="answer">(.*?)</p>', text, re.DOTALL)
    assert found, text[-2000:]
    lines = [line.split(": ") for line in found[1].splitlines()]
    assert [name for name, _ in lines] == [data.classes[number] for number in expected.argmax(axis=1)], found[1]
    np.testing.assert_allclose([float(value) for _, value in lines], expected.max(axis=1), atol=1e-4)

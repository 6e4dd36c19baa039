"""The page of docs/run/export.md that runs an exported model in a browser, by onnxruntime-web."""

import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests import launch
from tests.conftest import lacking
from tests.docs.browser import browse
from trainers import MirroredTrainer, datasets, network_of

PACKAGE = "onnxruntime-web@1.30.0"
ROWS = 5

pytestmark = pytest.mark.expensive


def fetch_runtime(folder: Path) -> Path:
    """Return the folder with the files of onnxruntime-web; skip the test where npm or its registry is not to be had."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    try:
        command = ["npm", "pack", "--silent", PACKAGE]
        subprocess.run(command, cwd=folder, capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"npm pack {PACKAGE} failed: {type(error).__name__}")
    (path,) = folder.glob("*.tgz")
    shutil.unpack_archive(path, folder)
    return folder / "package" / "dist"


def test_the_page_answers_as_the_model_does(tmp_path: Path) -> None:
    if not all(map(find_spec, ("onnx", "onnxruntime"))):
        lacking('onnx or onnxruntime is not installed: pip install ".[export]" in the checkout')
    folder, data = fetch_runtime(tmp_path), datasets.load("digits")
    with MirroredTrainer(network_of(data, (16,))) as trainer:
        trainer.fit(data.x_train, data.y_train, epochs=2, progress=False)
        trainer.export(str(folder / "digits.onnx"), classes=data.classes)
        expected = trainer.predict(data.x_test[:ROWS])
    shutil.copy(launch.ROOT / "docs" / "programs" / "export_browser.html", folder / "index.html")
    (folder / "rows.json").write_text(json.dumps(data.x_test[:ROWS].tolist()))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/index.html"
        text = browse(address, "--virtual-time-budget=60000").stdout
        server.shutdown()
    found = re.search(r'<p id="answer">(.*?)</p>', text, re.DOTALL)
    assert found, text[-2000:]
    lines = [line.split(": ") for line in found[1].splitlines()]
    assert [name for name, _ in lines] == [data.classes[number] for number in expected.argmax(axis=1)], found[1]
    np.testing.assert_allclose([float(value) for _, value in lines], expected.max(axis=1), atol=1e-4)

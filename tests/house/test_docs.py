"""The API reference: a page for every module, made from the docstrings, and for every guide."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import launch
from tests.house.test_readme import GUIDES
from trainers.trainer import Trainer
from trainers.watching.callback import Callback


def test_every_module_has_a_page(tmp_path: Path) -> None:
    pytest.importorskip("pdoc")
    pytest.importorskip("torch")
    pytest.importorskip("optax")
    if not find_spec("keras"):
        pytest.skip("Keras is not installed")
    script = launch.ROOT / "scripts" / "api_pages.py"
    made = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=300, cwd=launch.ROOT
    )
    assert made.returncode == 0, made.stderr
    assert "Warn" not in made.stderr
    pages = {path.relative_to(tmp_path).with_suffix("").as_posix() for path in tmp_path.rglob("*.html")}
    for package in ("allreduce", "trainers", "benchmarks"):
        for path in (launch.ROOT / package).rglob("*.py"):
            module = re.sub("/__init__$", "", path.relative_to(launch.ROOT).with_suffix("").as_posix())
            assert module in pages or module.endswith("__main__"), f"{module} has no page"
    backend = (tmp_path / "allreduce" / "backend.html").read_text()
    assert 'id="AllReduce.__call__"' in backend
    assert "<li><strong>buffer</strong>: a contiguous, writable" in backend
    assert 'id="Trainer.fit"' in (tmp_path / "trainers" / "trainer.html").read_text()
    assert {"modules", "index", "CHANGELOG", *(path.parent.as_posix() + "/README" for path in GUIDES[1:])} <= pages
    assert [link for page in pages if page.endswith("README") for link in broken(tmp_path / f"{page}.html")] == []
    assert broken(tmp_path / "index.html") == []


def broken(page: Path) -> list[str]:
    """Return the links of a page that lead to no page, or to no anchor in it."""
    found = []
    for link in re.findall(r'(?:href|src)="(?!\w+:)([^"]*)"', page.read_text()):
        name, _, place = link.partition("#")
        target = page.parent / name if name else page
        if not target.is_file() or (place and f'id="{place}"' not in target.read_text()):
            found.append(f"{page.name}: {link}")
    return found


def test_docstrings_say_which_calls_of_a_trainer_are_collective() -> None:
    for method in (Trainer.fit, Trainer.evaluate, Trainer.predict, Trainer.save, Trainer.load, Trainer.edit):
        assert (method.__doc__ or "").partition("\n")[0].endswith("Collective."), method


def test_every_event_of_a_callback_is_explained() -> None:
    assert [name for name, each in vars(Callback).items() if name.startswith("on_") and not each.__doc__] == []

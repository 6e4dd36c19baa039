"""A browser without a screen, for the tests of pages; skipped where none is installed."""

import shutil
import subprocess
import tempfile

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --window-size=1300,1500 --virtual-time-budget=10000 "
    "--enable-logging=stderr --dump-dom"
)


def browse(address: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """Return what a browser prints: the document after its scripts have run, and on stderr the messages of these."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no browser: install Debian's package chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, *FLAGS.split(), f"--user-data-dir={profile}", *options, address]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

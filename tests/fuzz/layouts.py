"""Folders of hostile files: their names and contents, also entries that are not files."""

import os
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

NO_FILE = PIPE, FOLDER, ENDLESS, NOWHERE, ITSELF, LOCKED, SPARSE = (
    "pipe", "folder", "/dev/zero", "nowhere", "itself", "locked", "sparse",
)  # fmt: skip

Content = bytes | str  # a str: one of NO_FILE


def contents(files: "st.SearchStrategy[bytes]") -> "st.SearchStrategy[Content]":
    """Draw the contents of files, and now and then an entry that is not a file."""
    odd: st.SearchStrategy[Content] = st.sampled_from(NO_FILE)
    return st.integers(0, 19).flatmap(lambda chance: files if chance else odd)


def lay(path: Path, content: Content) -> str:
    """Create the entry; return its path."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == PIPE:
        os.mkfifo(path)
    elif content == FOLDER:
        path.mkdir()
    elif content == LOCKED:
        path.write_bytes(b"[]")
        path.chmod(0)
    elif content == SPARSE:
        path.touch()
        os.truncate(path, 1 << 42)
    else:
        path.symlink_to(path.name if content == ITSELF else path.parent / content)
    return str(path)


def lay_all(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        if content is not None:
            lay(folder / name, content)

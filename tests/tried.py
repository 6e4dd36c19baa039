"""Adds the installed versions to allreduce/doctor/tried.json, by which the doctor judges.
`scripts/test.sh --newest` ends with it.

python -m tests.tried
"""

import importlib.metadata
import json
import platform

from allreduce.doctor import host
from tests.launch import ROOT


def main() -> None:
    lines = []
    for name, versions in host.TRIED.items():
        try:
            installed = platform.python_version() if name == "Python" else importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = versions[-1]
        tried = sorted({*versions, installed.partition("+")[0]}, key=host.numbers)
        lines.append(f"  {json.dumps(name)}: {json.dumps(tried)}")
    path = ROOT / "allreduce" / "doctor" / "tried.json"
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(path.read_text(), end="")


if __name__ == "__main__":
    main()

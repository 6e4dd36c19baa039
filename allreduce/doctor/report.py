"""The report: lines for people, JSON for programs."""

import json
import os
import sys
import textwrap
from collections.abc import Sequence
from itertools import groupby

from allreduce.doctor.examination import Examination
from allreduce.doctor.findings import LEVELS, OK, PROBLEM, WARNING, Finding, exit_code, plural
from allreduce.errors import OptionError
from allreduce.files import replacing
from allreduce.notices import on_terminal

WIDTH, NARROWEST = 110, 40
COLOURS = {OK: "\033[32m", WARNING: "\033[33m", PROBLEM: "\033[31m"}
PLAIN = "\033[0m"
STANDARD_OUTPUT = "-"


def text(title: str, findings: Sequence[Finding], coloured: bool = False) -> str:
    """The findings in lines: a heading for each area, then level, name and what was found; what to do below it."""
    levels, names = max(map(len, LEVELS)), max(len(finding.name) for finding in findings)
    indent = " " * (2 + levels + 2 + names + 2)
    lines = [title]
    for area, group in groupby(findings, lambda finding: finding.area):
        lines += ["", area]
        for finding in group:
            level = finding.level.ljust(levels)
            shown = f"{COLOURS[finding.level]}{level}{PLAIN}" if coloured else level
            first, *rest = _wrapped(finding.text, indent)
            lines += [f"  {shown}  {finding.name.ljust(names)}  {first}", *(indent + line for line in rest)]
            if finding.advice:
                first, *rest = _wrapped(finding.advice, f"{indent}-> ")
                lines += [f"{indent}-> {first}", *(f"{indent}   {line}" for line in rest)]
    return "\n".join([*lines, "", summary(findings)]) + "\n"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, max(NARROWEST, WIDTH - len(indent)), break_long_words=False, break_on_hyphens=False) or [
        ""
    ]


def summary(findings: Sequence[Finding]) -> str:
    """How many there are of each level, and the exit code."""
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    code = exit_code(findings)
    if not code:
        return f"{plural(counts[OK], 'finding')}, all ok"
    worse = [plural(counts[level], level) for level in (PROBLEM, WARNING) if counts[level]]
    return f"{', '.join(worse)}, {counts[OK]} ok; exit code {code}"


def as_json(title: str, found: Examination) -> str:
    """Everything that was found, for a program."""
    content = {
        "title": title,
        "exit_code": exit_code(found.findings),
        "findings": [finding._asdict() for finding in found.findings],
        "ranks": [rank._asdict() for rank in found.ranks],
        "clocks_ahead_s": found.ahead,
        "pairs": [
            {"ranks": [pair.first, pair.second], "latency_s": pair.latency, "bytes_per_s": pair.bandwidth}
            for pair in found.measured
        ],
        "unreachable": found.unreachable,
    }
    return json.dumps(content, indent=2) + "\n"


def check_target(path: str | None) -> None:
    """Find out before the examination whether the JSON can be written. Raises OptionError."""
    if path in (None, STANDARD_OUTPUT):
        return
    assert path is not None
    target = os.path.realpath(path)
    special = os.path.exists(target) and not os.path.isfile(target)  # any other file is written aside, and renamed
    folder = target if special else os.path.dirname(target)
    if os.path.isdir(target) or not os.access(folder, os.W_OK):
        raise OptionError(f"--json {path}: this can't be written; give a file in a folder that exists")


def show(title: str, found: Examination, json_path: str | None) -> None:
    """Print the report, and write the JSON. Raises OptionError when that fails."""
    if json_path == STANDARD_OUTPUT:
        print(as_json(title, found), end="", flush=True)
    elif json_path is not None:
        with replacing(json_path, "--json") as file:
            file.write(as_json(title, found))
    stream, descriptor = (sys.stderr, 2) if json_path == STANDARD_OUTPUT else (sys.stdout, 1)
    coloured = on_terminal(descriptor) and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    print(text(title, found.findings, coloured), end="", file=stream, flush=True)

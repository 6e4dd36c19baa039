"""The graph of imports of the product's files, those under TYPE_CHECKING included."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.launch import ROOT

PACKAGES = ("allreduce", "trainers", "benchmarks")
Graph = dict[str, set[str]]  # the names that each name imports; every name is a key


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    """`allreduce.arrays.gpu` for allreduce/arrays/gpu.py, and `allreduce.arrays` for its __init__.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Return the dotted names that a module in `package` imports, anywhere in its code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            start = ".".join([*parts, *filter(None, [node.module])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


def import_graph(packages: Iterable[str] = PACKAGES) -> Graph:
    """Which module of the packages imports which."""
    paths = {module_of(path): path for package in packages for path in files(package)}
    graph: Graph = {}
    for module, path in paths.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        names = imported(ast.parse(path.read_text()), package)
        targets = {name if name in paths else name.rpartition(".")[0] for name in names}
        graph[module] = {target for target in targets if target in paths} - {module}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of names that import each other, directly or by way of others (Tarjan 1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in order:
                visit(target)
            if target in stack:
                lowest[name] = min(lowest[name], lowest[target])
        if lowest[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return found


def rooms(graph: Mapping[str, set[str]], folder: str) -> Graph:
    """Return the imports between the entries of a folder: each module or folder directly in it is one name, and its
    __init__.py has the folder's name."""
    depth = folder.count(".") + 2

    def room(module: str) -> str | None:
        return ".".join(module.split(".")[:depth]) if f"{module}.".startswith(f"{folder}.") else None

    between: Graph = {name: set() for module in graph if (name := room(module))}
    for module, targets in graph.items():
        if (start := room(module)) is not None:
            between[start] |= {end for target in targets if (end := room(target))} - {start}
    return between


def floors(graph: Mapping[str, set[str]]) -> int:
    """Return the number of layers: a name is one layer above the highest name that it imports. A circle is one
    layer."""
    group = {name: name for name in graph} | {name: circle[0] for circle in circles(graph) for name in circle}
    below: Graph = {head: set() for head in group.values()}
    for name, targets in graph.items():
        below[group[name]] |= {group[target] for target in targets} - {group[name]}
    heights: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in heights:
            heights[name] = 1 + max((height(target) for target in below[name]), default=0)
        return heights[name]

    return max((height(name) for name in below), default=0)


def folders(graph: Mapping[str, set[str]]) -> list[str]:
    """Every folder that holds modules."""
    return sorted({name for module in graph for name in [module.rpartition(".")[0]] if name})


def closing(graph: Mapping[str, set[str]], circle: list[str]) -> list[str]:
    """Return the imports that close a circle of modules, or of folders."""

    def member(module: str) -> str | None:
        return next((each for each in circle if f"{module}.".startswith(f"{each}.")), None)

    pairs = [(module, target) for module in sorted(graph) for target in sorted(graph[module])]
    known = [pair for pair in pairs if all(map(member, pair))]
    return [f"{module} -> {target}" for module, target in known if member(module) != member(target)]

"""The graph of an exported file: a replica's graph, between the raw rows and the answers in words."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainers.apps.export.metadata import BATCH, INPUT, LABEL, OUTPUT, PROBABILITIES, PRODUCER, Exported
from trainers.data import Tree, leaves
from trainers.datasets.columns import Columns, Number
from trainers.errors import ExportError
from trainers.files.onnx_graph import IR_VERSION, OPSETS, Graph, need_onnx

OLDEST_OPSET, NEWEST_IR = 13, 10  # of a replica's graph to which nodes can be added; of a file for onnxruntime 1.18
CORE, BEFORE, AFTER = "model.", "before.", "after."  # prefixes of names inside of the graph


def names_of(tree: Tree, name: str) -> list[str]:
    """Return the names of the inputs or outputs of a file, one for each array of a tree."""
    if isinstance(tree, dict) and all(isinstance(key, str) and not isinstance(tree[key], dict | tuple) for key in tree):
        return list(tree)
    count = len(leaves(tree))
    return [f"{name}_{number}" for number in range(count)] if isinstance(tree, dict | tuple) else [name]


def finished(core: Any, about: Exported, x: Tree, outputs: Tree) -> Any:
    """Return the whole graph, an onnx.ModelProto. Raises ExportError.

    core: of a replica's `to_onnx`. about: describes the file. x, outputs: some rows as `predict` takes them, and its
    result for them.
    """
    model = _renamed(core, len(leaves(x)), len(leaves(outputs)))
    graph, taken = model.graph, [each.name for each in model.graph.input]
    before, after = Graph(BEFORE), Graph(AFTER)
    if about.columns is not None:
        inputs = _columns_into(before, about.columns, taken[0], graph.input[0].type.tensor_type.elem_type)
    else:
        inputs = [
            _through(before, each, name, each.name) for each, name in zip(graph.input, names_of(x, INPUT), strict=True)
        ]
    if about.classifies:
        made = _answers(after, about, graph.output[0].name, outputs)
    else:
        found = zip(graph.output, names_of(outputs, OUTPUT), strict=True)
        made = [_through(after, each, each.name, name) for each, name in found]
    names = [each.name for each in [*inputs, *made]]
    if "" in names or len({*names}) < len(names):
        raise ExportError(f"the inputs and outputs of the file would have the names {names}, which must be different")
    nodes = [*before.nodes, *graph.node, *after.nodes]
    for field, values in (("node", nodes), ("input", inputs), ("output", made)):
        del getattr(graph, field)[:]
        getattr(graph, field).extend(values)
    graph.initializer.extend([*before.constants, *after.constants])
    if about.columns is not None and not any(each.domain == "ai.onnx.ml" for each in model.opset_import):
        model.opset_import.append(need_onnx().helper.make_opsetid("ai.onnx.ml", OPSETS["ai.onnx.ml"]))
    return model


def _renamed(core: Any, inputs: int, outputs: int) -> Any:
    """Return a copy of a replica's graph whose names have a prefix, without texts of the program that made it. Raises
    ExportError if nodes can't be added to it."""
    held = {each.name for each in core.graph.initializer}
    given = [each for each in core.graph.input if each.name not in held]
    opset = next((each.version for each in core.opset_import if each.domain in ("", "ai.onnx")), 0)
    if (len(given), len(core.graph.output)) != (inputs, outputs) or opset < OLDEST_OPSET:
        raise ExportError(
            f"the graph of the model has {len(given)} inputs, {len(core.graph.output)} outputs and the opset {opset}; "
            f"expected {inputs} and {outputs}, one for each array, and an opset of at least {OLDEST_OPSET}"
        )
    for each in [*given, *core.graph.output]:
        shape = each.type.tensor_type.shape.dim
        if not shape or shape[0].HasField("dim_value"):
            raise ExportError(
                f"an input or output of the graph ({each.name}) has the shape "
                f"{[axis.dim_value or axis.dim_param for axis in shape]}, and its first axis must be free: the model "
                "computes with the number of rows as a constant, or its output does not depend on x"
            )
    model = need_onnx().compose.add_prefix(core, CORE)
    for each in [each for each in model.graph.input if each.name.removeprefix(CORE) in held]:
        model.graph.input.remove(each)
    del model.graph.value_info[:], model.metadata_props[:], model.graph.metadata_props[:]
    for node in [*model.graph.node, *(node for function in model.functions for node in function.node)]:
        del node.metadata_props[:]  # of PyTorch: paths and lines of the program
        node.doc_string = ""
    model.doc_string = model.graph.doc_string = ""
    model.ir_version = max(IR_VERSION, min(model.ir_version, NEWEST_IR))
    model.producer_name = PRODUCER
    return model


def _through(graph: Graph, inner: Any, source: str, target: str) -> Any:
    """Connect two names; returns the description of the outer one, like that of `inner` with a free first axis."""
    graph.add("Identity", source, output=target)
    made = type(inner)()
    made.CopyFrom(inner)
    made.name = target if source == inner.name else source
    made.type.tensor_type.shape.dim[0].dim_param = BATCH
    return made


def _answers(graph: Graph, about: Exported, scores: str, outputs: Tree) -> list[Any]:
    """Add the answers of a classifier; returns the descriptions of the outputs. scores: name of the probabilities."""
    kind = str if about.classes else np.int64
    number = graph.add("ArgMax", scores, axis=1, keepdims=0, output="" if about.classes else LABEL)
    if about.classes:
        graph.add("Gather", np.array(about.classes, object), number, output=LABEL)
    graph.add("Identity", scores, output=PROBABILITIES)
    return [
        graph.value(LABEL, kind, [BATCH]),
        graph.value(PROBABILITIES, np.float32, [BATCH, outputs.shape[1]]),
    ]


def _columns_into(graph: Graph, columns: Columns, target: str, dtype: int) -> list[Any]:
    """Add the way from the cells of a table to `target`, the features of the rows; returns the descriptions of the
    inputs. dtype: of the features, as ONNX has it."""
    plain: list[str] = []
    embedded: list[str] = []
    inputs = []
    for column in columns.columns:
        inputs.append(graph.value(column.name, np.float64 if isinstance(column, Number) else str, [BATCH]))
        if isinstance(column, Number):
            plain += _number_into(graph, column.name, column)
            continue
        texts = [*column.values] or [""]
        numbers = list(range(1, len(column.values) + 1)) or [0]
        number = graph.add(
            "LabelEncoder",
            column.name,
            domain="ai.onnx.ml",
            keys_strings=texts,
            values_int64s=numbers,
            default_int64=0,
        )
        if column.embedded:
            embedded.append(_as_feature(graph, number))
        elif column.values:
            one_hot = np.eye(len(column.values) + 1, dtype=np.float32)[:, 1:]
            plain.append(graph.add("Gather", one_hot, number))
    features = graph.add("Concat", *plain, *embedded, axis=1)
    graph.add("Cast", features, output=target, to=dtype)
    return inputs


def _number_into(graph: Graph, given: str, column: Number) -> Sequence[str]:
    """Add the features of a column of numbers, as Number.write computes them; returns their names."""
    absent = graph.add("IsNaN", given)
    scaled = graph.add("Mul", graph.add("Sub", given, np.float64(column.mean)), np.float64(column.scale))
    made = [graph.add("Where", absent, np.float64(0), scaled), absent]
    return [_as_feature(graph, each) for each in made[: column.width]]


def _as_feature(graph: Graph, values: str) -> str:
    return graph.add("Unsqueeze", graph.cast(values, np.float32), np.array([1]))


def add_softmax(core: Any) -> Any:
    """Return a copy of a replica's graph whose output, logits, became probabilities."""
    model = type(core)()
    model.CopyFrom(core)
    graph, output = Graph(AFTER), model.graph.output[0]
    made = graph.add("Softmax", output.name, axis=1, output=f"{AFTER}probabilities")
    model.graph.node.extend(graph.nodes)
    output.name = made
    return model

"""Rewrites the graph of a program so that ExecuTorch's kernels take less time.

The results are the same up to rounding: the exporter compares the program with eager PyTorch after
this. What is slow in ExecuTorch 1.5.1, and what it is replaced by:

    alias(x)                     copies                    x
    permute(permute(x))          copies twice              x
    mm(permute(a), b)            copies a                  permute(mm(permute(b), a)), if a is large
    addmm(c, a, b)               a loop without blocks     add(mm(a, b), c)

`python bench/edge_engine.py` shows the time per step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.fx import Graph, Node

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_ATEN: Final = torch.ops.aten
_PERMUTE: Final = _ATEN.permute.default
_SWAP: Final = [1, 0]


def make_faster(program: ExportedProgram) -> None:
    """Rewrite the graph in place; it must have no operators that change their inputs."""
    graph = program.graph
    for rewrite in (_skip_alias, _split_addmm, _transpose_smaller, _skip_permutes):
        for node in list(graph.nodes):
            if node.op == "call_function":
                rewrite(graph, node)
        graph.eliminate_dead_code()
    for spec, node in zip(
        program.graph_signature.output_specs, graph.output_node().args[0], strict=True
    ):
        spec.arg.name = node.name
    program.graph_module.recompile()


def _skip_alias(graph: Graph, node: Node) -> None:
    if node.target in (_ATEN.alias.default, _ATEN.detach.default):
        _replace(graph, node, node.args[0])


def _split_addmm(graph: Graph, node: Node) -> None:
    if node.target is not _ATEN.addmm.default or node.kwargs:
        return
    added, left, right = node.args
    with graph.inserting_before(node):
        product = _call(graph, _ATEN.mm.default, left, right)
        _replace(graph, node, _call(graph, _ATEN.add.Tensor, product, added))


def _transpose_smaller(graph: Graph, node: Node) -> None:
    if node.target is not _ATEN.mm.default:
        return
    left, right = node.args
    large = _permuted(left)
    if large is None or _size(large) <= _size(right) + _size(node):
        return
    with graph.inserting_before(node):
        product = _call(graph, _ATEN.mm.default, _call(graph, _PERMUTE, right, _SWAP), large)
        _replace(graph, node, _call(graph, _PERMUTE, product, _SWAP))


def _skip_permutes(graph: Graph, node: Node) -> None:
    inner = _permuted(node)
    if inner is not None and (source := _permuted(inner)) is not None:
        _replace(graph, node, source)


def _permuted(node: Any) -> Node | None:
    """The matrix of which this node is the transpose."""
    if isinstance(node, Node) and node.target is _PERMUTE and list(node.args[1]) == _SWAP:  # type: ignore[arg-type]
        return node.args[0]  # type: ignore[return-value]
    return None


def _size(node: Any) -> int:
    return int(node.meta["val"].numel())


def _call(graph: Graph, target: Any, *arguments: Any) -> Node:
    made = graph.call_function(target, arguments)
    values = (a.meta["val"] if isinstance(a, Node) else a for a in arguments)
    made.meta["val"] = target(*values)
    return made


def _replace(graph: Graph, node: Node, other: Any) -> None:
    """Use another node instead. An output keeps its node if the other is an input or an output:
    the signature names each output once.
    """
    returned = graph.output_node()
    if returned in node.users and (other.op == "placeholder" or returned in other.users):
        return
    if "nn_module_stack" in node.meta:
        other.meta.setdefault("nn_module_stack", node.meta["nn_module_stack"])
    node.replace_all_uses_with(other)

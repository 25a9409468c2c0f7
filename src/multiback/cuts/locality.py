"""Whether each row of an output follows from the same row of the data alone, by the graph of a whole batch.

The walk of `multiback.independence` proves it for everything that the graph holds.
"""

import math
from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from multiback import graph
from multiback.independence.layouts import Layout, State
from multiback.independence.locality import prove

# What may stand between a parameter and the rows that all use it: operations of parameters alone,
# whose result no row of the data changes.
_OF_PARAMETERS = {
    "torch::autograd::AccumulateGrad", "TBackward", "TransposeBackward", "PermuteBackward", "ViewBackward",
    "ReshapeAliasBackward", "UnsafeViewBackward", "ExpandBackward", "UnsqueezeBackward", "SqueezeBackward",
    "ToCopyBackward", "CloneBackward", "SliceBackward", "SelectBackward", "SplitBackward", "SplitWithSizesBackward",
    "ChunkBackward", "UnbindBackward", "AliasBackward", "CatBackward", "StackBackward", "RepeatBackward",
    "MulBackward", "AddBackward", "SubBackward", "DivBackward", "NegBackward", "ExpBackward", "SqrtBackward",
    "RsqrtBackward", "PowBackward", "SumBackward", "MeanBackward", "NormBackward", "LinalgVectorNormBackward",
    "WeightNormInterfaceBackward", "MvBackward", "DotBackward", "VdotBackward", "MmBackward", "SoftplusBackward",
    "SigmoidBackward", "TanhBackward",
}  # fmt: skip


def coupling(outputs: Sequence[Tensor], inputs: Sequence[Tensor], rows: int) -> str:
    """Where rows meet, or what is not known to hold them apart; empty where every output is proven row-local.

    `outputs` hold `rows` rows each in dimension 0, and have a graph; so do those of `inputs` that require grad.
    """
    edges = [(get_gradient_edge(output), math.prod(output.shape[1:])) for output in outputs if output.numel()]
    proven: dict[Node, dict[int, State]] = {}
    for edge, inner in sorted(edges, key=lambda pair: -pair[0].node._sequence_nr()):  # those above first
        if proven.get(edge.node, {}).get(edge.output_nr) == Layout(inner):
            continue  # what it comes from was walked with what comes from it
        found = prove(edge.node, edge.output_nr, rows, inner=inner)
        if found.coupling:
            return found.coupling
        for tensor in inputs:
            state = found.states.get(get_gradient_edge(tensor).node, {}).get(0) if tensor.requires_grad else None
            if state is not None and state != Layout(math.prod(tensor.shape[1:])):
                return "data that every row uses"
        counting = [node for node in found.states if _counts_the_batch(node)]
        if counting:
            return f"{counting[0].name()}, which scales by frequency in the batch"
        shared = [node for node, arrived in found.states.items() if not _is_laid_out(arrived)]
        data = {id(tensor) for tensor in inputs}
        for node in graph.walk(shared):
            if id(graph.leaf_of(node)) in data or not _of_parameters(node, rows):
                return node.name()
        proven.update(found.states)
    return ""


def _counts_the_batch(node: Node) -> bool:
    return bool(getattr(node, "_saved_scale_grad_by_freq", False))


def _is_laid_out(arrived: dict[int, State]) -> bool:
    return all(isinstance(state, Layout) for state in arrived.values())


def _of_parameters(node: Node, rows: int) -> bool:
    name = node.name().rstrip("0123456789")
    if name == "EmbeddingBackward":  # positions, looked up alike for every row
        if _counts_the_batch(node):
            return False
        indices = getattr(node, "_saved_indices", None)
        return isinstance(indices, Tensor) and (indices.ndim < 2 or indices.shape[0] != rows)
    return name in _OF_PARAMETERS

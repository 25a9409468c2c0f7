"""Linear layers: `addmm`, `mm`, and what `F.linear` and `matmul` make of them.

With `g` [N, out] the gradient that reaches the node and `a` [N, in] its saved input, the weight's
gradient is `g.T @ a` for a weight used as `W.t()` (`F.linear`) and `a.T @ g` for one used as it is.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

# The node types have no importable names: they are taken from nodes made once.
_LEAF = torch.zeros(1, 1, requires_grad=True)
_ADDMM: Any = type(torch.addmm(_LEAF, _LEAF, _LEAF).grad_fn)
_MM: Any = type(torch.mm(_LEAF, _LEAF).grad_fn)
_T: Any = type(_LEAF.t().grad_fn)
_ACCUMULATE: Any = type(torch.autograd.graph.get_gradient_edge(_LEAF).node)


@dataclass(frozen=True, eq=False)
class Site:
    """One node whose weight is a leaf: where a gradient can be contracted instead of propagated.

    `use` is the edge through which the weight's gradient would leave: (node, input number), and
    `carrier` the node that it enters first: the leaf's own, or that of `W.t()`.
    """

    node: Any
    leaf: Any
    carrier: Any
    use: tuple[Any, int]
    transposed: bool

    @property
    def weight(self) -> Tensor:
        """The leaf itself."""
        return self.leaf.variable

    @property
    def rows(self) -> int:
        """N, the number of rows that are contracted."""
        sizes = self.node._saved_mat1_sym_sizes if type(self.node) is _ADDMM else self.node._saved_self_sym_sizes
        return int(sizes[0])

    def raw_input(self) -> Any:
        """The saved input, not unpacked."""
        return self.node._raw_saved_mat1 if type(self.node) is _ADDMM else self.node._raw_saved_self

    def saved_input(self) -> Tensor:
        """The saved input `a`; raises, as a backward would, where it was freed or changed in place."""
        return self.node._saved_mat1 if type(self.node) is _ADDMM else self.node._saved_self

    def add_to(self, grad: Tensor, cotangent: Tensor, *, beta: float) -> None:
        """Grad = beta * grad + the weight's gradient, in place and without a temporary of its size."""
        rows = self.saved_input()
        if self.transposed:
            grad.addmm_(cotangent.t(), rows, beta=beta)
        else:
            grad.addmm_(rows.t(), cotangent, beta=beta)


def has_weight_of(roots: Iterable[Node], elements: int) -> bool:
    """Whether a matrix product with a second factor of that size or more is reachable from `roots`.

    Ends at the first. Written out rather than built on `graph.iterate`, since it stands before every
    backward of a small net: about 0.5 microseconds a node, half of that.
    """
    seen: set[Node] = set()
    pending = list(roots)
    while pending:
        node: Any = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = type(node)
        if kind is _ADDMM or kind is _MM:
            rows, columns = node._saved_mat2_sym_sizes
            if rows * columns >= elements:
                return True
        for child, _ in node.next_functions:
            if child is not None:
                pending.append(child)
    return False


def sites(nodes: list[Node]) -> Iterator[Site]:
    """Every linear layer among `nodes` whose weight is a leaf."""
    for node in nodes:
        kind: Any = type(node)
        if kind is _ADDMM:
            product: Any = node
            if product._saved_alpha != 1 or product._saved_beta != 1:
                continue
            number = 2
        elif kind is _MM:
            number = 1
        else:
            continue
        carrier: Any = node.next_functions[number][0]
        if type(carrier) is _ACCUMULATE:
            yield Site(node, carrier, carrier, (node, number), transposed=False)
        elif type(carrier) is _T and type(leaf := carrier.next_functions[0][0]) is _ACCUMULATE:
            yield Site(node, leaf, carrier, (node, number), transposed=True)

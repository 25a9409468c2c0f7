"""Linear layers: `addmm`, `mm`, and what `F.linear` and `matmul` make of them.

With `g` [N, out] the gradient that reaches the node and `a` [N, in] its saved input, the weight's
gradient is `g.T @ a` for a weight used as `W.t()` (`F.linear`) and `a.T @ g` for one used as it is.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from typing_extensions import override

from multiback.rules.site import Site, Use, pair_sums, transposed_use_of, use_of

_LEAF = torch.zeros(1, 1, requires_grad=True)
ADDMM: Any = type(torch.addmm(_LEAF, _LEAF, _LEAF).grad_fn)
MM: Any = type(torch.mm(_LEAF, _LEAF).grad_fn)
KINDS = (ADDMM.__name__, MM.__name__)


class LinearSite(Site):
    """One matrix product whose second factor is a leaf or its transpose; a unit is a row."""

    @override
    def _unit_size(self) -> int:
        return self.shape[-1]

    @property
    @override
    def raw_names(self) -> tuple[str, ...]:
        weight = any(use.role == "weight" for use in self.uses)
        return (("_raw_saved_mat1",) if type(self.node) is ADDMM else ("_raw_saved_self",)) if weight else ()

    @override
    def saved(self) -> Tensor | None:
        if not self.raw_names:
            return None
        return self.node._saved_mat1 if type(self.node) is ADDMM else self.node._saved_self

    @override
    def contract(self, use: Use, cotangent: Tensor, saved: Tensor | None, out: Tensor | None = None) -> Tensor:
        if use.role == "bias":
            return _bias(use, cotangent)
        if saved is None:
            raise AssertionError("a weight's site reads its input")
        first, second = (cotangent, saved) if use.transposed else (saved, cotangent)
        if saved.shape[0] == 1 and cotangent.shape[0] > 1:
            return _shared(use, cotangent, saved[0], out)
        if cotangent.shape[1] == 1:  # an outer product: broadcasting is quicker than a batch of matrix products
            return torch.mul(first.transpose(1, 2), second, out=out)
        return torch.bmm(first.transpose(1, 2), second, out=out)

    @override
    def gram(self, use: Use, cotangent: Tensor, saved: Tensor | None) -> Tensor:
        groups, rows, out = cotangent.shape
        if use.role == "bias" or saved is None or not _by_units(groups, rows, out, saved.shape[-1]):
            return super().gram(use, cotangent, saved)
        g, a = cotangent.reshape(groups * rows, out), saved.expand(groups, -1, -1).reshape(groups * rows, -1)
        return pair_sums((g @ g.t()) * (a @ a.t()), groups)

    @override
    def squares(self, use: Use, cotangent: Tensor, saved: Tensor | None) -> Tensor:
        _, rows, out = cotangent.shape
        if use.role == "bias" or saved is None or rows * (out + saved.shape[-1]) > 2 * out * saved.shape[-1]:
            return super().squares(use, cotangent, saved)
        if rows == 1:
            return cotangent.square().sum((1, 2)) * saved.square().sum((1, 2))
        return (torch.bmm(cotangent, cotangent.mT) * torch.matmul(saved, saved.mT)).sum((1, 2))

    @property
    def weight(self) -> Tensor:
        """The parameter of a site that `weight_sites` gave."""
        return self.uses[0].source.variable

    def add_to(self, grad: Tensor, cotangent: Tensor, *, beta: float) -> None:
        """Grad = beta * grad + the weight's gradient, in place and without a temporary of its size."""
        rows = self.node._saved_mat1 if type(self.node) is ADDMM else self.node._saved_self
        if self.uses[0].transposed:
            grad.addmm_(cotangent.t(), rows, beta=beta)
        else:
            grad.addmm_(rows.t(), cotangent, beta=beta)


def _by_units(groups: int, rows: int, out: int, inputs: int) -> bool:
    """Whether products of units cost less than forming every group's gradient and multiplying those."""
    units = groups * rows
    return units * units * (out + inputs) <= units * out * inputs + groups * groups * out * inputs


def _shared(use: Use, cotangent: Tensor, saved: Tensor, out: Tensor | None) -> Tensor:
    """All groups meet one input: one matrix product for all of them."""
    groups, rows, width = cotangent.shape
    if not use.transposed:
        return torch.bmm(saved.t().expand(groups, -1, -1), cotangent, out=out)
    flat = cotangent.transpose(1, 2).reshape(groups * width, rows)
    flat_out = None if out is None else out.view(groups * width, saved.shape[-1])
    return torch.mm(flat, saved, out=flat_out).view(groups, width, saved.shape[-1])


def _bias(use: Use, cotangent: Tensor) -> Tensor:
    """[out] or [1, out]: a sum over rows; [1]: over columns as well."""
    shape = use.shape
    summed = cotangent.sum(1)
    if shape.numel() == 1:
        summed = summed.sum(1)
    return summed.reshape(-1, *shape)


def match(node: Any) -> Site | None:
    """The site of a matrix product with a leaf as its second factor or its bias; None for other nodes."""
    kind = type(node)
    if kind is ADDMM:
        if node._saved_alpha != 1 or node._saved_beta != 1:
            return None
        number = 2
    elif kind is MM:
        number = 1
    else:
        return None
    found = []
    weight = transposed_use_of(node, number, "weight") or use_of(node, number, "weight")
    if weight is not None:
        found.append(weight)
    bias = use_of(node, 0, "bias") if kind is ADDMM else None
    # a bias that holds a value per row is no sum over rows
    if bias is not None and (len(bias.shape) < 2 or bias.shape[0] == 1):
        found.append(bias)
    return LinearSite(node, found) if found else None


def weight_sites(nodes: Iterable[Node]) -> list[LinearSite]:
    """Every matrix product among `nodes` with a leaf as its second factor, that use alone."""
    found = []
    for node in nodes:
        site = match(node)
        if isinstance(site, LinearSite) and site.uses[0].role == "weight" and site.uses[0].is_leaf:
            found.append(LinearSite(node, site.uses[:1]))
    return found


def has_weight_of(roots: Iterable[Node], elements: int) -> bool:
    """Whether a matrix product with a second factor of that size or more is reachable from `roots`.

    Ends at the first. Written out rather than built on `graph.walk`, since it stands before every
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
        if kind is ADDMM or kind is MM:
            rows, columns = node._saved_mat2_sym_sizes
            if rows * columns >= elements:
                return True
        for child, _ in node.next_functions:
            if child is not None:
                pending.append(child)
    return False

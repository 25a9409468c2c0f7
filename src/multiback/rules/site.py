"""A site: a node whose parameters' gradients follow from what it saved and the gradient that reaches it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multiback import graph

# Node types have no importable names: they are taken from nodes made once.
_LEAF = torch.zeros(1, 1, requires_grad=True)
ACCUMULATE: Any = type(torch.autograd.graph.get_gradient_edge(_LEAF).node)
TRANSPOSE: Any = type(_LEAF.t().grad_fn)
REPEAT: Any = type(_LEAF.repeat(1, 1).grad_fn)
CAST: Any = type(_LEAF.to(torch.float64).grad_fn)


@dataclass(frozen=True, eq=False)
class Use:
    """One use, by a site, of something that all its units share: a parameter, or what was made from some.

    `number` is the input of the site's node through which the gradient would leave. It belongs to
    output `output` of `source`: the leaf's own node where a leaf is used directly, as `W.t()` or by
    way of a cast (then `carriers` are the nodes in between), else whatever made the tensor.
    """

    role: str
    number: int
    source: Any
    output: int
    carriers: tuple[Any, ...]
    shape: torch.Size
    dtype: torch.dtype
    transposed: bool = False

    @property
    def is_leaf(self) -> bool:
        """Whether a leaf is used."""
        return type(self.source) is ACCUMULATE

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()


class Site(ABC):
    """One node, its parameters, and its *units*: the leading part of its output that it never mixes.

    A unit's output depends on the same unit of the saved input and on the parameters alone, so that
    a parameter's gradient is a sum over units. There are `units` of them, `unit_size` output
    elements each; both count in the output's row-major order.
    """

    copies = 2  # of its cotangent, at most, that a rule makes while it works

    def __init__(self, node: Any, uses: list[Use]) -> None:
        self.node = node
        self.uses = uses
        self.shape = tuple(int(size) for size in node._input_metadata[0].shape)
        self.unit_size = self._unit_size()
        elements = 1
        for size in self.shape:
            elements *= size
        self.units = elements // self.unit_size if self.unit_size else 0
        self.nbytes = elements * node._input_metadata[0].dtype.itemsize

    @abstractmethod
    def _unit_size(self) -> int:
        """Output elements per unit."""

    @property
    def raw_names(self) -> tuple[str, ...]:
        """The node's raw saved values that `saved` reads."""
        return ()

    @property
    def fresh_bytes(self) -> int:
        """Bytes of what `saved` makes anew."""
        return 0

    def readable(self) -> bool:
        """Whether everything that `saved` reads is there, with no saved-tensor hook before it."""
        for name in self.raw_names:
            raw = getattr(self.node, name)
            if raw.unpack_hook is not None or raw.data is None or raw.data.layout != torch.strided:
                return False
        return True

    def split(self, cotangent: Tensor) -> Tensor:
        """Leading dimensions kept, the output's own cut to [units, *rest]."""
        return cotangent.reshape(*cotangent.shape[: cotangent.ndim - len(self.shape)], self.units, *self._rest())

    def _rest(self) -> tuple[int, ...]:
        """Shape of one unit of the output."""
        return (self.unit_size,)

    def read(self) -> Tensor | None:
        """What the node saved, as [units, *rest], without its history; None where the wanted uses need nothing.

        Raises, as a backward would, where it was freed or changed in place.
        """
        with torch.no_grad():
            saved = self.saved()
            return None if saved is None else saved.detach()

    @abstractmethod
    def saved(self) -> Tensor | None:
        """The same with its history."""

    @abstractmethod
    def contract(self, use: Use, cotangent: Tensor, saved: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Gradients [G, *use.shape] of G groups of n units, from `cotangent` [G, n, ...].

        `saved` is [G, n, ...], or [1, n, ...] where all groups share it. `out` is a tensor of the
        answer's shape and dtype into which a rule may write it, and then gives it back.
        """

    def gram(self, use: Use, cotangent: Tensor, saved: Tensor | None) -> Tensor:
        """Inner products [G, G] of the groups' gradients."""
        rows = matrix(self.contract(use, cotangent, saved))
        return rows @ rows.t()

    def squares(self, use: Use, cotangent: Tensor, saved: Tensor | None) -> Tensor:
        """Squared L2 norms [G] of the groups' gradients."""
        rows = matrix(self.contract(use, cotangent, saved))
        return (rows * rows).sum(1)


def matrix(gradients: Tensor) -> Tensor:
    """[G, *shape] as [G, elements]."""
    return gradients.flatten(1) if gradients.ndim > 1 else gradients.unsqueeze(1)


def use_of(node: Any, number: int, role: str) -> Use | None:
    """The use of input `number` of `node`; None where nothing there wants a gradient that a rule can give."""
    if number >= len(node.next_functions):
        return None
    source, output = node.next_functions[number]
    if source is None:
        return None
    metadata = source._input_metadata[output]
    shape, dtype = torch.Size(metadata.shape), metadata.dtype
    carriers: tuple[Any, ...] = ()
    if type(source) is CAST and type(leaf := source.next_functions[0][0]) is ACCUMULATE:
        carriers, source, output = (source,), leaf, 0
    if not dtype.is_floating_point or (type(source) is ACCUMULATE and not _plain(source)):
        return None
    return Use(role, number, source, output, carriers, shape, dtype)


def transposed_use_of(node: Any, number: int, role: str) -> Use | None:
    """The same for a leaf that enters as `W.t()`, cast or not; its shape is the leaf's."""
    carrier = node.next_functions[number][0]
    if type(carrier) is not TRANSPOSE:
        return None
    use = use_of(carrier, 0, role)
    if use is None or not use.is_leaf:
        return None
    return Use(role, number, use.source, 0, (carrier, *use.carriers), use.shape, use.dtype, transposed=True)


def _plain(leaf: Any) -> bool:
    variable = graph.leaf_of(leaf)
    return variable is not None and variable.layout == torch.strided


def pair_sums(products: Tensor, groups: int) -> Tensor:
    """Sum [G * n, G * n] products of units to [G, G] of groups."""
    size = products.shape[0] // groups if groups else 0
    return products.reshape(groups, size, groups, size).sum((1, 3))

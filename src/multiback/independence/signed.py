"""The certificate: signed powers of two name the loss that owns each unit, bit for bit.

Scaling by a power of two is exact in floating point, and so is everything linear that follows. With
loss k weighted `s_k = +-2^e`, a unit that loss k alone touches holds exactly `s_k` times what it
holds with all weights one; a unit that several losses touch does not. The ratio names the owner.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from multiback.independence.owners import Named
from multiback.request import Request

_NARROW = range(-6, 7)  # half precision holds little more; enough for 26 losses at once
_WIDE = range(-32, 33)  # for 130


@dataclass(frozen=True)
class Watched:
    """An edge at which owners are wanted, and how its gradient is cut into units."""

    edge: GradientEdge
    units: int

    def cut(self, gradient: Tensor) -> Tensor:
        """[units, rest], real."""
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient)
        return gradient.reshape(self.units, -1)


@dataclass(frozen=True, eq=False)
class Certificate:
    """Per watched edge the owners, or None where units meet several losses; and the plain gradients."""

    owners: list[Named | None]
    gradients: list[Tensor | None]
    traversals: int


def certify(request: Request, watched: Sequence[Watched]) -> Certificate:
    """Name the owners of all units by two traversals of the kept graph, three for many losses.

    A loss that owns nothing at an edge might be half of a pair whose sum looks like another loss;
    then one more traversal with other weights must tell the same owners.
    """
    half = any(w.edge.node._input_metadata[w.edge.output_nr].dtype == torch.float16 for w in watched)
    narrow = half or request.count <= 2 * len(_NARROW)
    symbols = [sign * 2.0**exponent for exponent in (_NARROW if narrow else _WIDE) for sign in (1.0, -1.0)]
    plain = _gradients(request, watched, None)
    draws = _draws(request.count, len(symbols), seed=0)
    found, traversals = _named(request, watched, plain, symbols, draws), 1 + len(draws)
    if any(owners is not None and _orphans(owners) for owners in found):
        again = _draws(request.count, len(symbols), seed=1)
        second = _named(request, watched, plain, symbols, again)
        traversals += len(again)
        found = [
            one if one is not None and other is not None and torch.equal(one.owner, other.owner) else None
            for one, other in zip(found, second, strict=True)
        ]
    return Certificate(found, plain, traversals)


def _draws(count: int, symbols: int, *, seed: int) -> list[list[int]]:
    """For each traversal the symbol of every loss; together they tell every loss from every other."""
    digits = 1
    while symbols**digits < count:
        digits += 1
    shuffle = random.Random(seed)
    # a random set of codes, so that no arithmetic relation between neighbours is likely
    codes = shuffle.sample(range(symbols**digits), count)
    return [[code // symbols**digit % symbols for code in codes] for digit in range(digits)]


def _gradients(request: Request, watched: Sequence[Watched], weights: list[float] | None) -> list[Tensor | None]:
    scale = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    edges = [w.edge for w in watched]
    return list(torch.autograd.grad(request.root(scale), edges, retain_graph=True, allow_unused=True))


def _named(
    request: Request,
    watched: Sequence[Watched],
    plain: Sequence[Tensor | None],
    symbols: list[float],
    draws: list[list[int]],
) -> list[Named | None]:
    """One traversal per digit; every edge's units checked and named."""
    codes: list[Tensor | None] = [torch.zeros(w.units, dtype=torch.long) for w in watched]
    for place, draw in enumerate(draws):
        scaled = _gradients(request, watched, [symbols[index] for index in draw])
        for number, (w, one, other) in enumerate(zip(watched, plain, scaled, strict=True)):
            code = codes[number]
            digit = None if code is None else _digits(w, one, other, symbols)
            if code is None or digit is None:
                codes[number] = None
            else:
                codes[number] = torch.where(digit < 0, -1, code + digit * len(symbols) ** place)
    losses = {code: loss for loss, code in enumerate(_codes(draws, len(symbols)))}
    return [None if code is None else _looked_up(code, losses, request.count) for code in codes]


def _codes(draws: list[list[int]], symbols: int) -> list[int]:
    return [sum(digit * symbols**place for place, digit in enumerate(digits)) for digits in zip(*draws, strict=True)]


def _looked_up(codes: Tensor, losses: dict[int, int], count: int) -> Named | None:
    """Owners by code, -1 for units of none; None where a unit spells the code of no loss."""
    values, inverse = codes.unique(return_inverse=True)
    if any(value >= 0 and value not in losses for value in values.tolist()):
        return None
    table = torch.tensor([losses.get(value, -1) for value in values.tolist()], dtype=torch.long)
    return Named(count, table[inverse] if len(table) else codes)


def _digits(watched: Watched, plain: Tensor | None, scaled: Tensor | None, symbols: list[float]) -> Tensor | None:
    """The symbol of every unit, -1 for units that hold zeros alone; None where some unit holds no symbol."""
    if plain is None or scaled is None or not plain.numel():  # nothing arrives: no loss owns anything
        return torch.full((watched.units,), -1)
    one, other = watched.cut(plain), watched.cut(scaled)
    largest, place = one.abs().max(1, keepdim=True)
    # what leaves the range of normal numbers on its way is rounded, by less than this once scaled
    facts = torch.finfo(one.dtype)
    rounding = facts.smallest_normal * max(symbols)
    # a unit below the normal numbers beside others within has lost its digits: it counts as nothing
    empty = (largest < facts.smallest_normal).squeeze(1)
    too_small = largest.squeeze(1) * facts.eps < rounding
    ratio = torch.where(empty[:, None], 1.0, other.gather(1, place) / one.gather(1, place))
    alike = ((other - one * ratio).abs() <= rounding).all(1)
    mantissa, exponent = torch.frexp(ratio.squeeze(1).double())
    lowest = int(torch.frexp(torch.tensor(min(abs(symbol) for symbol in symbols))).exponent)
    digit = 2 * (exponent.long() - lowest) + (mantissa < 0)
    known = (mantissa.abs() == 0.5) & (digit >= 0) & (digit < len(symbols))
    # zeros that weights make something of are losses that cancel in their sum
    sound = torch.where(empty, other.abs().amax(1) <= rounding, known & alike & ~too_small)
    if not bool(sound.all()) or bool(empty.all() & (largest > 0).any()):
        return None
    return digit.masked_fill(empty, -1).cpu()


def _orphans(owners: Named) -> bool:
    """Whether some loss owns nothing although others do."""
    present = owners.owner.unique()
    owned = int((present >= 0).sum())
    return 0 < owned < owners.count

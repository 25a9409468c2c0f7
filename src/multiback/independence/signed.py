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

from multiback import traversals
from multiback.independence.owners import Named
from multiback.request import Request

_HALF = range(6)  # nothing is scaled down, where half precision would lose it
_NARROW = range(-6, 7)  # enough for 26 losses at once
_WIDE = range(-32, 33)  # for 130


@dataclass(frozen=True)
class Watched:
    """An edge at which owners are wanted, and how its gradient is cut into units."""

    edge: GradientEdge
    units: int
    site: bool

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
    """Name the owners of all units by three traversals of the kept graph: two for two losses, five for very many.

    With weights one, s and s squared, a unit of one loss holds J, s J and s^2 J. Where losses share a
    unit with gradients in proportion, the first two may look like a third loss of between them. The
    square tells: by Cauchy and Schwarz `sum c * sum c s^2 > (sum c s)^2`, for any two losses whatever
    their proportion, and for more of them as long as their shares have one sign.
    """
    half = any(w.edge.node._input_metadata[w.edge.output_nr].dtype == torch.float16 for w in watched)
    symbols = _symbols(request.count, half=half)
    plain = _gradients(request, watched, None)
    draws = _draws(request.count, len(symbols))
    found = _named(request, watched, plain, symbols, draws)
    return Certificate(found, plain, 1 + len(draws) * (1 if request.count == 2 else 2))


def _symbols(count: int, *, half: bool) -> list[float]:
    """Signed powers of two, in the order of their digits; few where half precision holds no more."""
    exponents = _HALF if half else _WIDE if len(_NARROW) < count / 2 <= len(_WIDE) else _NARROW
    return [sign * 2.0**exponent for exponent in exponents for sign in (1.0, -1.0)]


def _draws(count: int, symbols: int) -> list[list[int]]:
    """For each digit the symbol of every loss; together they tell every loss from every other."""
    digits = 1
    while symbols**digits < count:
        digits += 1
    # a random set of codes, so that no arithmetic relation between neighbours is likely
    codes = random.Random(0).sample(range(symbols**digits), count)
    return [[code // symbols**digit % symbols for code in codes] for digit in range(digits)]


def _gradients(request: Request, watched: Sequence[Watched], weights: list[float] | None) -> list[Tensor | None]:
    scale = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    nodes = [w.edge.node for w in watched if w.site]
    others = [w.edge for w in watched if not w.site]
    reached, found = traversals.reaching(request.root(scale), nodes, others, retain_graph=True)
    return [*reached, *found]


def _named(
    request: Request,
    watched: Sequence[Watched],
    plain: Sequence[Tensor | None],
    symbols: list[float],
    draws: list[list[int]],
) -> list[Named | None]:
    """Every edge's units checked and named, digit by digit."""
    codes: list[Tensor | None] = [torch.zeros(w.units, dtype=torch.long) for w in watched]
    for place, draw in enumerate(draws):
        weights = [symbols[index] for index in draw]
        scaled = _gradients(request, watched, weights)
        squared = _gradients(request, watched, [weight**2 for weight in weights]) if request.count > 2 else None
        for number, (w, one, other) in enumerate(zip(watched, plain, scaled, strict=True)):
            code = codes[number]
            digit = None if code is None else _digits(w, one, other, symbols)
            if digit is not None and squared is not None and not _squares(w, other, squared[number], digit, symbols):
                digit = None
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
    facts, rounding = torch.finfo(one.dtype), _rounding(one.dtype, symbols)
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


def _squares(
    watched: Watched, scaled: Tensor | None, squared: Tensor | None, digit: Tensor, symbols: list[float]
) -> bool:
    """Whether the squared weights bring what the named symbols say."""
    if scaled is None or squared is None or not scaled.numel():
        return True
    other, more = watched.cut(scaled), watched.cut(squared)
    ratio = torch.tensor(symbols, dtype=other.dtype, device=other.device)[digit.to(other.device)][:, None]
    wanted = torch.where((digit < 0).to(other.device)[:, None], 0.0, other * ratio)
    return bool(((more - wanted).abs() <= _rounding(other.dtype, symbols) * max(symbols)).all())


def _rounding(dtype: torch.dtype, symbols: list[float]) -> float:
    """By how much a value may be off, once scaled, that left the range of normal numbers on its way."""
    facts = torch.finfo(dtype)
    # half precision has no room to be generous in
    return facts.smallest_normal * max(symbols) * (facts.eps if dtype == torch.float16 else 1.0)

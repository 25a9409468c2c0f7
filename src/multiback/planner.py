"""Decides which method answers a request, from facts alone; no torch, no tensors, no clock."""

import re
from collections.abc import Callable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Literal

import msgspec

from multiback.errors import RecordError, RequestError

Kind = Literal["each", "rows", "gram", "norms"]
KINDS: tuple[Kind, ...] = ("each", "rows", "gram", "norms")
PLAN_SCHEMA = 1
# From here on the pages of fresh memory cost more than what is computed into them.
LARGE_BYTES = 2 << 20


class Facts(msgspec.Struct, frozen=True):
    """What the decision rests on; bytes are those of one loss unless said.

    Attributes
    ----------
    kind : what is asked; `returned` tells a whole Jacobian from an iterator, `reuse` one that reuses buffers.
    losses : number of distinct losses.
    shared_bytes, row_bytes : of one gradient of the targets that all rows share, and of those that hold rows.
    contracted_bytes : the part of `shared_bytes` whose layers have a rule.
    largest_bytes : of the largest target.
    cotangent_bytes : of the gradients that reach those layers.
    working_bytes : of what the neediest layer's rule takes while it works.
    saved_bytes : of what rules make from saved tensors, such as normalised inputs; for all losses together.
    traversal_bytes : of the gradients that one traversal may hold at once.
    partitioned : whether every loss is known to own rows of its own at every wanted layer (`all`), some or none.
    basis : how that is known.
    unbatched : operations without a batching rule, which a batched traversal would run one loss at a time.
    """

    kind: Kind
    returned: bool
    reuse: bool
    losses: int
    shared_bytes: int
    row_bytes: int
    contracted_bytes: int
    largest_bytes: int
    cotangent_bytes: int
    working_bytes: int
    saved_bytes: int
    traversal_bytes: int
    partitioned: Literal["all", "some", "none"]
    basis: str
    create_graph: bool
    python: tuple[str, ...]
    unbatched: tuple[str, ...]
    failed: dict[str, str]

    @property
    def result_bytes(self) -> int:
        """Bytes of the answer itself."""
        if self.kind == "gram":
            return 8 * self.losses**2
        if self.kind == "norms":
            return 8 * self.losses
        if not self.returned:
            return self.shared_bytes + self.row_bytes
        rows = self.row_bytes if self.kind == "rows" else self.losses * self.row_bytes
        return self.losses * self.shared_bytes + rows

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one loss's gradients."""
        return self.shared_bytes + self.row_bytes


class Offer(msgspec.Struct, frozen=True):
    """A method's word on one request: why it refuses, or what it would take with `chunk` losses at a time."""

    method: str
    refusal: str
    peak_bytes: Callable[[int], int]
    chunks: bool


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Which method answers, with which chunk, and why not the others. Prints as text; saves to and loads from JSON.

    Attributes
    ----------
    kind, losses : what was asked.
    method, chunk : what answers it, `chunk` losses at a time.
    peak_bytes : predicted peak above what was allocated at entry, the answer included; an upper bound.
    independence : how rows are known to be apart: proven, certified, assumed, coupled, unchecked.
    coupling : the first operation at which rows meet or of which nothing is known; may be empty.
    budget : bytes, where one was given.
    refused : reason by method that cannot answer, or does not fit the budget.
    others : predicted peak by method that could have answered.
    seconds : measured median by method, where the plan was tuned.
    """

    schema: int = PLAN_SCHEMA
    kind: Kind
    losses: int
    method: str
    chunk: int
    peak_bytes: int
    independence: str = "unchecked"
    coupling: str = ""
    budget: int | None = None
    refused: dict[str, str] = {}
    others: dict[str, int] = {}
    seconds: dict[str, float] = {}

    def __str__(self) -> str:
        """One line for the decision, one for each other method."""
        lines = [
            f"{self.kind} of {self.losses} losses: {self.method}, {self._pace()}, "
            f"at most about {_readable(self.peak_bytes)} above entry",
            f"  rows: {self.independence}" + (f", first coupled at {self.coupling}" if self.coupling else ""),
        ]
        if self.budget is not None:
            lines.append(f"  budget: {_readable(self.budget)}")
        for name, peak in self.others.items():
            took = f", {self.seconds[name]:.3g} s" if name in self.seconds else ""
            lines.append(f"  not {name}: about {_readable(peak)}{took}")
        lines += [f"  not {name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)

    def _pace(self) -> str:
        """How many losses are answered at a time."""
        if self.method == "partition" or (self.method != "loop" and self.chunk >= self.losses):
            return "all at once"
        return "one at a time" if self.chunk == 1 or self.method == "loop" else f"{self.chunk} at a time"

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read what `save` wrote; RecordError where it is no plan."""
        try:
            plan = msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RecordError(f"{path}: must be a plan that Plan.save wrote; {error}.") from error
        if plan.schema != PLAN_SCHEMA:
            raise RecordError(f"{path}: must be of schema {PLAN_SCHEMA}; got {plan.schema}. Tune again.")
        return plan


def preference(facts: Facts) -> list[str]:
    """All methods, best first, by the shape of the work alone, so that the same call gives the same bits.

    One traversal for all losses wins where every loss owns its rows. Whole gradients of losses that
    meet every row cost the same arithmetic by every method, so the plainest is quickest: batched
    where torch can batch every operation, else a loop. Contraction writes large gradients once,
    where they belong, and spares memory where gradients need not be held, as for norms, inner
    products and reused buffers.
    """
    loops = bool(facts.unbatched or facts.python) or facts.losses == 1
    if facts.kind in ("gram", "norms"):
        order = ["contract", "loop", "contract-batched", "batched"]
        order = order if loops else ["contract-batched", "contract", "batched", "loop"]
    elif not facts.returned:
        order = ["contract", "loop"] if facts.reuse else ["loop", "contract"]
        order += ["contract-batched", "batched"]
    elif facts.largest_bytes >= LARGE_BYTES and facts.losses > 1:
        order = ["contract", "loop", "contract-batched", "batched"]
        order = order if loops else ["contract", "contract-batched", "batched", "loop"]
    else:
        order = ["loop", "contract", "batched", "contract-batched"]
        order = order if loops else ["batched", "contract-batched", "contract", "loop"]
    return ["partition", *order] if facts.partitioned == "all" else [*order, "partition"]


def choose(
    facts: Facts, offers: Sequence[Offer], *, method: str | Plan, chunk: int | None, budget: int | None
) -> list[Plan]:
    """The plan, and the plans to go on with where it fails at run time, best first.

    `offers` come in order of preference. RequestError where a single method refuses, or where
    nothing fits the budget; the message then holds the smallest budget that would do.
    """
    if isinstance(method, Plan):
        chunk, method = chunk or method.chunk, method.method
    valid = [offer.method for offer in offers]
    if method not in ("auto", *valid):
        raise RequestError(f"method: must be one of auto, {', '.join(valid)}; got {method!r}. Choose one of these.")
    refused = {offer.method: offer.refusal for offer in offers if offer.refusal}
    if method in refused:
        raise RequestError(f'method: "{method}" must be exact; {refused[method]}. Use method="auto".')
    able = [offer for offer in offers if not offer.refusal and method in ("auto", offer.method)]
    fitting: list[tuple[Offer, int]] = []
    for offer in able:
        size = _chunk(offer, facts, chunk, budget)
        if size:
            fitting.append((offer, size))
        else:
            refused[offer.method] = f"needs {_readable(offer.peak_bytes(_least(offer, facts, chunk)))}"
    if not fitting:
        least = min(offer.peak_bytes(_least(offer, facts, chunk)) for offer in able)
        raise RequestError(
            f"budget: must hold what the request takes; got {budget} bytes, and {least} is the smallest that would do. "
            "Give that, or ask for fewer losses or tensors at a time."
        )
    return [_plan(facts, fitting[place:], refused, budget) for place in range(len(fitting))]


def _chunk(offer: Offer, facts: Facts, asked: int | None, budget: int | None) -> int:
    """Losses at a time: what was asked, else the most that fits; 0 where nothing fits."""
    size = min(asked or facts.losses, facts.losses) if offer.chunks else 1
    if facts.kind == "gram" and offer.chunks:
        return size if budget is None or offer.peak_bytes(size) <= budget else 0
    if budget is None:
        return size if asked or not offer.chunks else _comfortable(offer, facts)
    while size > 1 and asked is None and offer.peak_bytes(size) > budget:
        size = (size + 1) // 2
    return size if offer.peak_bytes(size) <= budget else 0


def _least(offer: Offer, facts: Facts, asked: int | None) -> int:
    """The smallest chunk that may be taken: inner products need all losses at once."""
    return asked or (facts.losses if facts.kind == "gram" and offer.chunks else 1)


def _comfortable(offer: Offer, facts: Facts) -> int:
    """Without a budget: norms and iterators stay near one gradient's size, whole answers near twice their own."""
    lean = facts.kind == "norms" or (facts.kind == "each" and not facts.returned)
    limit = facts.gradient_bytes * 9 // 8 if lean else 2 * facts.result_bytes + (256 << 20)
    size = facts.losses
    while size > 1 and offer.peak_bytes(size) > limit:
        size = (size + 1) // 2
    return size


def _plan(facts: Facts, fitting: list[tuple[Offer, int]], refused: dict[str, str], budget: int | None) -> Plan:
    offer, size = fitting[0]
    return Plan(
        kind=facts.kind,
        losses=facts.losses,
        method=offer.method,
        chunk=size,
        peak_bytes=offer.peak_bytes(size),
        independence=facts.basis,
        budget=budget,
        refused=refused,
        others={other.method: other.peak_bytes(its) for other, its in fitting[1:]},
    )


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def bytes_of(budget: int | str | None) -> int | None:
    """Bytes of a budget such as 1000000 or "2GiB"; RequestError where it is neither."""
    if budget is None:
        return None
    if isinstance(budget, Integral) and not isinstance(budget, bool) and budget > 0:
        return int(budget)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", budget) if isinstance(budget, str) else None
    if found is None or found[2].lower() not in _UNITS or float(found[1]) == 0:
        raise RequestError(
            f'budget: must be a positive number of bytes or a text such as "2GiB"; got {budget!r}. '
            "Units are B, KB, MB, GB, KiB, MiB and GiB."
        )
    return int(float(found[1]) * _UNITS[found[2].lower()])


def _readable(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    raise AssertionError("the last unit takes every size")

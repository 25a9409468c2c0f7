"""Methods for gradients that are returned, loss by loss: what each can answer, takes, and does."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from typing_extensions import override

from multiback.independence import Independence
from multiback.methods import failures, traversals
from multiback.methods.columns import Answer, Columns, Contraction, Spread, summed_gradients
from multiback.planner import Facts
from multiback.request import Differentiable, Request
from multiback.rules.site import Use
from multiback.survey import Cover, Pairs, Survey, edge_of


@dataclass(frozen=True, eq=False)
class Work:
    """One request with everything that is known of it."""

    survey: Survey
    independence: Independence
    last: bool = True

    @property
    def request(self) -> Request:
        """The request."""
        return self.survey.request

    @cached_property
    def frees(self) -> bool:
        """Whether the graph goes with the last traversal."""
        return self.last and not (self.request.retain_graph or self.request.create_graph)

    def keeps(self, loss: int) -> bool:
        """Whether the traversal that ends with `loss` must keep the graph; the last that visits all of it frees it."""
        return not (self.frees and loss == self.request.count and self.survey.whole)

    def ready(self, loss: int, *, freed: bool = False) -> None:
        """The traversals up to `loss` are done: free what is left after the last, unless it is to be kept."""
        if self.frees and not freed and loss == self.request.count:
            traversals.release(self.survey)


class Method(ABC):
    """One way to gradients of K losses; `columns` gives them chunk by chunk and keeps the graph."""

    name: str
    chunks = True

    @abstractmethod
    def refusal(self, facts: Facts) -> str:
        """Why this method cannot answer; empty where it can."""

    @abstractmethod
    def peak_bytes(self, facts: Facts, chunk: int) -> int:
        """Upper bound of the bytes above those at entry, the answer included."""

    @abstractmethod
    def columns(self, work: Work, numbers: list[int], chunk: int) -> Iterator[Columns]:
        """Gradients of the targets `numbers`, zeros for all others."""


def _place(work: Work, numbers: list[int], found: list[Answer]) -> list[Answer]:
    answers: list[Answer] = [None] * len(work.request.targets)
    for number, answer in zip(numbers, found, strict=True):
        answers[number] = answer
    return answers


def _ranges(count: int, chunk: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, chunk):
        yield start, min(start + chunk, count)


class Loop(Method):
    """A traversal per loss: the slow reference, right wherever torch is."""

    name = "loop"
    chunks = False

    @override
    def refusal(self, facts: Facts) -> str:
        return ""

    @override
    def peak_bytes(self, facts: Facts, chunk: int) -> int:
        held = facts.losses * facts.gradient_bytes if facts.kind == "gram" else 0
        return facts.result_bytes + held + facts.gradient_bytes + facts.traversal_bytes

    @override
    def columns(self, work: Work, numbers: list[int], chunk: int) -> Iterator[Columns]:
        for place, loss in enumerate(work.request.scalars()):
            yield self._one(work, numbers, loss, place)

    @staticmethod
    def _one(work: Work, numbers: list[int], loss: Tensor, place: int) -> Columns:
        """One loss in a frame of its own, which holds nothing once its gradients have been given away."""
        request = work.request
        edges = [request.targets[number].given for number in numbers]
        keep = work.keeps(place + 1)
        found = traversals.plain(loss, edges, retain_graph=keep, create_graph=request.create_graph)
        rows = [None if grad is None else dense(grad).unsqueeze(0) for grad in found]
        work.ready(place + 1, freed=not keep)
        return Columns(place, place + 1, request.targets, _place(work, numbers, list(rows)))


class Batched(Method):
    """A batched traversal for a chunk of losses (`is_grads_batched`)."""

    name = "batched"

    @override
    def refusal(self, facts: Facts) -> str:
        return _unbatchable(facts)

    @override
    def peak_bytes(self, facts: Facts, chunk: int) -> int:
        held = facts.losses * facts.gradient_bytes if facts.kind == "gram" else 0
        once = facts.returned and facts.kind != "rows" and chunk >= facts.losses
        mine = 0 if once else chunk * facts.gradient_bytes
        return facts.result_bytes + held + mine + chunk * facts.traversal_bytes

    @override
    def columns(self, work: Work, numbers: list[int], chunk: int) -> Iterator[Columns]:
        request = work.request
        losses = request.vector()
        for start, stop in _ranges(request.count, chunk):
            yield self._chunk(work, numbers, losses, start, stop)

    @staticmethod
    def _chunk(work: Work, numbers: list[int], losses: Tensor, start: int, stop: int) -> Columns:
        """A chunk in a frame of its own, which holds nothing once the chunk has been given away."""
        edges = [work.request.targets[number].given for number in numbers]
        keep = work.keeps(stop) or not failures.proven(work.survey)
        found = traversals.batched(losses, start, stop, edges, retain_graph=keep)
        failures.prove(work.survey)
        work.ready(stop, freed=not keep)
        return Columns(start, stop, work.request.targets, _place(work, numbers, list(found)))


def _unbatchable(facts: Facts) -> str:
    if facts.create_graph:
        return "a batched traversal makes no graph of its own"
    return facts.failed.get("batched", "")


class Contract(Method):
    """A traversal per loss up to the layers, whose parameters' gradients follow from what reached them."""

    name = "contract"

    @override
    def refusal(self, facts: Facts) -> str:
        if facts.create_graph:
            return "what it computes has no graph of its own"
        if not facts.contracted_bytes:
            return "no wanted parameter is used in layers with a rule alone"
        return ""

    @override
    def peak_bytes(self, facts: Facts, chunk: int) -> int:
        ordinary = facts.gradient_bytes - facts.contracted_bytes
        at_a_time = chunk * (facts.cotangent_bytes + facts.working_bytes + ordinary)
        return _answers(facts, chunk) + at_a_time + facts.saved_bytes + facts.traversal_bytes

    @override
    def columns(self, work: Work, numbers: list[int], chunk: int) -> Iterator[Columns]:
        losses = work.request.scalars()
        for start, stop in _ranges(work.request.count, chunk):
            yield self._chunk(work, numbers, losses, start, stop)

    @staticmethod
    def _chunk(work: Work, numbers: list[int], losses: list[Tensor], start: int, stop: int) -> Columns:
        """A chunk in a frame of its own, which holds nothing once the chunk has been given away."""
        edges, _ = _edges(work, numbers)
        found: list[Tensor | None] = [None] * len(edges)
        for place, loss in enumerate(losses[start:stop]):
            _stack(found, traversals.plain(loss, edges, retain_graph=True), place, stop - start)
        columns = _contracted(work, numbers, start, stop, found)
        work.ready(stop)
        return columns


class ContractBatched(Contract):
    """The same by a batched traversal."""

    name = "contract-batched"

    @override
    def refusal(self, facts: Facts) -> str:
        return super().refusal(facts) or _unbatchable(facts)

    @override
    def peak_bytes(self, facts: Facts, chunk: int) -> int:
        return super().peak_bytes(facts, chunk) + (chunk - 1) * facts.traversal_bytes

    @override
    def columns(self, work: Work, numbers: list[int], chunk: int) -> Iterator[Columns]:
        losses = work.request.vector()
        for start, stop in _ranges(work.request.count, chunk):
            yield self._batch(work, numbers, losses, start, stop)

    @staticmethod
    def _batch(work: Work, numbers: list[int], losses: Tensor, start: int, stop: int) -> Columns:
        edges, _ = _edges(work, numbers)
        columns = _contracted(
            work, numbers, start, stop, traversals.batched(losses, start, stop, edges, retain_graph=True)
        )
        work.ready(stop)
        return columns


def _answers(facts: Facts, chunk: int) -> int:
    """Bytes of the answer and of what is multiplied out at a time."""
    if facts.kind == "gram":
        return facts.result_bytes + facts.losses * facts.largest_bytes
    if facts.kind == "norms":
        return facts.result_bytes + chunk * facts.largest_bytes
    whole = facts.returned and chunk >= facts.losses
    return facts.result_bytes + (facts.largest_bytes if whole else chunk * facts.largest_bytes)


def _edges(work: Work, numbers: list[int]) -> tuple[list[Differentiable], list[int]]:
    """The sites' edges, then those of the targets that no rule covers."""
    ordinary = [number for number in numbers if number not in work.survey.covers]
    sites = [edge_of(site) for site in work.survey.sites]
    return [*sites, *(work.request.targets[number].given for number in ordinary)], ordinary


def _stack(found: list[Tensor | None], pieces: list[Tensor | None], place: int, count: int) -> None:
    """Put one loss's gradients at their place in `found` [count, *shape]; zeros where a loss brings none."""
    for number, piece in enumerate(pieces):
        if piece is None:
            continue
        if count == 1:
            found[number] = dense(piece).unsqueeze(0)
            continue
        stacked = found[number]
        if stacked is None:
            stacked = found[number] = piece.new_zeros((count, *piece.shape), layout=torch.strided)
        stacked[place] = dense(piece)


def _contracted(work: Work, numbers: list[int], start: int, stop: int, found: list[Tensor | None]) -> Columns:
    survey = work.survey
    cut = len(survey.sites)
    contractions = {
        site.node: Contraction(site, site.split(cotangent), site.read(), None, stop - start)
        for site, cotangent in zip(survey.sites, found[:cut], strict=True)
        if cotangent is not None
    }
    _, ordinary = _edges(work, numbers)
    answers = _place(work, ordinary, list(found[cut:]))
    _put_covered(
        work, {number: survey.covers[number] for number in numbers if number in survey.covers}, contractions, answers
    )
    return Columns(start, stop, work.request.targets, answers)


def _put_covered(
    work: Work, covers: dict[int, Cover], contractions: dict[Any, Contraction], answers: list[Answer]
) -> None:
    """Answers of targets that sites cover; what lies below a tensor made from a target is traversed now."""
    groups: dict[frozenset[Any], list[int]] = {}
    for number, cover in covers.items():
        answers[number] = _reached(cover.direct, contractions) or None
        if cover.below:
            groups.setdefault(frozenset((edge.node, edge.output_nr) for edge, _ in cover.below), []).append(number)
    for together in groups.values():
        below = [
            (edge, pairs)
            for edge, all_pairs in covers[together[0]].below
            if (pairs := _reached(all_pairs, contractions))
        ]
        seeds = [summed_gradients(pairs) for _, pairs in below]
        wanted = [work.request.targets[number].given for number in together]
        found = traversals.from_edges([edge for edge, _ in below], seeds, wanted) if below else []
        for number, gradient in zip(together, found, strict=False):
            direct = answers[number]
            if gradient is not None:
                answers[number] = gradient + summed_gradients(direct) if isinstance(direct, list) else gradient


def _reached(pairs: Pairs, contractions: dict[Any, Contraction]) -> list[tuple[Contraction, Use]]:
    return [(contractions[site.node], use) for site, use in pairs if site.node in contractions]


class Partition(Method):
    """One traversal for all losses, where each owns rows of its own at every layer."""

    name = "partition"
    chunks = False

    @override
    def refusal(self, facts: Facts) -> str:
        if facts.create_graph:
            return "what it computes has no graph of its own"
        if facts.partitioned == "none":
            return f"no wanted tensor is known to be used by rows that one loss owns each (rows: {facts.basis})"
        return ""

    @override
    def peak_bytes(self, facts: Facts, chunk: int) -> int:
        copies = 4 if facts.basis == "certified" else 1
        ordinary = facts.losses * (facts.gradient_bytes - facts.contracted_bytes)
        rest = 2 * ordinary if facts.partitioned == "some" else 0
        reaching = copies * facts.cotangent_bytes + 2 * facts.working_bytes
        return _answers(facts, 1) + reaching + facts.saved_bytes + facts.traversal_bytes + rest

    @override
    def columns(self, work: Work, numbers: list[int], chunk: int) -> Iterator[Columns]:
        request, survey, independence = work.request, work.survey, work.independence
        rows = [number for number in numbers if number in independence.rows]
        covers = {
            number: cover
            for number in numbers
            if number not in survey.rows and (cover := independence.cover(survey, number)) is not None
        }
        used = {site.node for cover in covers.values() for site, _ in cover.pairs()}
        sites = [site for site in survey.all_sites if site.node in used]
        gradients = self._reaching(work, [*map(edge_of, sites), *(request.targets[number].edge for number in rows)])
        contractions = {
            site.node: Contraction(site, site.split(g), site.read(), independence.sites[site.node], request.count)
            for site, g in zip(sites, gradients, strict=False)
            if g is not None
        }
        answers: list[Answer] = [None] * len(request.targets)
        for number, gradient in zip(rows, gradients[len(sites) :], strict=True):
            if gradient is not None:
                answers[number] = Spread(gradient, independence.rows[number], request.count)
        _put_covered(work, covers, contractions, answers)
        rest = [number for number in numbers if number not in covers and number not in rows]
        for number, answer in zip(rest, _rest(work, rest), strict=True):
            answers[number] = answer
        work.ready(request.count)
        yield Columns(0, request.count, request.targets, answers)

    @staticmethod
    def _reaching(work: Work, edges: list[GradientEdge]) -> list[Tensor | None]:
        """What one plain traversal brings to each edge; the certificate's, where there was one."""
        known = work.independence.gradients
        if known is not None:
            return [known[edge.node, edge.output_nr] for edge in edges]
        return traversals.plain(work.request.root(), edges, retain_graph=True)

    @staticmethod
    def covers(work: Work, number: int) -> bool:
        """Whether every use of the target is known to be by rows that one loss owns each."""
        if number in work.survey.rows:
            return number in work.independence.rows
        return work.independence.cover(work.survey, number) is not None


def _rest(work: Work, numbers: list[int]) -> list[Answer]:
    """Targets whose rows are not apart, loss by loss."""
    if not numbers:
        return []
    pieces = list(Loop().columns(replace(work, last=False), numbers, 1))
    return [torch.cat([piece.gradients(number) for piece in pieces]) for number in numbers]


def dense(gradient: Tensor) -> Tensor:
    """A sparse gradient as a dense one."""
    return gradient.to_dense() if gradient.layout != torch.strided else gradient


METHODS: dict[str, Method] = {
    method.name: method for method in (Partition(), ContractBatched(), Contract(), Batched(), Loop())
}

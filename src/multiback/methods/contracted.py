"""Traversals up to the layers alone, whose parameters' gradients follow from what reached them."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from typing_extensions import override

from multiback import traversals
from multiback.arguments import Differentiable
from multiback.methods import failures, pages
from multiback.methods.base import Method, Work, dense, placed, ranges
from multiback.methods.columns import Answer, Columns, Contraction, summed_gradients
from multiback.methods.plain import unbatchable
from multiback.planner import Facts
from multiback.rules.site import Use
from multiback.survey import Cover, Pairs

Saved = dict[Node, Tensor | None]


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
        return answer_bytes(facts, chunk) + at_a_time + facts.saved_bytes + facts.traversal_bytes

    @override
    def columns(self, work: Work, numbers: list[int], chunk: int) -> Iterator[Columns]:
        losses, saved = work.request.scalars(), _read(work)
        for start, stop in ranges(work.request.count, chunk):
            yield self._chunk(work, numbers, losses, (start, stop), saved)

    @staticmethod
    def _chunk(work: Work, numbers: list[int], losses: list[Tensor], chunk: tuple[int, int], saved: Saved) -> Columns:
        """A chunk in a frame of its own, which holds nothing once the chunk has been given away."""
        start, stop = chunk
        nodes, given, _ = _wanted(work, numbers)
        found: list[Tensor | None] = [None] * (len(nodes) + len(given))
        keep = True
        for place, loss in enumerate(losses[start:stop]):
            keep = work.keeps(start + place + 1) or work.below(numbers)
            reached, others = traversals.reaching(loss, nodes, given, retain_graph=keep)
            _stack(found, [*reached, *others], place, stop - start)
        columns = _contracted(work, numbers, chunk, found, saved)
        work.ready(stop, kept=keep)
        return columns


class ContractBatched(Contract):
    """The same by a batched traversal."""

    name = "contract-batched"

    @override
    def refusal(self, facts: Facts) -> str:
        return super().refusal(facts) or unbatchable(facts)

    @override
    def peak_bytes(self, facts: Facts, chunk: int) -> int:
        return super().peak_bytes(facts, chunk) + (chunk - 1) * facts.traversal_bytes

    @override
    def columns(self, work: Work, numbers: list[int], chunk: int) -> Iterator[Columns]:
        losses, saved = work.request.vector(), _read(work)
        for start, stop in ranges(work.request.count, chunk):
            yield self._batch(work, numbers, losses, (start, stop), saved)

    @staticmethod
    def _batch(work: Work, numbers: list[int], losses: Tensor, chunk: tuple[int, int], saved: Saved) -> Columns:
        start, stop = chunk
        nodes, given, _ = _wanted(work, numbers)
        keep = work.keeps(stop) or not failures.proven(work.survey) or work.below(numbers)
        reached, others = traversals.reaching_batched(losses, start, stop, nodes, given, retain_graph=keep)
        failures.prove(work.survey)
        columns = _contracted(work, numbers, chunk, [*reached, *others], saved)
        work.ready(stop, kept=keep)
        return columns


def answer_bytes(facts: Facts, chunk: int) -> int:
    """Bytes of the answer and of what is multiplied out at a time."""
    if facts.kind == "gram":
        return facts.result_bytes + facts.losses * facts.largest_bytes
    if facts.kind == "norms":
        return facts.result_bytes + chunk * facts.largest_bytes
    whole = facts.returned and chunk >= facts.losses
    return facts.result_bytes + (facts.largest_bytes if whole else chunk * facts.largest_bytes)


def _wanted(work: Work, numbers: list[int]) -> tuple[list[Node], list[Differentiable], list[int]]:
    """The sites' nodes, and the targets that no rule covers with their numbers."""
    ordinary = [number for number in numbers if number not in work.survey.covers]
    return [site.node for site in work.survey.sites], [work.request.targets[n].given for n in ordinary], ordinary


def _read(work: Work) -> Saved:
    """What the sites saved, read once and before a traversal frees it."""
    return {site.node: site.read() for site in work.survey.sites}


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
            stacked = found[number] = pages.fresh((count, *piece.shape), piece.dtype, piece.device).zero_()
        stacked[place] = dense(piece)


def _contracted(
    work: Work,
    numbers: list[int],
    losses: tuple[int, int],
    found: list[Tensor | None],
    saved: Saved,
) -> Columns:
    """Columns of a chunk of losses from what reached the sites, [c, ...] each."""
    survey = work.survey
    cut = len(survey.sites)
    contractions = {
        site.node: Contraction(site, site.split(cotangent), saved[site.node], None, losses[1] - losses[0])
        for site, cotangent in zip(survey.sites, found[:cut], strict=True)
        if cotangent is not None
    }
    _, _, ordinary = _wanted(work, numbers)
    answers = placed(work, ordinary, list(found[cut:]))
    put_covered(work, {n: survey.covers[n] for n in numbers if n in survey.covers}, contractions, answers)
    return Columns(*losses, work.request.targets, answers)


def put_covered(
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

"""One traversal for all losses, where each owns rows of its own at every layer."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from multiback import traversals
from multiback.methods.base import Method, Work
from multiback.methods.columns import Answer, Columns, Contraction, Spread
from multiback.methods.contracted import answer_bytes, put_covered
from multiback.methods.plain import Loop
from multiback.planner import Facts
from multiback.rules.site import Site


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
        return answer_bytes(facts, 1) + reaching + facts.saved_bytes + facts.traversal_bytes + rest

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
        rest = [number for number in numbers if number not in covers and number not in rows]
        saved = [site.read() for site in sites]
        reached, gradients = self._reaching(work, sites, rows, keep=bool(rest) or work.below(numbers))
        contractions = {
            site.node: Contraction(site, site.split(g), own, independence.sites[site.node], request.count)
            for site, g, own in zip(sites, reached, saved, strict=True)
            if g is not None
        }
        answers: list[Answer] = [None] * len(request.targets)
        for number, gradient in zip(rows, gradients, strict=True):
            if gradient is not None:
                answers[number] = Spread(gradient, independence.rows[number], request.count)
        put_covered(work, covers, contractions, answers)
        for number, answer in zip(rest, _rest(work, rest), strict=True):
            answers[number] = answer
        work.ready(request.count, kept=True)
        yield Columns(0, request.count, request.targets, answers)

    @staticmethod
    def _reaching(
        work: Work, sites: list[Site], rows: list[int], *, keep: bool
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """What one plain traversal brings to the sites and to row targets; the certificate's, where there was one."""
        known = work.independence.gradients
        targets = work.request.targets
        if known is not None:
            edges = [targets[number].edge for number in rows]
            return [known[site.node, 0] for site in sites], [known[edge.node, edge.output_nr] for edge in edges]
        keep = keep or work.keeps(work.request.count)
        given = [targets[number].given for number in rows]
        return traversals.reaching(work.request.root(), [site.node for site in sites], given, retain_graph=keep)

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

"""Which losses own which rows: proven by a walk where possible, certified by traversals otherwise."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from multiback.errors import RequestError
from multiback.independence.locality import Locality, prove
from multiback.independence.operations import HANDLERS
from multiback.independence.owners import Cyclic, Named, Owners
from multiback.independence.signed import Watched, certify
from multiback.independence.slices import common_slice
from multiback.survey import Cover, Survey, edge_of

Mode = Literal["certify", "assume", "off"]
Traverse = Literal["always", "likely", "never"]
Basis = Literal["proven", "proven in part", "certified", "assumed", "coupled", "unchecked"]


@dataclass(frozen=True, eq=False)
class Independence:
    """Owners at every site's edge and every row target; whatever is missing holds no rows apart.

    Attributes
    ----------
    basis : how it was found out.
    sites : owners by the site's node.
    rows : owners by the number of the target whose dimension 0 holds rows.
    gradients : what the certificate's plain traversal brought to each edge; None where none ran.
    coupling : the first operation at which rows meet or of which nothing is known; may be empty.
    traversals : how many were run.
    """

    basis: Basis
    sites: dict[Node, Owners]
    rows: dict[int, Owners]
    gradients: dict[tuple[Node, int], Tensor | None] | None
    coupling: str
    traversals: int

    def cover(self, survey: Survey, number: int) -> Cover | None:
        """The cover of a target all of whose sites hold rows apart; None where there is none."""
        for cover in (survey.covers.get(number), survey.spares.get(number)):
            if cover is not None and all(site.node in self.sites for site, _ in cover.pairs()):
                return cover
        return None


def assess(survey: Survey, mode: Mode, traverse: Traverse) -> Independence:
    """Find the owners at all edges that the request needs.

    `assume` walks as well, and believes of operations that it does not know that they keep rows where
    they are; what a shared path leads to is left out. `certify`
    walks first; `traverse` says whether it runs traversals, of the kept graph, where the walk does
    not prove everything: always, only where the losses look like parts of a batch, or never.
    """
    if mode == "off":
        return Independence("unchecked", {}, {}, None, "", 0)
    if survey.request.count == 1:
        return _single(survey)
    locality = _walk(survey, assume=mode == "assume")
    if mode == "assume":
        return _assumed(survey, locality)
    if locality is not None and locality.dense and traverse != "always":
        return Independence("unchecked", {}, {}, None, "", 0)
    return _proven_or_certified(survey, locality, traverse)


def _proven_or_certified(survey: Survey, locality: Locality | None, traverse: Traverse) -> Independence:
    if not (survey.covers or survey.spares or survey.rows):
        coupling = "" if locality is None else _coupling(survey, locality)
        return Independence("coupled" if mixes_rows(coupling) else "unchecked", {}, {}, None, coupling, 0)
    proven = None if locality is None else _proven(survey, locality)
    if proven is not None and _covers(proven, survey):
        return proven
    if traverse == "always" or (traverse == "likely" and _likely(survey, locality)):
        return _certified(survey, locality)
    coupling = "" if locality is None else locality.coupling
    basis = "unchecked" if proven is None or not (proven.sites or proven.rows) else "proven in part"
    return Independence(basis, proven.sites if proven else {}, proven.rows if proven else {}, None, coupling, 0)


_SLICES = ("SliceBackward", "SelectBackward", "IndexBackward", "SplitBackward", "UnbindBackward", "GatherBackward")


def _likely(survey: Survey, locality: Locality | None) -> bool:
    """Whether a traversal may find owners: losses that look like slices, or an operation the walk does not know."""
    if locality is not None:
        name = locality.coupling
        stacked = name.startswith(("Stack", "Cat"))
        return stacked or (bool(name) and not name.endswith("mode") and name.rstrip("0123456789") not in HANDLERS)
    return all(_looks_sliced(get_gradient_edge(loss).node) for loss in survey.request.losses[:8])


def _looks_sliced(node: Node, within: int = 12) -> bool:
    """Whether an operation that takes a part of a tensor is near a loss."""
    return any(found.name().startswith(_SLICES) for found in islice(_breadth_first(node), within))


def _breadth_first(node: Node) -> Iterator[Node]:
    waiting, seen = deque([node]), {node}
    while waiting:
        node = waiting.popleft()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)


def _covers(found: Independence, survey: Survey) -> bool:
    """Whether every target that has a cover, or may hold rows, is known to be used by rows that are apart."""
    numbers = survey.covers.keys() | survey.spares.keys()
    return all(found.cover(survey, number) is not None for number in numbers) and all(
        number in found.rows for number in survey.rows
    )


def _walk(survey: Survey, *, assume: bool) -> Locality | None:
    """The static proof; it needs one tensor that holds all losses, or of which they are slices."""
    losses, count = survey.request.losses, survey.request.count
    if len(losses) == 1:
        edge = get_gradient_edge(losses[0])
        return prove(edge.node, edge.output_nr, count, assume=assume)
    found = common_slice(losses)
    return None if found is None else prove(found[0], found[1], count, inner=found[2], assume=assume)


def _proven(survey: Survey, locality: Locality) -> Independence:
    count = survey.request.count
    sites: dict[Node, Owners] = {}
    for site in survey.all_sites:
        inner = locality.inner(site.node)
        if inner is not None and inner % site.unit_size == 0:
            sites[site.node] = Cyclic(count, inner // site.unit_size, site.units)
    rows: dict[int, Owners] = {}
    for number in survey.rows:
        target = survey.request.targets[number]
        edge = target.edge
        inner = locality.inner(edge.node, edge.output_nr)
        size = _row_size(target.shape)
        if inner is not None and size and inner % size == 0:
            rows[number] = Cyclic(count, inner // size, target.shape[0])
    return Independence("proven", sites, rows, None, locality.coupling, 0)


def _row_size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape[1:]:
        size *= extent
    return size


def _single(survey: Survey) -> Independence:
    """One loss owns everything."""
    sites: dict[Node, Owners] = {site.node: Cyclic(1, site.units, site.units) for site in survey.all_sites}
    sizes = {number: survey.request.targets[number].shape[0] for number in survey.rows}
    rows: dict[int, Owners] = {number: Cyclic(1, size, size) for number, size in sizes.items()}
    return Independence("proven", sites, rows, None, "", 0)


def _assumed(survey: Survey, locality: Locality | None) -> Independence:
    if locality is None:
        raise RequestError(
            f'independence: "assume" must have all losses in one tensor, or as equal slices of one in order; got '
            f'{len(survey.request.losses)} tensors. Compute them with reduction="none", or use "certify".'
        )
    found = _proven(survey, locality)
    return Independence("assumed", found.sites, found.rows, None, "", 0)


def _certified(survey: Survey, locality: Locality | None) -> Independence:
    request = survey.request
    watched = [Watched(edge_of(site), site.units, site=True) for site in survey.all_sites]
    numbers = survey.rows
    watched += [Watched(request.targets[n].edge, request.targets[n].shape[0], site=False) for n in numbers]
    if not watched:
        return Independence("unchecked", {}, {}, None, "", 0)
    found = certify(request, watched)
    cut = len(survey.all_sites)
    sites: dict[Node, Owners] = {
        site.node: owners
        for site, owners in zip(survey.all_sites, found.owners[:cut], strict=True)
        if owners is not None
    }
    rows: dict[int, Owners] = {
        number: owners for number, owners in zip(numbers, found.owners[cut:], strict=True) if owners is not None
    }
    gradients = {_place(w.edge): gradient for w, gradient in zip(watched, found.gradients, strict=True)}
    certified = Independence("certified", sites, rows, gradients, "", found.traversals)
    if _covers(certified, survey):
        return certified
    return replace(certified, basis="coupled", coupling=_coupling(survey, locality))


def _place(edge: GradientEdge) -> tuple[Node, int]:
    return edge.node, edge.output_nr


def mixes_rows(coupling: str) -> bool:
    """Whether an operation, named as a coupling, is known to mix rows, and not merely unknown."""
    return coupling.split(",", maxsplit=1)[0].rstrip("0123456789") in HANDLERS


def _coupling(survey: Survey, locality: Locality | None) -> str:
    """The first operation at which rows meet or of which nothing is known; may be empty."""
    found = "" if locality is None else locality.coupling
    for node in survey.nodes:
        name = node.name()
        if "BatchNorm" in name and name == (found or name) and getattr(node, "_saved_training", False):
            return f"{name}, a batch norm in train mode"
    return found


__all__ = ["Cyclic", "Independence", "Mode", "Named", "Owners", "Traverse", "assess", "mixes_rows"]

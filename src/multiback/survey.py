"""What a request's graph offers: which targets follow from what reaches layers with a rule, and which do not."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from multiback import graph, rules
from multiback.errors import RequestError
from multiback.request import Request
from multiback.rules.site import Site, Use

Pairs = list[tuple[Site, Use]]
InEdges = dict[Node, list[tuple[Node | None, int]]]

# Beyond, what lies between a parameter and the layers that use it is no re-parametrisation but a net.
_MOST_NODES_BETWEEN = 24
_DEEPEST = 12


@dataclass(frozen=True, eq=False)
class Cover:
    """All ways by which gradient reaches one target.

    `direct` holds the uses of the target itself by sites. `below` holds the uses of tensors made
    from it (a normalised weight, a looked-up position), with the edge at which each was made.
    """

    direct: Pairs
    below: list[tuple[GradientEdge, Pairs]]

    def pairs(self) -> Pairs:
        """Every use."""
        return [*self.direct, *(pair for _, pairs in self.below for pair in pairs)]


@dataclass(frozen=True, eq=False)
class Survey:
    """One walk's findings.

    Attributes
    ----------
    nodes : every node reachable from the losses.
    reached : numbers of the targets that a loss reaches.
    covers : by number, the targets all of whose gradient comes through sites.
    sites : the sites of `covers`, each with the wanted uses only.
    rows : numbers of the targets whose dimension 0 holds, or may hold, the batch's rows.
    python : names of nodes whose backward is Python code (custom functions, checkpoints, compiled parts).
    """

    request: Request
    nodes: list[Node]
    reached: frozenset[int]
    covers: dict[int, Cover]
    sites: list[Site]
    rows: list[int]
    python: tuple[str, ...]


def survey(request: Request) -> Survey:
    """Walk the graph once; a few microseconds a node, no traversal. RequestError where torch allows only `backward`."""
    roots = graph.roots_of(request.losses)
    nodes = graph.walk(roots)
    present = set(nodes)
    reached = frozenset(n for n, target in enumerate(request.targets) if target.edge.node in present)
    python = tuple(dict.fromkeys(node.name() for node in nodes if isinstance(node, BackwardCFunction)))
    if any(name.startswith("CheckpointFunctionBackward") for name in python):
        raise RequestError(
            "losses: must have a graph that can be traversed for chosen tensors; got one with a reentrantly "
            "checkpointed segment, which only backward() passes. Checkpoint with use_reentrant=False, or use "
            "mb.backward."
        )
    covers, sites = _covers(request, nodes, roots, reached)
    rows = [
        number
        for number in sorted(reached)
        if request.targets[number].rows or (request.targets[number].data and number not in covers)
    ]
    return Survey(request, nodes, reached, covers, sites, rows, python)


def _covers(
    request: Request, nodes: list[Node], roots: list[Node], reached: Iterable[int]
) -> tuple[dict[int, Cover], list[Site]]:
    """The targets that are covered, and their sites."""
    upward = _Upward(nodes, roots)
    covers: dict[int, Cover] = {}
    known: dict[Any, Cover | None] = {}
    for number in sorted(reached):
        target = request.targets[number]
        leaf = target.edge.node
        if target.rows or target.hooked or target.dtype.is_complex or graph.leaf_of(leaf) is None:
            continue
        if leaf not in known:  # the same tensor named twice in wrt is answered twice
            known[leaf] = upward.cover(leaf)
        cover = known[leaf]
        if cover is not None:
            covers[number] = cover
    wanted: dict[Any, list[Use]] = {}
    for cover in covers.values():
        for site, use in cover.pairs():
            uses = wanted.setdefault(site.node, [])
            if use not in uses:
                uses.append(use)
    narrowed: dict[Any, Site] = {}
    for site in upward.sites.values():
        uses = wanted.get(site.node)
        if uses is not None:
            narrowed[site.node] = site if len(uses) == len(site.uses) else type(site)(site.node, uses)
    found = {number: _with(cover, narrowed) for number, cover in covers.items()}
    readable = {node for node, site in narrowed.items() if site.units and site.readable()}
    found = {n: cover for n, cover in found.items() if all(site.node in readable for site, _ in cover.pairs())}
    used = {site.node for cover in found.values() for site, _ in cover.pairs()}
    return found, [site for node, site in narrowed.items() if node in used]


def _with(cover: Cover, sites: dict[Any, Site]) -> Cover:
    """The cover by the narrowed sites."""
    return Cover(
        [(sites[site.node], use) for site, use in cover.direct],
        [(edge, [(sites[site.node], use) for site, use in pairs]) for edge, pairs in cover.below],
    )


class _Upward:
    """Looks from a leaf towards the losses for the sites through which its gradient comes."""

    def __init__(self, nodes: list[Node], roots: list[Node]) -> None:
        self._into: InEdges = graph.edges_into(nodes, roots)
        self.sites: dict[Any, Site] = {site.node: site for site in rules.sites(nodes)}
        self._slots: dict[tuple[Any, int], tuple[Site, Use]] = {
            (site.node, use.number): (site, use) for site in self.sites.values() for use in site.uses
        }
        self._shared: dict[Any, bool] = {}

    def cover(self, leaf: Any) -> Cover | None:
        """How the leaf is covered; None where some of its gradient comes past every site."""
        direct: Pairs = []
        below: dict[tuple[Any, int], Pairs] = {}
        waiting, seen = [leaf], {leaf}
        while waiting:
            node = waiting.pop()
            for consumer, number in self._into[node]:
                if consumer is None:
                    return None
                slot = self._slots.get((consumer, number))
                if slot is not None and not self._is_shared(consumer):
                    if slot[1].source is leaf:
                        direct.append(slot)
                    else:
                        below.setdefault(consumer.next_functions[number], []).append(slot)
                elif consumer not in seen:
                    if len(seen) > _MOST_NODES_BETWEEN:
                        return None
                    seen.add(consumer)
                    waiting.append(consumer)
        return Cover(direct, [(GradientEdge(*place), pairs) for place, pairs in below.items()])

    def _is_shared(self, node: Any, depth: int = 0) -> bool:
        """Whether a node's output is used as sites use parameters, and nowhere else."""
        known = self._shared.get(node)
        if known is not None:
            return known
        self._shared[node] = False  # not while it is being looked at
        found = depth < _DEEPEST and all(
            consumer is not None and ((consumer, number) in self._slots or self._is_shared(consumer, depth + 1))
            for consumer, number in self._into[node]
        )
        self._shared[node] = found
        return found


def edge_of(site: Site) -> GradientEdge:
    """The edge at which the gradient reaches a site."""
    return GradientEdge(site.node, 0)


def all_uses(leaf: Any, pairs: Pairs, into: InEdges) -> bool:
    """Whether every edge into the leaf comes from one of the sites, directly or by way of carriers of its own."""
    uses = {(site.node, use.number) for site, use in pairs}
    carriers = {carrier for _, use in pairs for carrier in use.carriers}
    edges = [edge for node in (leaf, *carriers) for edge in into[node] if edge[0] not in carriers]
    return all(edge in uses for edge in edges)

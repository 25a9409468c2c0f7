"""What a request's graph offers: which targets follow from what reaches layers with a rule, and which do not."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from multiback import graph, rules
from multiback.arguments import Differentiable
from multiback.errors import RequestError
from multiback.request import Request
from multiback.rules.site import ACCUMULATE, CAST, REPEAT, TRANSPOSE, Site, Use

Pairs = list[tuple[Site, Use]]
InEdges = dict[Node, list[tuple[Node | None, int]]]

# Beyond these, what lies between a parameter and the layers that use it is no re-parametrisation but a net.
CARRIERS = (TRANSPOSE, CAST, REPEAT)
_MOST_NODES_BELOW = 1000
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
    """One walk's findings; what takes longer is looked for when it is asked for.

    Attributes
    ----------
    nodes : every node reachable from the losses.
    leaves : the leaves among what they lead to, with their nodes, by the leaf's `id`.
    places : for every target that a loss reaches, the node at which its gradient arrives.
    python : names of nodes whose backward is Python code (custom functions, checkpoints, compiled parts).
    """

    request: Request
    nodes: list[Node]
    leaves: dict[int, tuple[Tensor, Node]]
    places: dict[int, Node]
    python: tuple[str, ...]

    @property
    def reached(self) -> list[int]:
        """Numbers of the targets that a loss reaches, in order."""
        return list(self.places)

    @property
    def all_leaves(self) -> bool:
        """Whether every leaf is a target, so that a traversal from all losses visits every node."""
        ends = {node for number, node in self.places.items() if id(self.request.targets[number].given) in self.leaves}
        return len(ends) == len(self.leaves)

    @property
    def whole(self) -> bool:
        """Whether a traversal from any one loss visits every node, and so frees all of the graph."""
        return len(self.request.losses) == 1 and self.all_leaves

    @cached_property
    def _found(self) -> "_Found":
        return _find(self)

    @property
    def covers(self) -> dict[int, Cover]:
        """By number, the targets all of whose gradient comes through sites."""
        return self._found.covers

    @property
    def spares(self) -> dict[int, Cover]:
        """Another cover for targets that all rows use by way of something made from them alone."""
        return self._found.spares

    @property
    def sites(self) -> list[Site]:
        """The sites of `covers`, each with the wanted uses only."""
        return self._found.sites

    @property
    def all_sites(self) -> list[Site]:
        """Those, and the ones that only `spares` need."""
        return self._found.all_sites

    @cached_property
    def rows(self) -> list[int]:
        """Numbers of the targets whose dimension 0 holds, or may hold, the batch's rows."""
        targets = self.request.targets
        return [n for n in self.places if targets[n].rows or (targets[n].data and n not in self.covers)]


REENTRANT = (
    "losses: must have a graph that can be traversed for chosen tensors; got one with a reentrantly checkpointed "
    "segment, which only backward() passes. Checkpoint with use_reentrant=False, or use mb.backward."
)


def has_reentrant(names: Iterable[str]) -> bool:
    """Whether a segment was checkpointed with `use_reentrant=True`, by the names of the nodes."""
    return any(name.startswith("CheckpointFunctionBackward") for name in names)


def survey(request: Request) -> Survey:
    """Walk the graph once; a microsecond a node, no traversal. RequestError where torch allows only `backward`."""
    nodes = graph.walk(graph.roots_of(request.losses))
    present = set(nodes)
    leaves: dict[int, tuple[Tensor, Node]] = {}
    python: dict[str, None] = {}
    for node in nodes:
        leaf = node.variable if type(node) is ACCUMULATE else None
        if leaf is not None:
            leaves[id(leaf)] = leaf, node
        elif isinstance(node, BackwardCFunction):
            python[node.name()] = None
    if has_reentrant(python):
        raise RequestError(REENTRANT)
    places: dict[int, Node] = {}
    for number, target in enumerate(request.targets):
        known = leaves.get(id(target.given))
        node = known[1] if known is not None else _inner(target.given)
        if node is not None and node in present:
            places[number] = node
    return Survey(request, nodes, leaves, places, tuple(python))


def _inner(given: Differentiable) -> Node | None:
    return given.node if isinstance(given, GradientEdge) else given.grad_fn


@dataclass(frozen=True, eq=False)
class _Found:
    covers: dict[int, Cover]
    spares: dict[int, Cover]
    sites: list[Site]
    all_sites: list[Site]


def _find(survey: Survey) -> _Found:
    """Covers of the targets that are plain leaves, and the sites they need."""
    upward = _Upward(survey.nodes, graph.roots_of(survey.request.losses))
    covers: dict[int, Cover] = {}
    spares: dict[int, Cover] = {}
    known: dict[Node, tuple[Cover | None, Cover | None]] = {}
    for number, leaf in survey.places.items():
        target = survey.request.targets[number]
        if target.rows or target.hooked or target.dtype.is_complex or type(leaf) is not ACCUMULATE:
            continue
        if leaf not in known:  # the same tensor named twice in wrt is answered twice
            known[leaf] = upward.covers(leaf)
        for cover, kept in zip(known[leaf], (covers, spares), strict=True):
            if cover is not None:
                kept[number] = cover
    narrowed = _narrowed(upward.sites, [*covers.values(), *spares.values()])
    covers, spares = _readable(covers, narrowed), _readable(spares, narrowed)
    used = {site.node for cover in covers.values() for site, _ in cover.pairs()}
    spare = used | {site.node for cover in spares.values() for site, _ in cover.pairs()}
    sites = [site for node, site in narrowed.items() if node in used]
    return _Found(covers, spares, sites, [site for node, site in narrowed.items() if node in spare])


def _narrowed(sites: dict[Any, Site], covers: list[Cover]) -> dict[Any, Site]:
    """The sites that covers need, each with the uses that they need."""
    wanted: dict[Any, list[Use]] = {}
    for cover in covers:
        for site, use in cover.pairs():
            uses = wanted.setdefault(site.node, [])
            if use not in uses:
                uses.append(use)
    return {
        node: sites[node] if len(uses) == len(sites[node].uses) else type(sites[node])(node, uses)
        for node, uses in wanted.items()
    }


def _readable(covers: dict[int, Cover], sites: dict[Any, Site]) -> dict[int, Cover]:
    """The covers by narrowed sites, of which everything can be read."""
    readable = {node for node, site in sites.items() if site.units and site.readable()}
    return {
        number: _with(cover, sites)
        for number, cover in covers.items()
        if all(site.node in readable for site, _ in cover.pairs())
    }


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

    def covers(self, leaf: Any) -> tuple[Cover | None, Cover | None]:
        """How the leaf is covered, and how else where rows share what is made from it; None where it is not."""
        direct = self._direct(leaf)
        if direct is None:
            return self._by_way_of_others(leaf), None
        shared = any(self._is_shared(site.node) for site, _ in direct.direct)
        return direct, self._by_way_of_others(leaf) if shared else None

    def _direct(self, leaf: Any) -> Cover | None:
        """The cover by sites that use the leaf itself."""
        found: Pairs = []
        waiting = [leaf]
        while waiting:
            for consumer, number in self._into[waiting.pop()]:
                slot = self._slots.get((consumer, number))
                if slot is not None and slot[1].source is leaf:
                    found.append(slot)
                elif consumer is not None and type(consumer) in CARRIERS:
                    waiting.append(consumer)
                else:
                    return None
        return Cover(found, [])

    def _by_way_of_others(self, leaf: Any) -> Cover | None:
        """The cover that goes past whatever rows share; None where some gradient comes past every site."""
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
        used = {site.node for pairs in (direct, *below.values()) for site, _ in pairs}
        if _leads_to(below, used):
            return None  # what comes by that site would be counted again from above
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


def _leads_to(places: Iterable[tuple[Any, int]], sites: set[Any]) -> bool:
    """Whether a traversal from any of the edges passes one of the sites; also where it would pass very many nodes."""
    waiting = [node for node, _ in places]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node in sites or len(seen) > _MOST_NODES_BELOW:
            return True
        fresh = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= fresh
        waiting.extend(fresh)
    return False


def edge_of(site: Site) -> GradientEdge:
    """The edge at which the gradient reaches a site."""
    return GradientEdge(site.node, 0)


def all_uses(leaf: Any, pairs: Pairs, into: InEdges) -> bool:
    """Whether every edge into the leaf comes from one of the sites, directly or by way of carriers of its own."""
    uses = {(site.node, use.number) for site, use in pairs}
    carriers = {carrier for _, use in pairs for carrier in use.carriers}
    edges = [edge for node in (leaf, *carriers) for edge in into[node] if edge[0] not in carriers]
    return all(edge in uses for edge in edges)

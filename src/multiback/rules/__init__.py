"""How a parameter's gradient follows from what its layer saved and the gradient that reaches it; a file per family."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.autograd.graph import Node

from multiback.rules import convolution, elementwise, embedding, linear, norms
from multiback.rules.site import Site

# By the name of the node's type: to have the types themselves, operations would have to be run at import,
# and some start threads, which a process that forks afterwards would miss.
_MATCHES: dict[str, Callable[[Any], Site | None]] = {
    kind: family.match for family in (linear, convolution, norms, embedding, elementwise) for kind in family.KINDS
}


def sites(nodes: Iterable[Node]) -> list[Site]:
    """Every site among `nodes`."""
    found: list[Site] = []
    for node in nodes:
        match = _MATCHES.get(type(node).__name__)
        site = None if match is None else match(node)
        if site is not None:
            found.append(site)
    return found

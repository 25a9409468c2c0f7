"""How a parameter's gradient follows from what its layer saved and the gradient that reaches it; a file per family."""

from collections.abc import Iterable

from torch.autograd.graph import Node

from multiback.rules import convolution, elementwise, embedding, linear, norms
from multiback.rules.site import Site

FAMILIES = (linear, convolution, norms, embedding, elementwise)


def sites(nodes: Iterable[Node]) -> list[Site]:
    """Every site among `nodes`."""
    found: list[Site] = []
    for node in nodes:
        for family in FAMILIES:
            site = family.match(node)
            if site is not None:
                found.append(site)
                break
    return found

"""Batched traversals that failed in this process, by what their graphs are made of: plans name the operation."""

import re

from multiback.survey import Survey

_KNOWN: dict[frozenset[str], str] = {}
_PROVEN: set[frozenset[str]] = set()


def _made_of(survey: Survey) -> frozenset[str]:
    kinds = {type(node) for node in survey.nodes}
    lookups = [node for node in survey.nodes if type(node).__name__.startswith("Embedding")]
    sparse = ["sparse"] if any(getattr(node, "_saved_sparse", False) for node in lookups) else []
    return frozenset((*(kind.__name__ for kind in kinds), *survey.python, *sparse))


def prove(survey: Survey) -> None:
    """Keep that a batched traversal of such a graph works."""
    if not survey.python:
        _PROVEN.add(_made_of(survey))


def proven(survey: Survey) -> bool:
    """Whether one is known to work, so that no other method will need the graph after it."""
    return _made_of(survey) in _PROVEN


def remember(survey: Survey, error: Exception) -> str:
    """Keep, and give, the reason why a batched traversal of such a graph failed."""
    found = re.search(r"Batching rule not implemented for (\S+?)[.;]?(\s|$)", str(error))
    operation = found[1] if found else str(error).splitlines()[0][:120]
    where = f" in {', '.join(survey.python)}" if survey.python else ""
    reason = f"a batched traversal failed: {operation}{where}"
    _KNOWN[_made_of(survey)] = reason
    return reason


def known(survey: Survey) -> dict[str, str]:
    """Reasons by method."""
    reason = _KNOWN.get(_made_of(survey))
    return {"batched": reason} if reason else {}


def forget() -> None:
    """Try batched traversals again."""
    _KNOWN.clear()

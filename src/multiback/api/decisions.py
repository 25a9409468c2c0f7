"""What users call to decide and to check: plan, tune, verify."""

import statistics
from dataclasses import dataclass
from numbers import Real
from typing import Any

import msgspec
from torch import Tensor

from multiback.api import gradients, products, samples
from multiback.api.answering import Options, prepare
from multiback.arguments import Dim0, Losses, Wrt
from multiback.errors import FreedGraphError, RequestError
from multiback.independence import Mode
from multiback.measure import clock
from multiback.measure.agreement import tolerance_of
from multiback.methods.columns import real_rows
from multiback.planner import KINDS, Kind, Plan
from multiback.request import request


def plan(
    losses: Losses,
    wrt: Wrt,
    *,
    kind: Kind = "each",
    independence: Mode = "certify",
    dim0: Dim0 | None = None,
    chunk: int | None = None,
    budget: int | str | None = None,
    method: str | Plan = "auto",
) -> Plan:
    """Which method would answer a request, at what predicted peak, and why not the others.

    Parameters
    ----------
    losses, wrt, independence, dim0, chunk, budget, method : as for the function that answers.
    kind : `each` (for `jac` and `each`), `rows`, `gram` or `norms`.

    Raises
    ------
    RequestError : an argument breaks its rule, or nothing fits the budget.

    Notes
    -----
    Runs at most the certificate's traversals, and keeps the graph.

    Examples
    --------
    >>> import torch, multiback as mb
    >>> layer = torch.nn.Linear(3, 2)
    >>> plan = mb.plan(layer(torch.rand(4, 3)).sum(1), layer, kind="rows")
    >>> plan.method, plan.independence
    ('partition', 'proven')
    """
    _check_kind(kind)
    asked = request(losses, wrt, retain_graph=True, rows=kind == "rows", dim0=dim0)
    return prepare(asked, kind, Options(independence, chunk, budget, method, explained=True)).plans[0]


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise RequestError(f"kind: must be one of {', '.join(KINDS)}; got {kind!r}. Choose one of these.")


def tune(
    losses: Losses,
    wrt: Wrt,
    *,
    kind: Kind = "each",
    independence: Mode = "certify",
    dim0: Dim0 | None = None,
    budget: int | str | None = None,
    rounds: int = 5,
) -> Plan:
    """Measure every method that can answer, on this graph, and plan for the quickest.

    Parameters
    ----------
    losses, wrt, kind, independence, dim0, budget : as for `plan`.
    rounds : how often each method is run, in turns, after one run to warm up.

    Returns
    -------
    Plan : pass it as `method=` to calls on graphs of the same shape; `save` and `load` keep it as JSON.
        Its `seconds` holds every method's median.

    Raises
    ------
    RequestError : an argument breaks its rule, or nothing fits the budget.

    Notes
    -----
    `rounds + 1` answers by each method; the graph is kept.

    Examples
    --------
    >>> import torch, multiback as mb
    >>> layer = torch.nn.Linear(3, 2)
    >>> tuned = mb.tune(layer(torch.rand(4, 3)).sum(0), layer, rounds=1)
    >>> gradients = mb.jac(layer(torch.rand(4, 3)).sum(0), layer, method=tuned)
    """
    _check_kind(kind)
    if not isinstance(rounds, int) or rounds < 1:
        raise RequestError(f"rounds: must be a positive whole number; got {rounds!r}. Leave it out for 5.")
    asked = request(losses, wrt, retain_graph=True, rows=kind == "rows", dim0=dim0)
    plans = prepare(asked, kind, Options(independence, budget=budget, traverse="always", explained=True)).plans
    times: dict[str, list[float]] = {candidate.method: [] for candidate in plans}
    for number in range(rounds + 1):
        for candidate in plans:
            if candidate.method not in times:
                continue
            try:
                taken = clock.time_call(lambda chosen=candidate: _answer(losses, wrt, kind, independence, dim0, chosen))
            except FreedGraphError:
                raise
            except RuntimeError:  # an operation that cannot be batched: the method is out
                if len(times) == 1:
                    raise
                del times[candidate.method]
                continue
            if number:
                times[candidate.method].append(taken.seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min(medians, key=medians.__getitem__)
    (chosen,) = (candidate for candidate in plans if candidate.method == best)
    others = {candidate.method: candidate.peak_bytes for candidate in plans if candidate.method != best}
    return msgspec.structs.replace(chosen, others=others, seconds=medians)


def _answer(losses: Losses, wrt: Wrt, kind: Kind, independence: Mode, dim0: Dim0 | None, method: Plan) -> Any:
    if kind == "each":
        return gradients.jac(losses, wrt, retain_graph=True, method=method)
    if kind == "rows":
        return samples.rows(losses, wrt, independence=independence, dim0=dim0, retain_graph=True, method=method)
    function = products.gram if kind == "gram" else products.norms
    return function(losses, wrt, independence=independence, retain_graph=True, method=method)


@dataclass(frozen=True)
class Check:
    """Whether a method's answer equals the slow reference's; true or false as a condition.

    `differences` holds, by tensor, the L2 norm of the difference relative to the reference's norm.
    """

    agrees: bool
    method: str
    tolerance: float
    differences: dict[str, float]

    def __bool__(self) -> bool:
        return self.agrees

    def __str__(self) -> str:
        """A line for the outcome, one for the worst tensor."""
        worst = max(self.differences, key=self.differences.__getitem__)
        outcome = "agrees with" if self.agrees else "DIFFERS from"
        return (
            f"{self.method} {outcome} a traversal per loss within {self.tolerance:.1e}: "
            f"at most {self.differences[worst]:.1e}, at {worst}"
        )


def verify(
    losses: Losses,
    wrt: Wrt,
    *,
    kind: Kind = "each",
    independence: Mode = "certify",
    dim0: Dim0 | None = None,
    method: str | Plan = "auto",
    tolerance: float | None = None,
) -> Check:
    """Compare a method's answer with the slow reference, on this graph.

    Parameters
    ----------
    losses, wrt, kind, independence, dim0 : as for `plan`.
    method : what to check, by default what `auto` chooses.
    tolerance : largest relative difference, by default 1e-4 for float32, less for float64, more for less.

    Raises
    ------
    RequestError : an argument breaks its rule.

    Notes
    -----
    The method's traversals and K plain ones; the graph is kept. Holds both answers.

    Examples
    --------
    >>> import torch, multiback as mb
    >>> layer = torch.nn.Linear(3, 2)
    >>> bool(mb.verify(layer(torch.rand(4, 3)).sum(1), layer, kind="rows"))
    True
    """
    if tolerance is not None and not (isinstance(tolerance, Real) and tolerance >= 0):
        raise RequestError(f"tolerance: must be a number from 0 up; got {tolerance!r}. Leave it out for the dtype's.")
    chosen = plan(losses, wrt, kind=kind, independence=independence, dim0=dim0, method=method)
    found = _tensors(_answer(losses, wrt, kind, independence, dim0, chosen))
    slow = msgspec.structs.replace(chosen, method="loop", chunk=1)
    expected = _tensors(_answer(losses, wrt, kind, independence, dim0, slow))
    allowed = max(tolerance_of(one) for one in expected.values()) if tolerance is None else tolerance
    differences = {name: _difference(found[name], expected[name]) for name in expected}
    return Check(all(value <= allowed for value in differences.values()), chosen.method, allowed, differences)


def _tensors(answer: Any) -> dict[str, Tensor]:
    if isinstance(answer, Tensor):
        return {"answer": answer}
    if isinstance(answer, dict):
        return {str(name): one for name, one in answer.items()}
    return {str(number): one for number, one in enumerate(answer)}


def _difference(found: Tensor, expected: Tensor) -> float:
    """Relative to the reference's norm; to rounding where that is zero."""
    if not expected.numel():
        return 0.0
    one, other = (real_rows(tensor.reshape(1, -1)).double() for tensor in (found, expected))
    scale = float(other.norm())
    gap = float((one - other).norm())
    return gap / scale if scale else gap

"""From a request to columns of gradients: survey, independence, plan, and the next plan where one fails."""

import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from numbers import Integral

import msgspec
import torch

from multiback import graph, traversals
from multiback.errors import CoupledRowsWarning, FreedGraphError, RequestError
from multiback.independence import Independence, Mode, Traverse, assess, mixes_rows
from multiback.methods import METHODS, failures
from multiback.methods.base import Work
from multiback.methods.columns import Columns
from multiback.methods.partition import Partition
from multiback.methods.plain import UNBATCHED
from multiback.planner import LARGE_BYTES, Facts, Kind, Offer, Plan, bytes_of, choose, preference
from multiback.request import Request
from multiback.rules.site import Site
from multiback.survey import REENTRANT, Cover, Survey, survey

_FREED = (
    "losses: must have a graph that is still there; a backward or a request before this one has freed it. "
    "Give that one retain_graph=True, or run the forward again."
)
MODES = ("certify", "assume", "off")


@dataclass(frozen=True)
class Options:
    """How an answer may be computed; `explained` asks for a plan that says why not otherwise."""

    independence: Mode = "certify"
    chunk: int | None = None
    budget: int | str | None = None
    method: str | Plan = "auto"
    traverse: Traverse = "likely"
    returned: bool = True
    reuse: bool = False
    explained: bool = False

    def check(self) -> None:
        """RequestError for what breaks a rule."""
        if self.independence not in MODES:
            raise RequestError(
                f"independence: must be one of {', '.join(MODES)}; got {self.independence!r}. Choose one of these."
            )
        if self.chunk is not None and (not isinstance(self.chunk, Integral) or self.chunk < 1):
            raise RequestError(f"chunk: must be a positive whole number of losses; got {self.chunk!r}. Leave it out.")
        if not isinstance(self.method, (str, Plan)):
            raise RequestError(f"method: must be a name or a Plan; got {type(self.method).__name__}. Use mb.plan's.")


@dataclass(frozen=True, eq=False)
class Prepared:
    """A request with everything known of it and the plans for it, best first."""

    work: Work
    plans: list[Plan]


def looked_at(request: Request) -> Survey:
    """The survey of a request's graph; RequestError where no loss reaches anything that was asked for."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RequestError(
            "losses: must be asked about outside torch.func's transforms, which see no graph to traverse; got a call "
            "inside one. Use torch.func.grad or jacrev there."
        )
    if graph.is_marked_freed(request.losses):
        raise FreedGraphError(_FREED)
    seen = survey(request)
    if not seen.places:
        raise RequestError("wrt: must hold a tensor of the losses' graph; none of it is part of it. Name others.")
    return seen


def prepare(request: Request, kind: Kind, options: Options) -> Prepared:
    """Look at the graph and decide; runs the certificate's traversals at most, and keeps the graph."""
    options.check()
    budget = bytes_of(options.budget)
    with freed_graphs_named():
        seen = looked_at(request)
        mode: Mode = "off" if request.create_graph else options.independence
        independence = assess(seen, mode, _how_far(kind, options))
    work = Work(seen, independence)
    owned = (
        [] if not (independence.sites or independence.rows) else [n for n in seen.reached if Partition.covers(work, n)]
    )
    facts = _facts(work, kind, options, owned)
    plans = choose(facts, _offers(facts), method=options.method, chunk=options.chunk, budget=budget)
    plans = [msgspec.structs.replace(plan, coupling=independence.coupling) for plan in plans]
    return Prepared(work, plans)


def _how_far(kind: Kind, options: Options) -> Traverse:
    """`rows` needs to know; others look only where it may pay, and not where another method is asked for."""
    name = options.method.method if isinstance(options.method, Plan) else options.method
    if kind == "rows" or name == "partition":
        return "always"
    return options.traverse if name == "auto" else "never"


def _offers(facts: Facts) -> list[Offer]:
    found = []
    for name in preference(facts):
        method = METHODS[name]

        def peak(chunk: int, name: str = name) -> int:
            return METHODS[name].peak_bytes(facts, chunk)

        found.append(Offer(name, method.refusal(facts), peak, method.chunks))
    return found


def _is_quick(work: Work, owned: list[int], kind: Kind, options: Options) -> bool:
    """Whether the decision rests on no sizes: all is partitioned, or it lies between a batched traversal and a loop."""
    if options.method != "auto" or options.budget is not None or options.explained:
        return False
    if len(owned) == len(work.survey.reached):
        return True
    small = all(target.nbytes < LARGE_BYTES for target in work.request.targets)
    return kind == "each" and options.returned and small and not owned


def _facts(work: Work, kind: Kind, options: Options, owned: list[int]) -> Facts:
    """What the planner needs; sizes only where it may need them."""
    request, seen = work.request, work.survey
    quick, whole = _is_quick(work, owned, kind, options), len(owned) == len(seen.reached)
    sites: list[Site] = [] if quick else seen.sites
    covers: dict[int, Cover] = {} if quick else seen.covers
    shared = [target for target in request.targets if not target.rows]
    unbatched = tuple(sorted({type(node).__name__ for node in seen.nodes} & UNBATCHED))
    sized = not quick or not (whole or unbatched or seen.python)
    return Facts(
        kind=kind,
        returned=options.returned,
        reuse=options.reuse,
        losses=request.count,
        shared_bytes=sum(target.nbytes for target in shared),
        row_bytes=sum(target.nbytes for target in request.targets if target.rows),
        contracted_bytes=sum(request.targets[number].nbytes for number in covers),
        largest_bytes=max(target.nbytes for target in request.targets),
        cotangent_bytes=sum(site.nbytes for site in sites),
        working_bytes=max((site.nbytes * site.copies for site in sites), default=0),
        saved_bytes=sum(site.fresh_bytes for site in sites),
        traversal_bytes=graph.traversal_bytes(seen.nodes, graph.roots_of(request.losses)) if sized else 0,
        partitioned="all" if whole else "some" if owned else "none",
        basis=work.independence.basis,
        create_graph=request.create_graph,
        python=seen.python,
        unbatched=unbatched,
        failed=failures.known(seen),
    )


def columns(prepared: Prepared) -> Iterator[Columns]:
    """Run the first plan; where a batched traversal fails before its first answer, the next plan answers.

    A consumer that stops early frees the graph as one that ends.
    """
    work, numbers = prepared.work, prepared.work.survey.reached
    failed: RuntimeError | None = None
    for plan in prepared.plans:
        stream = METHODS[plan.method].columns(work, numbers, plan.chunk)
        try:
            with freed_graphs_named():
                first = [next(stream)]
        except RuntimeError as error:
            if isinstance(error, FreedGraphError) or "batched" not in plan.method:
                raise
            failed = error
            continue
        if failed is not None:  # now that another way has gone through, it was the batching that failed
            failures.remember(work.survey, failed)
        yield from _finishing(work, first.pop(), stream)
        return
    if failed is not None:
        _explain(work, numbers, prepared.plans[-1], failed)


def _explain(work: Work, numbers: list[int], plan: Plan, failed: RuntimeError) -> None:
    """Raise what a plain traversal raises, if it does; else say that this method cannot answer."""
    traversals.plain(work.request.scalars()[0], [work.request.targets[n].given for n in numbers], retain_graph=True)
    reason = failures.remember(work.survey, failed)
    more = "" if plan.budget is None else ", or a larger budget"
    raise RequestError(f'method: "{plan.method}" must be exact; {reason}. Use method="auto"{more}.') from failed


def _finishing(work: Work, first: Columns, stream: Iterator[Columns]) -> Generator[Columns, None, None]:
    """The chunks, none of which is held here once it has been given."""
    done = first.stop
    waiting = [first]
    del first
    try:
        while waiting:
            yield waiting.pop()
            with freed_graphs_named():
                waiting += islice(stream, 1)
            done = waiting[0].stop if waiting else done
    finally:
        if done < work.request.count:
            work.ready(work.request.count, kept=True)


@contextmanager
def freed_graphs_named() -> Generator[None]:
    """Raise autograd's errors on graphs that are freed, or may be traversed once, as ones that say so by name."""
    try:
        yield
    except RuntimeError as error:
        if "donated buffers" in str(error):
            raise RequestError(
                "losses: must have a graph that can be traversed more than once; got one with a part that was "
                "compiled with donated buffers. Set torch._functorch.config.donated_buffer = False before compiling, "
                "or back-propagate one weighted sum with mb.backward."
            ) from error
        if "use_reentrant" in str(error):
            raise RequestError(REENTRANT) from error
        if isinstance(error, FreedGraphError) or "second time" not in str(error):
            raise
        raise FreedGraphError(_FREED) from error


def warn_of_coupling(independence: Independence, names: list[str]) -> None:
    """Say that rows are coupled, where, and what follows."""
    where = f" at {independence.coupling}" if independence.coupling else ""
    reason = "rows of the batch meet" if mixes_rows(independence.coupling) else "rows of the batch may meet"
    norm = "BatchNorm" in independence.coupling
    remedy = "Put batch norm in eval mode or replace it, or" if norm else "Keep the rows apart in the model, or"
    data = f"; {', '.join(names)} gets each row's own part alone" if names else ""
    warnings.warn(
        CoupledRowsWarning(
            f"rows: {reason}{where}, so a loss depends on other rows than its own. Parameters get the full gradient of "
            f'each loss{data}. {remedy} say independence="off" if this is meant.'
        ),
        stacklevel=4,
    )

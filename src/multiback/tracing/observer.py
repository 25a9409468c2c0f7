"""What one process's calls show, as they come: sites, evidence, and the state that both rest on."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr as clock

from multiback.cuts.naming import name_of
from multiback.traces import Evidence, Place, Site
from multiback.tracing import listening, places, postmortem
from multiback.tracing.calls import Call
from multiback.tracing.growth import Growth
from multiback.tracing.hoarding import Hoards
from multiback.tracing.kept import Kept, in_few_bytes
from multiback.tracing.means import Means
from multiback.tracing.parameters import Parameters, Used, grad_of
from multiback.tracing.ranks import Ranks
from multiback.tracing.walking import Walked, given_outputs, roots_of, walk

_WALKED_CALLS = 3  # of every site, whatever they cost
_COUNTED_CALLS = 64  # of a site, whose rows are counted whatever that costs
_LOOKED_AT_CALLS, _LOOKING_FREELY = 16, 0.2  # of a site, and seconds of all of them
_REMEMBERED = 256  # calls
_MOST_PLACES = 2000
_MOST_OPTIMISERS = 64
_MOST_NODES = 4096  # of a remembered call


class Observer:
    """Takes calls and steps one after another; the caller holds a lock, and catches what goes wrong.

    `spare` says whether recording has taken so little time that a walk may be afforded, and `spare_look` the same of
    looks at what names hold; without it there are none. `looking` is the seconds that they have taken.
    """

    def __init__(self, spare: Callable[[], bool], spare_look: Callable[[], bool] | None = None) -> None:
        self.sites: dict[tuple[Place, str], Site] = {}
        self.evidence: dict[tuple[str, Place], Evidence] = {}
        self.unobserved: set[str] = set()
        self.steps = 0
        self.ranks = Ranks()
        self._spare = spare
        self._parameters, self._means, self._growth, self._kept = Parameters(), Means(), Growth(), Kept()
        self._spare_look, self._hoards, self.looking = spare_look, Hoards(), 0.0
        self._calls: deque[Call] = deque(maxlen=_REMEMBERED)
        self._used: dict[int, Used] = {}
        self._numbers, self._threads, self._local = itertools.count(1), itertools.count(), threading.local()
        self._resting: tuple[int, int] | None = None  # thread and step whose kept graphs are not followed

    # ---- a call ----------------------------------------------------------------------------

    def before(
        self, outputs: Any, args: tuple[Any, ...], options: dict[str, Any], handles: list[Any]
    ) -> tuple[Call, Walked | None]:
        """A call is about to run: what can be known of it; hooks that are to be removed go into `handles`."""
        _, _, _, inputs, *_ = (*args, None, None, None, None)
        self._kept.bury(self._see)
        call = self._call(outputs, args, options)
        if self._spare_look is not None and (self._looks_freely(call) or self._spare_look()):
            self.look(places.current())
        if places.in_library_loop(places.current()):
            self.inside(outputs, inputs or ())
            return call, None
        if not self._wants_walk(call):
            self._follow(call, outputs)
            return call, None
        walked = walk(roots_of(outputs), inputs or ())
        if walked.compiled:
            self._cannot_see(f"{call.place}: what a compiled function does inside its backward")
        call.numbers, call.least, call.root = walked.numbers, walked.least, walked.root
        call.leaves = frozenset(walked.leaves)
        self._kept.unfollowed(call, walked, self._calls)
        shared = self._look_for_kept(call, walked, handles)
        self._look_for_stale(call, walked)
        if self._counts(call):
            handles += self._means.hook(call, walked, self.steps)
        if call.kind == "backward":
            self._parameters.before(walked.leaves.values(), call)
        if call.retain or call.create:
            self._kept.keep(call, walked, shared, measure=self._counts(call))
        return call, walked

    def _call(self, outputs: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Call:
        """What is known without a look at the graph."""
        _, retain, create, *_ = (*args, None, None, None)
        frame = places.caller(places.current())
        call = Call(
            number=next(self._numbers),
            kind="backward" if options.get("accumulate_grad") else "grad",
            place=places.place_of(frame),
            thread=self._thread(),
            retain=bool(retain),
            create=bool(create),
            step=self.steps,
            chosen=any(isinstance(one, Tensor) and one.numel() > 1 for one in given_outputs(outputs)),
        )
        if self._counts(call):
            call.names = places.names_in(frame)
        return call

    def _follow(self, call: Call, outputs: Any) -> None:
        """A call that is not walked, by its root and one leaf."""
        call.root = max((root._sequence_nr() for root in roots_of(outputs)), default=-1)
        followed = self._parameters.followed(call)
        self._parameters.before(followed, call)
        call.followed_grad = next(map(grad_of, followed), None)

    def inside(self, outputs: Any, inputs: Any) -> None:
        """A call that is not recorded, inside another one or a library's own: graphs that it uses are in use."""
        if self._kept:
            self._kept.look_only(walk(roots_of(outputs), inputs or ()))

    def _looks_freely(self, call: Call) -> bool:
        return self.looking < _LOOKING_FREELY and self._calls_from(call) < _LOOKED_AT_CALLS

    def look(self, frame: FrameType | None) -> None:
        """At what the program's names hold, from a frame outwards."""
        inside = torch._C._functorch.peek_interpreter_stack() is not None or torch._C._current_graph_task_id() != -1
        if not inside and not places.is_traced_by_python():
            began = time.perf_counter()
            self._hoards.look(frame, self._thread(), self._see)
            self.looking += time.perf_counter() - began

    def cannot_look(self) -> None:
        """There are no looks between calls."""
        self._cannot_see("what names hold between calls, as the recording did not begin in the main thread")

    def _thread(self) -> int:
        """The number of the thread that calls; a thread that begins later has another, unlike the interpreter's."""
        if not hasattr(self._local, "number"):
            self._local.number = next(self._threads)
        return int(self._local.number)

    def _wants_walk(self, call: Call) -> bool:
        """The first calls of a site always, more where they keep a graph; all on a kept graph that is followed.

        Of later ones as many as time allows; where they keep a graph, all of a step or none.
        """
        site = self.sites.get((call.place, call.kind))
        if site is None or site.walked_calls < _WALKED_CALLS or call.create or self._kept.any_of(call.thread):
            return True
        if not call.retain:
            return (site.walked_calls < 16 and self._growth.suspects(call)) or self._spare()
        if not self.steps or site.calls < _COUNTED_CALLS:
            return True
        if self._resting == (call.thread, self.steps):
            return False
        wanted = self._spare()
        if not wanted:
            self._resting = (call.thread, self.steps)
        return wanted

    def _counts(self, call: Call) -> bool:
        """Whether to look closely, whatever that costs: in the first calls of a site; later as time allows."""
        return self._calls_from(call) < _COUNTED_CALLS or self._spare()

    def _calls_from(self, call: Call) -> int:
        """How many there have been from there."""
        site = self.sites.get((call.place, call.kind))
        return 0 if site is None else site.calls

    def _look_for_kept(self, call: Call, walked: Walked, handles: list[Any]) -> set[int]:
        """The nodes that are shared with graphs that are kept; hooks where the call enters them."""
        shared = self._kept.look(call, walked)
        if call.story is None:
            return shared
        entrances = listening.entrances(walked, shared)
        call.selecting = sum(number not in shared or number in entrances for number in walked.selecting)
        for number in entrances:
            node = walked.nodes[number]
            handles.append(node.register_prehook(listening.heard(call, number, node, counting=self._counts(call))))
        if call.story.first.step < call.step and not call.story.stepped:
            call.story.stepped = True
            known = {**self._remembered(), **call.names}
            call.story.shared = next((known[number].text for number in sorted(entrances) if number in known), "")
        norms = [number for number in walked.batch_norms if number in shared]
        if norms:
            handles.append(walked.nodes[min(norms)].register_hook(listening.below_norm(call)))
        return shared

    def _look_for_stale(self, call: Call, walked: Walked) -> None:
        call.stale = self._parameters.stale(walked, call)
        if not call.stale and call.story is not None:
            call.stale = self._parameters.edited(walked, call, call.story.first, few=not self._counts(call))

    def after(self, call: Call, walked: Walked | None, outputs: Any, failure: BaseException | None) -> None:
        """It has run, or failed."""
        call.ended = clock()
        key = (call.place, call.kind)
        site = self.sites.get(key)
        if site is None:
            if len(self.sites) >= _MOST_PLACES:
                self._cannot_see(f"calls from more than {_MOST_PLACES:,} places")
                return
            site = self.sites[key] = Site(place=call.place, kind=call.kind)
        index = 1 if call.story is None else call.story.calls + 1
        site.add(call.seconds, call.faults, index)
        site.retaining_calls += call.retain
        site.creating_calls += call.create
        site.errors += failure is not None
        self._calls.append(call)
        if failure is not None:
            call.stale.clear()  # holds parameters
            self._kept.failed(call)
            self._explain(call, outputs, failure)
        else:
            self._kept.tell_unused(self._see)
            self._succeeded(call, walked, site, outputs)
        if call.numbers is not None:
            call.numbers = None if len(call.numbers) > _MOST_NODES else in_few_bytes(call.numbers)

    def _succeeded(self, call: Call, walked: Walked | None, site: Site, outputs: Any) -> None:
        if walked is None:
            followed = self._parameters.followed(call)
            self._accumulate(site, call, [leaf for leaf in followed if grad_of(leaf) != call.followed_grad])
            return
        nodes, leaves = walked.count, list(walked.leaves.values())
        site.first_nodes = site.first_nodes or nodes
        site.last_nodes, site.most_nodes = nodes, max(site.most_nodes, nodes)
        site.walked_calls += 1
        site.saved_bytes = max(site.saved_bytes, call.saved_bytes)
        for used, everything in call.rows.values():
            site.rows_used += used
            site.rows_all += everything
        if call.story is not None:
            call.story.add(call)
        self._tell_stale(call)
        self._look_for_growth(call, walked, outputs)
        self._accumulate(site, call, leaves)
        if call.kind == "backward":
            self.ranks.after(leaves, call.place, self._see)
            self._means.tell(call.place, self.steps, self._see)
            self._parameters.follow(leaves, call)
            call.tied = call.create and any(getattr(leaf.grad, "grad_fn", None) is not None for leaf in leaves)

    def _accumulate(self, site: Site, call: Call, leaves: list[Tensor]) -> None:
        """These leaves were reached."""
        site.accumulating_calls += call.kind == "backward" and self._parameters.accumulates(leaves, call.place)
        self._parameters.after(leaves, call)

    # ---- what a call shows -----------------------------------------------------------------

    def _see(self, evidence: Evidence) -> None:
        key = (evidence.code, evidence.place)
        if key not in self.evidence and len(self.evidence) >= _MOST_PLACES:
            self._cannot_see(f"what bears on findings at more than {_MOST_PLACES:,} places")
            return
        known = self.evidence.setdefault(key, evidence)
        if known is not evidence:
            known.merge(evidence)

    def _cannot_see(self, what: str) -> None:
        if len(self.unobserved) < _MOST_PLACES:
            self.unobserved.add(what)

    def _tell_stale(self, call: Call) -> None:
        if not call.stale:
            return
        found = list(call.stale)
        call.stale.clear()
        leaf, how, place = found[0]
        example = {"how": how, "by": "" if place is None else place.short, "leaves": len(found)}
        if ("stale-gradient", call.place) not in self.evidence:
            example["name"] = name_of(leaf)
        self._see(Evidence(code="stale-gradient", place=call.place, example=example))

    def _look_for_growth(self, call: Call, walked: Walked, outputs: Any) -> None:
        grown = self._growth.look(call, walked)
        if grown is not None:
            roots = roots_of(outputs)
            old = {number for number in walked.nodes if number < grown.before}
            found = postmortem.surviving(walked, roots, old, self._remembered())
            example = {"nodes": grown.sizes, "calls": grown.calls, "retain": call.retain, **found}
            self._see(Evidence(code="growing-graph", place=call.place, example=example))

    def _explain(self, call: Call, outputs: Any, failure: BaseException) -> None:
        """An error of autograd's: what had been freed by which call, or changed by which step."""
        text, roots = str(failure), roots_of(outputs)
        if postmortem.SECOND_TIME in text:
            walked = walk(roots)
            numbers = postmortem.freed(walked)
            culprit = next((one for one in reversed(self._calls) if listening.shares(one, call, numbers, walked)), None)
            old = numbers if culprit is None else set(culprit.numbers or (n for n in walked.nodes if n <= culprit.root))
            found = postmortem.surviving(walked, roots, old, self._remembered())
            if culprit is not None and not found["survivors"]:  # it may hang on what that call had not been through
                before = old | {number for number in walked.nodes if number < culprit.ended}
                found = postmortem.surviving(walked, roots, before, self._remembered())
            example = {
                **found,
                "by": "" if culprit is None else culprit.place.short,
                "stepped": any(self._stepped_since(culprit, leaf) for leaf in walked.leaves.values()),
                "nodes": len(numbers),
                "kind": call.kind,
            }
            self._see(Evidence(code="freed-graph", place=call.place, example=example))
        elif postmortem.IN_PLACE in text:
            walked = walk(roots)
            written = postmortem.changed(walked)
            leaves = [leaf for _, _, leaf in written if leaf is not None]
            steps = [step for step in (self._parameters.of(leaf).stepped for leaf in leaves) if step is not None]
            old = {number for number in walked.nodes if steps and number < steps[0][1]}
            carried = postmortem.surviving(walked, roots, old, self._remembered()) if old else {}
            example = {
                "names": [name_of(leaf) for leaf in leaves[:3]],
                "operations": [name for name, _, _ in written[:3]],
                "shapes": [shape for _, shape, _ in written[:3]],
                "by": steps[0][2].short if steps else "",
                "edits": postmortem.edits() if not steps else None,
                "carried": carried if carried.get("fresh") else {},
            }
            self._see(Evidence(code="changed-in-place", place=call.place, example=example))

    def _remembered(self) -> dict[int, places.Name]:
        """What names held at earlier calls: they may hold something else by now."""
        return {number: name for one in self._calls for number, name in one.names.items()}

    def _stepped_since(self, culprit: Call | None, leaf: Tensor) -> bool:
        step = self._parameters.of(leaf).stepped
        return culprit is not None and step is not None and step[1] >= culprit.ended

    # ---- steps, and the end ----------------------------------------------------------------

    def before_step(self, optimizer: Any) -> None:
        """An optimiser is about to step, with the gradients that calls have left."""
        leaves = [leaf for group in optimizer.param_groups for leaf in group["params"]]
        left = self._parameters.left_in(leaves)
        mine, used = {call.number: call for call in left}, {call.place for call in left}
        place = places.place_of(places.caller(places.current()))
        others = [step for key, step in self._used.items() if key != id(optimizer) and step.calls & mine.keys()]
        for step in others:  # one of the two moves on more than what both share
            if len(used) > 1 or len(step.places) > 1:
                shared = sorted({mine[number].place.short for number in step.calls & mine.keys()})
                where = place if len(used) > 1 else step.place
                self._see(Evidence(code="polluted-step", place=where, example={"left_by": shared[:3]}))
        self._used[id(optimizer)] = Used(place, frozenset(mine), frozenset(used))
        if len(self._used) > _MOST_OPTIMISERS:
            self._used.pop(next(iter(self._used)))

    def after_step(self, optimizer: Any) -> None:
        """It has stepped."""
        self.steps += 1
        if torch._C._current_graph_task_id() == -1:
            leaves = [leaf for group in optimizer.param_groups for leaf in group["params"] if leaf.grad is not None]
            place = places.place_of(places.caller(places.current()))
            self._parameters.stepped(leaves, self._thread(), place)

    def close(self, *, broken: bool = False, stopped: bool = False) -> None:
        """Graphs that are still kept, and memory tied up in gradients of gradients.

        Where an error ended the recording, or it was `stopped` under way, graphs that are there might have been used.
        """
        self._kept.close(self._see, broken=broken, stopped=stopped)
        self._hoards.close(self._see, whole=not (broken or stopped))
        tied = [call for call in self._kept.calls() if call.tied]
        steps = len({call.step for call in tied}) if self.steps else len(tied) - 1  # one may be under way
        if steps > 1:
            stuck: dict[str, float] = {"bytes": sum(call.saved_bytes for call in tied)}
            self._see(Evidence(code="create-graph-cycle", place=tied[0].place, count=len(tied), sums=stuck))
        for code, place in list(self.evidence):
            if code == "needless-retain" and not self._kept.may_leave_out(place):
                del self.evidence[code, place]

    def has_tied(self) -> bool:
        """Whether some `.grad` has a graph of its own, which only a garbage collection may free."""
        return any(call.tied for call in self._kept.calls())

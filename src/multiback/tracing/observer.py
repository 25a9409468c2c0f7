"""What one process's calls show, as they come: sites, evidence, and the state that both rest on."""

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr as clock

from multiback.cuts.naming import name_of
from multiback.traces import Evidence, Place, Site
from multiback.tracing import listening, places, postmortem
from multiback.tracing.calls import Call, Story, Token
from multiback.tracing.growth import Growth
from multiback.tracing.means import Means
from multiback.tracing.parameters import Parameters, Used, grad_of
from multiback.tracing.ranks import Ranks
from multiback.tracing.walking import Walked, fingerprints, roots_of, saved_bytes, walk

_WALKED_CALLS = 3  # of every site, whatever they cost
_COUNTED_CALLS = 64  # of a site, whose rows are counted whatever that costs
_REMEMBERED = 256  # calls
_MOST_SITES = 2000
_MOST_OPTIMISERS = 64
_MOST_NODES = 4096  # of a remembered call


class Observer:
    """Takes calls and steps one after another; the caller holds a lock, and catches what goes wrong.

    `spare` says whether recording has taken so little time that a walk may be afforded.
    """

    def __init__(self, spare: Callable[[], bool], ranks: Ranks) -> None:
        self.sites: dict[tuple[Place, str], Site] = {}
        self.evidence: dict[tuple[str, Place], Evidence] = {}
        self.unobserved: set[str] = set()
        self.steps = 0
        self.closed = False
        self.lock = threading.RLock()
        self._spare, self._ranks = spare, ranks
        self._parameters, self._means = Parameters(), Means()
        self._kept: dict[int, Call] = {}
        self._stories: dict[int, Story] = {}
        self._calls: deque[Call] = deque(maxlen=_REMEMBERED)
        self._growth = Growth()
        self._used: dict[int, Used] = {}
        self._number = 0

    # ---- a call ----------------------------------------------------------------------------

    def before(
        self, outputs: Any, args: tuple[Any, ...], options: dict[str, Any], handles: list[Any]
    ) -> tuple[Call, Walked | None]:
        """A call is about to run: what can be known of it; hooks that are to be removed go into `handles`."""
        _, retain, create, inputs, *_ = (*args, None, None, None, None)
        frame = places.caller(places.current())
        self._number += 1
        call = Call(
            number=self._number,
            kind="backward" if options.get("accumulate_grad") else "grad",
            place=places.place_of(frame),
            thread=threading.get_ident(),
            retain=bool(retain),
            create=bool(create),
            names=places.names_in(frame),
        )
        if not self._wants_walk(call) or places.in_library_loop(places.current()):
            roots = roots_of(outputs)
            call.root = max((root._sequence_nr() for root in roots), default=-1)
            followed = self._parameters.followed(call)
            self._parameters.before(followed, call)
            call.followed_grad = next(map(grad_of, followed), None)
            return call, None
        walked = walk(roots_of(outputs))
        if walked.compiled:
            self.unobserved.add(f"{call.place}: what a compiled function does inside its backward")
        if inputs:
            wanted = {id(one) for one in inputs if isinstance(one, Tensor)}
            walked.leaves = {key: leaf for key, leaf in walked.leaves.items() if key in wanted}
        call.numbers, call.least, call.root = walked.numbers, walked.least, walked.root
        call.consumers, call.selecting = walked.consumers, walked.selecting
        self._look_for_kept(call, walked, handles)
        self._look_for_stale(call, walked)
        handles += self._means.hook(call, walked, self.steps)
        if call.kind == "backward":
            self._parameters.before(walked.leaves.values(), call)
        if call.retain or call.create:
            self._keep(call, walked)
        return call, walked

    def _wants_walk(self, call: Call) -> bool:
        """The first calls of a site always; where a graph is kept, always; else as time allows."""
        site = self.sites.get((call.place, call.kind))
        if site is None or site.walked_calls < _WALKED_CALLS or call.retain or call.create:
            return True
        if any(one.thread == call.thread for one in self._kept.values()):
            return True
        return (site.walked_calls < 16 and self._growth.suspects(call)) or self._spare()

    def _counts(self, call: Call) -> bool:
        """Whether to look closely, whatever that costs: in the first calls of a site; later as time allows."""
        site = self.sites.get((call.place, call.kind))
        return site is None or site.calls < _COUNTED_CALLS or self._spare()

    def _look_for_kept(self, call: Call, walked: Walked, handles: list[Any]) -> None:
        """Whether this graph shares nodes with one that is kept, and what enters the shared part."""
        shared, mine = set[int](), walked.nodes.keys()
        for kept in list(self._kept.values()):
            if kept.thread != call.thread or not kept.numbers or kept.root < call.least or call.root < kept.least:
                continue
            both = mine & kept.numbers
            if both:
                kept.reused = True
                shared |= both
                if kept.story is None:
                    kept.story = self._stories.setdefault(kept.number, Story(kept))
                    kept.story.add(kept)
                call.story = kept.story
        if call.story is None:
            if call.kind == "grad" and walked.selecting and walked.batch_norms:
                handles += listening.around_norm(call, walked)
            return
        counting = self._counts(call)
        for number in listening.entrances(walked, shared):
            handles.append(walked.nodes[number].register_prehook(listening.heard(call, number, counting=counting)))
        norms = [number for number in walked.batch_norms if number in shared]
        if norms:
            handles.append(walked.nodes[min(norms)].register_hook(listening.below_norm(call)))

    def _look_for_stale(self, call: Call, walked: Walked) -> None:
        found = self._parameters.stale(walked, call)
        if not found and call.story is not None:
            found = self._parameters.edited(walked, call, call.story.first, few=not self._counts(call))
        call.stale = found

    def _keep(self, call: Call, walked: Walked) -> None:
        """Follow a graph that outlives the call."""
        site = self.sites.get((call.place, call.kind))
        if call.story is not None:
            call.saved_bytes = call.story.first.saved_bytes
        elif site is not None and site.walked_calls > _WALKED_CALLS and site.last_nodes == len(walked.nodes):
            call.saved_bytes = site.saved_bytes  # as the last graphs of this size
        else:
            call.saved_bytes = saved_bytes(walked)
        if call.retain and call.story is None:
            call.fingerprints = fingerprints(walked, call.number)
        token = Token(call, self._died)
        for number in {walked.root, walked.least} & walked.nodes.keys():
            walked.nodes[number].metadata[f"multiback {call.number}"] = token
        self._kept[call.number] = call

    def _died(self, call: Call, when: float) -> None:
        """A kept graph is gone."""
        with self.lock:
            self._kept.pop(call.number, None)
            if self.closed:
                return
            if call.story is not None:
                story = self._stories.pop(call.story.first.number, None)
                if story is not None and call.story.first is call:
                    story.close(self._see)
                elif story is not None:
                    self._stories[call.story.first.number] = story
            if call.retain and not call.create and not call.reused and call.story is None and call.finished_at:
                self._see(
                    Evidence(
                        code="needless-retain",
                        place=call.place,
                        sums={"bytes": call.saved_bytes, "held_seconds": when - call.finished_at},
                        example={"bytes": call.saved_bytes},
                    )
                )
            call.numbers = None

    def after(self, call: Call, walked: Walked | None, outputs: Any, failure: BaseException | None) -> None:
        """It has run, or failed."""
        call.ended = clock()
        key = (call.place, call.kind)
        site = self.sites.get(key)
        if site is None:
            if len(self.sites) >= _MOST_SITES:
                return
            site = self.sites[key] = Site(place=call.place, kind=call.kind)
        index = 1 if call.story is None else call.story.calls + 1
        site.add(call.seconds, call.faults, index)
        site.retaining_calls += call.retain
        site.creating_calls += call.create
        site.errors += failure is not None
        self._calls.append(call)
        if failure is not None:
            self._explain(call, outputs, failure)
            return
        if walked is None:
            followed = self._parameters.followed(call)
            self._accumulate(site, call, [leaf for leaf in followed if grad_of(leaf) != call.followed_grad])
            return
        nodes = len(walked.nodes)
        site.first_nodes = site.first_nodes or nodes
        site.last_nodes, site.most_nodes = nodes, max(site.most_nodes, nodes)
        site.walked_calls += 1
        site.saved_bytes = max(site.saved_bytes, call.saved_bytes)
        for used, everything in call.rows.values():
            site.rows_used += used
            site.rows_all += everything
        if call.story is not None:
            call.story.add(call)
        elif call.norm_rows is not None and call.rows:
            used, everything = next(iter(call.rows.values()))
            if used < call.norm_rows[0]:
                example = {"in": used, "out": call.norm_rows[0], "rows": everything}
                self._see(Evidence(code="coupled-rows", place=call.place, example=example))
        self._tell_stale(call)
        self._look_for_growth(call, nodes, outputs)
        leaves = list(walked.leaves.values())
        self._accumulate(site, call, leaves)
        if call.kind == "backward":
            self._ranks.after(leaves, call.place, self._see)
            self._means.tell(call.place, self.steps, self._see)
            self._parameters.follow(leaves, call)
        if call.create and call.kind == "backward" and any(getattr(leaf.grad, "grad_fn", None) for leaf in leaves):
            call.tied = True
        if not (call.retain or call.create):
            call.numbers = None if nodes > _MOST_NODES else array("Q", call.numbers or ())  # 8 bytes each

    def _accumulate(self, site: Site, call: Call, leaves: list[Tensor]) -> None:
        """These leaves were reached."""
        site.accumulating_calls += call.kind == "backward" and self._parameters.accumulates(leaves, call.place)
        self._parameters.after(leaves, call)

    # ---- what a call shows -----------------------------------------------------------------

    def _see(self, evidence: Evidence) -> None:
        known = self.evidence.setdefault((evidence.code, evidence.place), evidence)
        if known is not evidence:
            known.merge(evidence)

    def _tell_stale(self, call: Call) -> None:
        if not call.stale:
            return
        found = list(call.stale)
        call.stale.clear()
        leaf, how, place = found[0]
        first = ("stale-gradient", call.place) not in self.evidence
        example = {"how": how, "by": "" if place is None else place.short, "leaves": len(found)}
        if first:
            example["name"] = name_of(leaf)
        self._see(Evidence(code="stale-gradient", place=call.place, example=example))

    def _look_for_growth(self, call: Call, nodes: int, outputs: Any) -> None:
        grown = self._growth.look(call, nodes)
        if grown is not None:
            roots = roots_of(outputs)
            walked = walk(roots)
            old = {number for number in walked.nodes if number < grown.before}
            carried = postmortem.surviving(walked, roots, old, self._remembered())["survivors"]
            example = {"nodes": grown.sizes, "calls": grown.calls, "carried": carried}
            self._see(Evidence(code="growing-graph", place=call.place, example=example))

    def _explain(self, call: Call, outputs: Any, failure: BaseException) -> None:
        """An error of autograd's: what had been freed by which call, or changed by which step."""
        text, roots = str(failure), roots_of(outputs)
        if postmortem.SECOND_TIME in text:
            walked = walk(roots)
            numbers = postmortem.freed(walked)
            culprit = next((one for one in reversed(self._calls) if listening.shares(one, call, numbers, walked)), None)
            old = numbers if culprit is None else set(culprit.numbers or (n for n in walked.nodes if n <= culprit.root))
            example = {
                **postmortem.surviving(walked, roots, old, self._remembered()),
                "by": "" if culprit is None else culprit.place.short,
                "stepped": any(self._stepped_since(culprit, leaf) for leaf in walked.leaves.values()),
                "nodes": len(numbers),
            }
            self._see(Evidence(code="freed-graph", place=call.place, example=example))
        elif postmortem.IN_PLACE in text:
            found = postmortem.changed(walk(roots))
            leaves = [leaf for _, _, leaf in found if leaf is not None]
            steps = [self._parameters.of(leaf).stepped for leaf in leaves]
            example = {
                "names": [name_of(leaf) for leaf in leaves[:3]],
                "operations": [name for name, _, _ in found[:3]],
                "shapes": [shape for _, shape, _ in found[:3]],
                "by": next((step[2].short for step in steps if step is not None), ""),
            }
            self._see(Evidence(code="changed-in-place", place=call.place, example=example))

    def _remembered(self) -> dict[int, str]:
        """What names held at earlier calls: they may hold something else by now."""
        return {number: name for one in self._calls for number, name in one.names.items()}

    def _stepped_since(self, culprit: Call | None, leaf: Tensor) -> bool:
        step = self._parameters.of(leaf).stepped
        return culprit is not None and step is not None and step[1] >= culprit.ended

    # ---- steps, and the end ----------------------------------------------------------------

    def before_step(self, optimizer: Any, _args: Any, _options: Any) -> None:
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

    def after_step(self, optimizer: Any, _args: Any, _options: Any) -> None:
        """It has stepped."""
        self.steps += 1
        if torch._C._current_graph_task_id() == -1:
            leaves = [leaf for group in optimizer.param_groups for leaf in group["params"] if leaf.grad is not None]
            place = places.place_of(places.caller(places.current()))
            self._parameters.stepped(leaves, threading.get_ident(), place)

    def close(self) -> None:
        """Graphs that are still kept, and memory tied up in gradients of gradients; nothing is seen afterwards."""
        for story in list(self._stories.values()):
            story.close(self._see)
        tied: dict[Place, list[Call]] = {}
        for call in self._kept.values():
            if call.tied:
                tied.setdefault(call.place, []).append(call)
            elif call.retain and not call.create and not call.reused and call.story is None:
                self._see(
                    Evidence(
                        code="needless-retain",
                        place=call.place,
                        sums={"bytes": call.saved_bytes, "held_seconds": time.perf_counter() - call.finished_at},
                        example={"bytes": call.saved_bytes, "to_exit": True},
                    )
                )
        for place, calls in tied.items():
            if len(calls) > 1:
                stuck = sum(call.saved_bytes for call in calls)
                self._see(Evidence(code="create-graph-cycle", place=place, count=len(calls), sums={"bytes": stuck}))
        self.closed = True

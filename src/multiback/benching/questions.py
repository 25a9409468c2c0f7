"""The experiments as plans: which ways run under which `.grad` policy, and which pairs are judged."""

from multiback.benching.names import KINDS, WAYS
from multiback.benching.protocol import Act
from multiback.measure.verdicts import CONTROL_SUFFIX, Pair, Side
from multiback.records import Grads

SUCCESSIVE_CALLS = 4
GROWTH_STEPS = 8
COLD_CALLS = 6  # the first is cold, the next two warm up, the rest are warm
COLD_WARMUP_CALLS = 2
THREAD_START = "thread start"  # the cost of the first parallel operation, shown beside the cold calls

_REFERENCE = {
    "successive": "backward",
    "retain": "retain_graph=False",
    "combine": "func1",
    "slices": "reduction=sum",
    "growth": "one graph, retained",
    "cold": "backward",
    **dict.fromkeys(KINDS, "loop"),
}
# What a program does before anyone measures it; where it is not the reference already.
_USUAL_CODE = {"slices": "retained loop"}
_ALSO_ASKED = {
    "combine": [("one-forward retained", "one-forward summed"), ("one-forward summed", "multiback")],
    "slices": [
        ("reduction=sum", "loss summed in the loop"),
        ("reduction=sum", "forward per slice"),
        ("reduction=sum", "multiback cut"),
        ("reduction=sum", "multiback"),
    ],
    **{kind: [(way, "multiback") for way in WAYS[kind] if way != "multiback"] for kind in KINDS},
}
_CONTROL_HOSTS = {
    "combine": "one-forward summed",
    "slices": "reduction=sum",
    "retain": "retain_graph=False",
    "successive": "backward",
    "growth": "one graph, retained",
    **dict.fromkeys(KINDS, "multiback"),
}


def reference_of(question: str) -> str:
    """The way whose gradients the others of the question must give."""
    return _REFERENCE[question]


def acts_of(question: str, ways: list[str] | None, grads: Grads | None) -> list[Act]:
    """What is run for a question: its ways (or those asked for) under each policy.

    `successive` is asked under `none` and `accumulate`, since the policy decides its answer; the
    others under `none`, the policy of `zero_grad()`. `grads` overrides both, but for kinds of
    answer, which are returned and leave `.grad` alone.
    """
    grads = "none" if question in KINDS else grads
    policies: list[Grads] = [grads] if grads else ["none", "accumulate"] if question == "successive" else ["none"]
    names = [name for name in WAYS[question] if ways is None or name in ways]
    return [
        Act(question, name, policy)
        for policy in policies
        for name in names
        # autograd.grad returns its gradients: policies of .grad do not touch it
        if not (name == "autograd.grad" and policy != policies[0])
    ]


def control_of(acts: list[Act]) -> Act | None:
    """The act that runs once more under another name, as the A/A control of the run.

    The cheapest usual way of the question that has one; any act, where none of those is run.
    """
    for question, way in _CONTROL_HOSTS.items():
        for act in acts:
            if (act.question, act.way) == (question, way):
                return act
    return next((act for act in acts if act.question != "cold"), None)


def control_pair(act: Act) -> Pair:
    """The pair that must not differ, over all calls of a series."""
    return Pair(act.question, Side(act.way), Side(act.way + CONTROL_SUFFIX), act.grads)


def pairs_of(question: str, acts: list[Act]) -> list[Pair]:
    """The pairs judged for a question, each with a baseline that was run."""
    mine = [act for act in acts if act.question == question]
    if question == "successive":
        return _successive_pairs(mine)
    if question == "cold":
        return [_cold_pair(act) for act in mine]
    if question == "growth":
        return [pair for act in mine for pair in _growth_pairs(act)]
    return _way_pairs(question, mine)


def _way_pairs(question: str, acts: list[Act]) -> list[Pair]:
    """Every way against the usual code, in time and peak bytes, and the pairs that people ask about."""
    usual = _USUAL_CODE.get(question, _REFERENCE[question])
    if acts and all(act.way != usual for act in acts):
        usual = acts[0].way
    asked = [(usual, act.way) for act in acts if act.way != usual] + _ALSO_ASKED.get(question, [])
    by_name = {act.way: act for act in acts}
    asked = [names for names in dict.fromkeys(asked) if names[0] in by_name and names[1] in by_name]
    metrics = ["seconds", "peak_bytes", *(["held_bytes"] if question == "retain" else [])]
    return [
        Pair(question, Side(first), Side(second), by_name[second].grads, metric)
        for metric in metrics
        for first, second in asked
    ]


def _successive_pairs(acts: list[Act]) -> list[Pair]:
    return [
        Pair("successive", Side(act.way, 1), Side(act.way, index), act.grads)
        for act in acts
        for index in range(2, SUCCESSIVE_CALLS + 1)
    ]


def _cold_pair(act: Act) -> Pair:
    return Pair("cold", Side(act.way, phase="warm"), Side(act.way, phase="cold"), act.grads)


def _growth_pairs(act: Act) -> list[Pair]:
    first, last = Side(act.way, 1), Side(act.way, GROWTH_STEPS)
    return [Pair("growth", first, last, act.grads, metric) for metric in ("seconds", "nodes", "saved_bytes")]

"""How many processes and rounds fit the budget; pure arithmetic on the prices that were measured."""

from dataclasses import dataclass

from multiback.benching.protocol import Act
from multiback.measure.statistics import MIN_PROCESSES

FEWEST_ROUNDS = 2


@dataclass(frozen=True)
class Design:
    """The design of a run: processes, rounds by question, and the acts that were too dear to time."""

    processes: int
    rounds: dict[str, int]
    acts: list[Act]
    dropped: list[Act]
    seconds: float


@dataclass(frozen=True)
class Limits:
    """What bounds a design.

    `available` seconds should be enough (None: as long as it takes); beyond `patience` seconds
    even for the least design, ways are left out.
    """

    available: float | None
    patience: float
    build_seconds: float
    warmup_rounds: int
    max_processes: int
    max_rounds: int
    processes: int | None = None
    rounds: int | None = None


def design(prices: dict[Act, float], control: Act | None, limits: Limits) -> Design:
    """Processes first (at least five), then rounds (at least two), spread evenly over the questions.

    Processes are what intervals rest on, so they come before rounds. Where even the least design
    would try the patience, the dearest ways are left out, one by one.
    """
    acts, dropped = list(prices), list[Act]()
    fewest = limits.processes or MIN_PROCESSES
    # leaving ways out helps against dear ways only, not against a problem that takes long to build
    while len(acts) > 1 and (_least(acts, prices, control, limits) - limits.build_seconds) * fewest > limits.patience:
        dearest = max(acts, key=lambda act: prices[act])
        acts.remove(dearest)
        dropped.append(dearest)
    costs = _round_costs(acts, prices, control)
    if limits.available is None:
        processes = limits.processes or limits.max_processes
        rounds = dict.fromkeys(costs, limits.rounds or limits.max_rounds)
    else:
        processes = limits.processes or _processes_that_fit(_least(acts, prices, control, limits), limits)
        share = limits.available / processes - limits.build_seconds
        rounds = _spread(costs, share, limits)
    seconds = processes * (
        limits.build_seconds + sum((limits.warmup_rounds + rounds[q]) * cost for q, cost in costs.items())
    )
    return Design(processes, rounds, acts, dropped, seconds)


def _round_costs(acts: list[Act], prices: dict[Act, float], control: Act | None) -> dict[str, float]:
    """Seconds of one round of each question, the A/A control's second run included."""
    costs: dict[str, float] = {}
    for act in acts:
        costs[act.question] = costs.get(act.question, 0.0) + prices[act] * (2 if act == control else 1)
    return costs


def _least(acts: list[Act], prices: dict[Act, float], control: Act | None, limits: Limits) -> float:
    """Seconds of one process with the fewest rounds."""
    rounds = limits.warmup_rounds + (limits.rounds or FEWEST_ROUNDS)
    return limits.build_seconds + rounds * sum(_round_costs(acts, prices, control).values())


def _processes_that_fit(least: float, limits: Limits) -> int:
    if limits.available is None:
        return limits.max_processes
    return max(MIN_PROCESSES, min(limits.max_processes, int(limits.available / max(least, 1e-9))))


def _spread(costs: dict[str, float], share: float, limits: Limits) -> dict[str, int]:
    """Rounds by question: the fewest for all, then what is left in equal seconds.

    What a cheap question cannot use, since it has all the rounds there may be, goes to the others.
    """
    if limits.rounds:
        return dict.fromkeys(costs, limits.rounds)
    rounds = dict.fromkeys(costs, FEWEST_ROUNDS)
    left = share - sum((limits.warmup_rounds + FEWEST_ROUNDS) * cost for cost in costs.values())
    for position, question in enumerate(sorted(costs, key=lambda name: costs[name])):
        mine = max(0.0, left) / (len(costs) - position)
        more = min(limits.max_rounds - FEWEST_ROUNDS, int(mine / max(costs[question], 1e-9)))
        rounds[question] += more
        left -= more * costs[question]
    return rounds

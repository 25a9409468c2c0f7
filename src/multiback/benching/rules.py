"""`--fail-if` rules: parsed before the run, decided by the interval after it; no torch."""

import re
from dataclasses import dataclass
from typing import Literal

from multiback.benching.names import WAYS
from multiback.benching.options import Options
from multiback.errors import OptionError
from multiback.measure import verdicts
from multiback.measure.verdicts import Pair, Side
from multiback.records import BenchRecord, Grads

_RULE = re.compile(r"^(?P<question>[a-z]+):(?P<candidate>[^/]+)/(?P<baseline>[^/<]+)<(?P<ratio>[^<]+)$")

Decision = Literal["true", "false", "undecided"]


@dataclass(frozen=True)
class Rule:
    """Fail if the candidate's seconds over the baseline's are below `ratio`."""

    text: str
    question: str
    candidate: Side
    baseline: Side
    ratio: float


def parse(text: str, options: Options) -> Rule:
    """The rule that `text` writes; OptionError where it is malformed or names what is not run."""
    found = _RULE.match(text)
    if found is None:
        raise OptionError(
            f"--fail-if: must be QUESTION:CANDIDATE/BASELINE<RATIO, such as combine:func1/multiback<1.5; got {text!r}."
        )
    question = found["question"]
    if question not in options.questions:
        raise OptionError(
            f"--fail-if: the question must be one that is asked ({', '.join(options.questions)}); got {question!r}. "
            f"Add --question {question}, or change the rule."
        )
    sides = [Side.parse(found[name].strip()) for name in ("candidate", "baseline")]
    for side in sides:
        if side.way not in WAYS[question] or (options.ways and side.way not in options.ways):
            raise OptionError(
                f"--fail-if: a way must be one of {', '.join(options.ways or WAYS[question])}; got {side.way!r}. "
                "Choose one of these."
            )
    try:
        ratio = float(found["ratio"])
    except ValueError:
        ratio = -1.0
    if not 0 < ratio < float("inf"):
        raise OptionError(f"--fail-if: the ratio must be a positive number; got {found['ratio']!r} in {text!r}.")
    return Rule(text, question, sides[0], sides[1], ratio)


def decide(rule: Rule, record: BenchRecord) -> tuple[Decision, str]:
    """Whether the rule is true of the record, by the whole interval, and the figures behind that.

    Undecided where the interval holds the ratio, the gradients differ, the A/A control differs, or
    a side was not timed.
    """
    settings = record.run.settings
    policies: list[Grads] = [v.grads for v in record.verdicts if v.question == rule.question]
    grads: Grads = policies[0] if policies else "none"
    pair = Pair(rule.question, rule.baseline, rule.candidate, grads)
    evidence = verdicts.Evidence(
        record.samples, record.ways, record.growth, settings.margin, verdicts.confidence_of(settings)
    )
    control = None if record.control is None else verdicts.pair_of(record.control)
    judged, _ = verdicts.judge(evidence, [pair], control)
    if not judged or judged[0].interval is None:
        return "undecided", "it was not timed in two processes or more"
    verdict = judged[0]
    if verdict.outcome == "not-comparable":
        return "undecided", "the two do not give the same gradients"
    if verdict.reason == "control-differs":
        return "undecided", "the A/A control differs"
    low, high = sorted(1 / end for end in judged[0].interval or (1.0, 1.0))
    figures = f"{1 / (verdict.ratio or 1.0):.3g}, interval {low:.3g}-{high:.3g}"
    if high < rule.ratio:
        return "true", figures
    return ("false", figures) if low >= rule.ratio else ("undecided", figures)

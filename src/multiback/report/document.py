"""A report as tables and sentences, before any renderer: built from a record and nothing else."""

from dataclasses import dataclass, field
from statistics import median

from multiback.records import BenchRecord, Growth, Verdict
from multiback.report import claims, sentences
from multiback.report import format as fmt

_TITLES = {
    "successive": "successive: is a later backward on one graph cheaper than the first?",
    "cold": "cold: what do the first calls of a process cost?",
    "retain": "retain: what does retain_graph=True cost?",
    "combine": "combine: separate backwards, a summed loss, or one traversal?",
    "slices": "slices: one backward per slice, or all at once?",
    "growth": "growth: does a step get slower or bigger as steps go by?",
}
_POLICY = {"none": ".grad reset to None", "accumulate": ".grad accumulating", "prealloc": ".grad zeroed in place"}


@dataclass(frozen=True)
class Table:
    """Rows of text under column heads; the first column is left-aligned, the others right."""

    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Section:
    """A title, a table where there is one, and sentences."""

    title: str
    table: Table | None = None
    sentences: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Document:
    """A whole report: what to do first, since that is what a reader came for."""

    title: str
    advice: str
    sections: list[Section]


def build(record: BenchRecord) -> Document:
    """The report of a record."""
    asked = [question for question in record.run.settings.questions if _has(record, question)]
    sections = [_SECTIONS.get(question, _ways)(record, question) for question in asked]
    judged = claims.judge(record)
    if judged:
        lines = [f"{claim.verdict}: {claim.text} {claim.because}" for claim in judged]
        sections.append(Section("What the published answers claimed", None, lines))
    sections.append(_conduct(record))
    problem = record.problem
    title = (
        f"multiback bench {problem.target}: K = {problem.num_losses} losses, P = {problem.num_parameters:,} parameters, "
        f"B = {problem.num_rows} rows"
    )
    return Document(title, claims.advice(record), sections)


def _has(record: BenchRecord, question: str) -> bool:
    return question in record.samples.question or any(fact.question == question for fact in record.ways)


# ---- one section per question ------------------------------------------------------------------


def _ways(record: BenchRecord, question: str) -> Section:
    facts = [fact for fact in record.ways if fact.question == question]
    rows = []
    for fact in facts:
        seconds, faults = _median(record, question, fact.way, fact.grads)
        rows.append(
            [
                fact.way,
                fmt.seconds(seconds),
                fmt.size(fact.peak_bytes),
                fmt.size(fact.held_bytes),
                fmt.size(fact.saved_bytes),
                fmt.count(faults),
                fmt.flops(fact.flops),
                "same" if fact.comparable else "differ" if fact.difference_from_reference is not None else "-",
            ]
        )
    head = ["way", "median", "peak", "held", "saved", "faults", "FLOP", "gradients"]
    lines = [sentences.sentence(verdict, record) for verdict in _of(record, question, "seconds")]
    lines += [
        sentences.sentence(verdict, record)
        for metric in ("peak_bytes", "held_bytes")
        for verdict in _of(record, question, metric)
        if verdict.outcome in ("less", "more") or question == "retain"
    ]
    lines += [f"{fact.way}: {fact.note}." for fact in facts if fact.note and fact.comparable]
    lines += [
        f"{fact.way}: {sentences.difference(fact, record)}."
        for fact in facts
        if not fact.comparable
        and not any(fact.way in (v.candidate, v.baseline) for v in _of(record, question, "seconds"))
    ]
    return Section(
        f"{_TITLES[question]} ({_POLICY[facts[0].grads]})", Table(head, rows), lines + _smallest(record, question)
    )


def _successive(record: BenchRecord, question: str) -> Section:
    facts = [fact for fact in record.ways if fact.question == question]
    indexes = sorted(
        {i for i, q in zip(record.samples.call_index, record.samples.question, strict=True) if q == question}
    )
    rows, lines = [], []
    for fact in facts:
        medians = [_median(record, question, fact.way, fact.grads, index)[0] for index in indexes]
        name = f"{fact.way}, {_POLICY[fact.grads]}" if fact.way == "backward" else fact.way
        rows.append([name, *map(fmt.seconds, medians), fmt.count(fact.nodes), fmt.size(fact.saved_bytes)])
        mine = [
            v
            for v in _of(record, question, "seconds")
            if v.grads == fact.grads and v.baseline.startswith(fact.way + ",")
        ]
        for verdict in mine:
            lines.append(f"{_POLICY[fact.grads]}: {sentences.sentence(verdict, record)}")
    head = ["way", *[f"call {index}" for index in indexes], "nodes", "saved"]
    lines += [f"{fact.way}: {sentences.difference(fact, record)}." for fact in facts if not fact.comparable]
    return Section(_TITLES[question], Table(head, rows), lines + _smallest(record, question))


def _cold(record: BenchRecord, question: str) -> Section:
    rows = []
    for way in ("forward", "backward", "thread start"):
        cold, cold_faults = _median(record, question, way, "none", phase="cold")
        warm, warm_faults = _median(record, question, way, "none", phase="warm")
        if cold is not None:
            rows.append([way, fmt.seconds(cold), fmt.seconds(warm), fmt.count(cold_faults), fmt.count(warm_faults)])
    lines = [sentences.sentence(verdict, record) for verdict in _of(record, question, "seconds")]
    count = len(
        {
            process
            for process, asked, way in zip(
                record.samples.process, record.samples.question, record.samples.way, strict=True
            )
            if asked == question and way != "thread start"
        }
    )
    lines.append(
        f"Cold figures are the first calls of {count} fresh processes; with so few, intervals are wide, and a default "
        "run starts 8, --rigorous 20. Thread start is the first parallel operation of a process against the same later."
    )
    return Section(_TITLES[question], Table(["call", "cold", "warm", "faults cold", "faults warm"], rows), lines)


def _growth(record: BenchRecord, question: str) -> Section:
    growth = record.growth or Growth(steps=[], carried=[])
    rows, lines = [], []
    for fact in (fact for fact in record.ways if fact.question == question):
        steps = [step for step in growth.steps if step.way == fact.way]
        if len(steps) < 2:
            lines.append(f"{fact.way}: {fact.note or 'not run'}.")
            continue
        nodes = claims.per_step([step.nodes for step in steps])
        saved = claims.per_step([step.saved_bytes for step in steps])
        first = _median(record, question, fact.way, fact.grads, steps[0].step)[0]
        last = _median(record, question, fact.way, fact.grads, steps[-1].step)[0]
        rows.append(
            [
                fact.way,
                f"{fmt.seconds(first)} -> {fmt.seconds(last)}",
                f"{steps[0].nodes} -> {steps[-1].nodes}",
                fmt.number(nodes),
                fmt.size(round(saved)),
            ]
        )
        mine = [v for v in _of(record, question, "seconds") if v.baseline.startswith(fact.way + ",")]
        lines += [sentences.sentence(verdict, record) for verdict in mine]
    lines.append(claims.growth_finding(record))
    head = ["way", "time, first -> last step", "nodes", "nodes/step", "saved/step"]
    return Section(_TITLES[question], Table(head, rows), lines)


_SECTIONS = {"successive": _successive, "cold": _cold, "growth": _growth}


def _conduct(record: BenchRecord) -> Section:
    """How the run was done, and where: what a reader needs in order to believe it."""
    run, env, settings = record.run, record.environment, record.run.settings
    stopped = {
        "plan": "as planned",
        "precision": "all intervals narrow enough; they are stated at 97 %",
        "budget": "budget spent",
        "interrupt": "INTERRUPTED, this record is partial",
    }[settings.stopped_by]
    rounds = ", ".join(f"{name} {number}" for name, number in settings.rounds.items()) or "none"
    lines = [
        f"{settings.mode} run of {run.seconds:.0f} s, seed {settings.seed}: {settings.processes} processes, rounds in each: "
        f"{rounds}; {settings.cold_processes} cold starts; ended: {stopped}.",
        _control_line(record.control),
        f"{env.cpu}, {env.cores} cores, {env.threads} threads, {env.device}; torch {env.versions.get('torch')}, "
        f"python {env.versions.get('python')}, multiback {env.versions.get('multiback')}; {env.platform}; "
        f"allocator {env.allocator}{_allocator_settings(env.allocator_settings)}, transparent huge pages "
        f"{env.transparent_huge_pages}; load {_load(env.load_before)} before, {_load(env.load_after)} after.",
        f"Losses: {record.problem.losses}. Data: {_shapes(record)}.",
    ]
    if record.memory_fault:
        lines.append(f"Memory figures are not to be trusted here: {record.memory_fault}.")
    lines += _second_opinion(record)
    collected = [fact for fact in record.ways if fact.collected]
    lines += [
        f"{fact.way} leaves {fact.collected} objects in reference cycles, freed only by gc." for fact in collected
    ]
    return Section("How this was measured", None, [line for line in lines if line])


def _control_line(control: Verdict | None) -> str:
    if control is None:
        return "A/A control: none was run, so nothing guards the verdicts."
    low, high = control.interval or (float("nan"), float("nan"))
    reading = "differs" if control.outcome in ("less", "more", "small") else "reads no difference"
    end = "; every outcome is therefore 'cannot tell'" if reading == "differs" else ""
    return (
        f"A/A control, {control.baseline} against itself: {reading} "
        f"(ratio {control.ratio or 0:.3f}, interval {low:.3f}-{high:.3f}){end}."
    )


def _second_opinion(record: BenchRecord) -> list[str]:
    lines = []
    for fact in record.ways:
        peak, high = fact.peak_bytes, fact.high_water_bytes
        if peak is None or high is None or fact.question == "successive":
            continue
        if abs(high - peak) > max(0.1 * peak, 8 << 20):
            lines.append(
                f"{fact.way}: the system saw {fmt.size(high)} at the peak where allocation events say {fmt.size(peak)}; "
                "memory outside torch's allocator (numpy, foreign threads) is not in the figures."
            )
    return lines


def _smallest(record: BenchRecord, question: str) -> list[str]:
    found = [v.smallest_effect for v in _of(record, question, "seconds") if v.smallest_effect is not None]
    if not found:
        return []
    return [
        f"Smallest difference that this run could have seen: {fmt.percent(min(found))} to {fmt.percent(max(found))}."
    ]


def _of(record: BenchRecord, question: str, metric: str) -> list[Verdict]:
    return [v for v in record.verdicts if v.question == question and v.metric == metric]


def _median(
    record: BenchRecord, question: str, way: str, grads: str, index: int | None = None, phase: str = "warm"
) -> tuple[float | None, float | None]:
    """Median seconds and page faults of a way's calls; (None, None) where there are none."""
    table = record.samples
    rows = [
        row
        for row in range(len(table))
        if (table.question[row], table.way[row], table.grads[row], table.phase[row]) == (question, way, grads, phase)
        and index in (None, table.call_index[row])
    ]
    if not rows:
        return None, None
    return median(table.seconds[row] for row in rows), median(table.minor_faults[row] for row in rows)


def _allocator_settings(settings: dict[str, str]) -> str:
    return "".join(f" {name}={value}" for name, value in settings.items())


def _load(values: list[float]) -> str:
    return "/".join(f"{value:.2f}" for value in values) or "unknown"


def _shapes(record: BenchRecord) -> str:
    problem = record.problem
    return ", ".join(
        f"{name} {'x'.join(map(str, shape)) or 'scalar'} {problem.dtypes[name]}"
        for name, shape in problem.shapes.items()
    )

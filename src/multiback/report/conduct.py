"""How a run was done, and where: what a reader needs in order to believe it."""

from multiback.records import BenchRecord, Verdict
from multiback.report import format as fmt
from multiback.report.blocks import Section

_STOPPED = {
    "plan": "as planned",
    "precision": "every interval was narrow enough; an early end costs confidence, so they are stated at 97%",
    "budget": "the budget was spent",
    "interrupt": "INTERRUPTED, this record is partial",
}
# Below these the two ways to see memory differ by page rounding and allocator slack alone.
_TOLERATED_OVERRUN = 1.3
_BUSY_SHARE = 0.75  # of the cores, in processes that wanted to run over the last minute
_TOLERATED_SHARE, _TOLERATED_BYTES = 0.1, 8 << 20


def build(record: BenchRecord) -> Section:
    """The section at the end of every report."""
    lines = [
        _run_line(record),
        *_over_budget(record),
        _control_line(record.control),
        _environment_line(record),
        f"Losses: {record.problem.losses}. Data: {_shapes(record)}.",
    ]
    if record.memory_fault:
        lines.append(f"Memory figures are not to be trusted here: {record.memory_fault}.")
    lines += _second_opinion(record)
    lines += [
        f"{fact.way} leaves {fact.collected} objects in reference cycles, which only gc frees."
        for fact in record.ways
        if fact.collected
    ]
    return Section("How this was measured", None, lines)


def _run_line(record: BenchRecord) -> str:
    run, settings = record.run, record.run.settings
    rounds = ", ".join(f"{number} of {name}" for name, number in settings.rounds.items()) or "none"
    cold = f", {settings.cold_processes} cold starts" if settings.cold_processes else ""
    return (
        f"{settings.mode} run of {run.seconds:.0f} s, seed {settings.seed}: "
        f"{settings.processes} process{'' if settings.processes == 1 else 'es'}, rounds in "
        f"each: {rounds}{cold}. Ended: {_STOPPED[settings.stopped_by]}. Ratios are medians of pairs within a round, "
        "so they need not be the ratio of the medians shown."
    )


def _over_budget(record: BenchRecord) -> list[str]:
    """That the least design did not fit the budget, where it did not."""
    budget, seconds = record.run.settings.budget, record.run.seconds
    if budget is None or record.run.partial or seconds <= _TOLERATED_OVERRUN * budget:
        return []
    return [
        f"The budget was {budget:.0f} s: the fewest processes and rounds that give an interval took longer here. "
        "--way or --question leaves some of it out."
    ]


def _control_line(control: Verdict | None) -> str:
    if control is None or control.interval is None:
        return "A/A control: not run, so nothing guards the verdicts."
    if differs(control):
        reading = "DIFFERS, so every outcome on time is 'cannot tell'; run again on a quieter machine"
    elif control.outcome == "same":
        reading = "reads the same, as it must"
    else:
        reading = "no difference was seen, in an interval too wide to rule one out"
    low, high = control.interval
    return (
        f"A/A control, {control.baseline} against itself: {reading} "
        f"(ratio {control.ratio or 0:.3f}, interval {low:.3f}-{high:.3f})."
    )


def differs(control: Verdict | None) -> bool:
    """Whether a way differs from itself, so that nothing measured beside it can be believed."""
    return control is not None and control.outcome in ("less", "more", "small")


def busy_line(record: BenchRecord) -> str:
    """That the machine was busy when the run started; empty where it was not."""
    load, cores = record.environment.load_before, record.environment.cores
    if not load or load[0] < _BUSY_SHARE * cores:
        return ""
    return (
        f"The machine was busy (load {load[0]:.1f} on {cores} cores before the run): close other programs and run "
        "again before trusting small differences."
    )


def _environment_line(record: BenchRecord) -> str:
    env = record.environment
    versions = ", ".join(
        f"{name} {env.versions[name]}" for name in ("multiback", "torch", "python") if name in env.versions
    )
    settings = "".join(f" {name}={value}" for name, value in env.allocator_settings.items())
    return (
        f"{env.cpu}, {env.cores} cores, {env.threads} threads, device {env.device}; {versions}; {env.platform}; "
        f"allocator {env.allocator}{settings}, transparent huge pages {env.transparent_huge_pages}; "
        f"load {_load(env.load_before)} before, {_load(env.load_after)} after."
    )


def _second_opinion(record: BenchRecord) -> list[str]:
    """Where the system saw another peak than the allocation events did."""
    lines = []
    for fact in record.ways:
        peak, high = fact.peak_bytes, fact.high_water_bytes
        if peak is None or high is None or abs(high - peak) <= max(_TOLERATED_SHARE * peak, _TOLERATED_BYTES):
            continue
        lines.append(
            f"{fact.question}, {fact.way}: the system saw a peak of {fmt.size(high)} where allocation events say "
            f"{fmt.size(peak)}; memory outside torch's allocator (numpy, other threads) is not in the figures."
        )
    return lines


def _load(values: list[float]) -> str:
    return "/".join(f"{value:.2f}" for value in values) or "unknown"


def _shapes(record: BenchRecord) -> str:
    problem = record.problem
    return ", ".join(
        f"{name} {'x'.join(map(str, shape)) or 'scalar'} {problem.dtypes[name]}"
        for name, shape in problem.shapes.items()
    )

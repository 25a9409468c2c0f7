"""From what was recorded to findings: levels, sentences, costs and remedies; pure, and without torch.

Every function here takes a site or a piece of evidence and gives a finding or None. `docs/findings.md`
has a section per code.
"""

from collections.abc import Callable

from multiback.report import format as fmt
from multiback.traces import Evidence, Finding, Level, Site, TraceRecord

_COLD, _COLD_SECONDS = 2.0, 2e-3
_SLOWEST, _SLOWEST_OF = 1.2, 10  # where no later call was slower, of so many
_FAULTS_PER_CALL = 2000  # of 4 KiB: 8 MiB of fresh pages
_ORDER: dict[Level, int] = {"finding": 0, "likely": 1, "note": 2}


def judge(record: TraceRecord) -> list[Finding]:
    """All findings of a record, the gravest and dearest first."""
    found = [make(one) for one in record.evidence if (make := _FROM_EVIDENCE.get(one.code)) is not None]
    for number, site in enumerate(record.sites):
        found += [_cold_start(site, opening=not number), _page_faults(site)]
    there = [one for one in found if one is not None]
    causes = {one.place for one in there if one.code in ("growing-graph", "unreduced-ranks")}
    there = [one for one in there if one.code != "repeated-traversal" or one.place not in causes]
    return sorted(there, key=lambda one: (_ORDER[one.level], -(one.seconds or 0.0), -(one.bytes or 0), one.place))


def _finding(evidence: Evidence, said: str, remedy: str, *, level: Level = "finding", **cost: float | None) -> Finding:
    held = cost.get("bytes")
    return Finding(
        code=evidence.code,
        level=level,
        place=evidence.place,
        count=evidence.count,
        said=said,
        remedy=remedy,
        seconds=cost.get("seconds"),
        bytes=None if held is None else int(held),
    )


def _repeated(evidence: Evidence) -> Finding | None:
    sums, apart = evidence.sums, bool(evidence.example.get("apart"))
    calls, repeated, seconds = int(sums["traversals"]), sums["repeated"], sums["seconds"]
    graphs = f"{evidence.count} graph{'s' * (evidence.count > 1)}"
    said = (
        f"{calls} calls traversed {graphs} that were kept: about {fmt.seconds(repeated)} of {fmt.seconds(seconds)} "
        "went into parts that an earlier call had been through."
    )
    if calls < 2 or repeated <= 0:
        return None
    if apart:
        remedy = (
            "Gradients are kept apart here: multiback.jac, each or rows give each loss's gradient from one graph, by "
            "one traversal where losses own separate rows; multiback.cut runs chosen rows again."
        )
    else:
        remedy = (
            "All of them add to the same .grad: add the losses up and call backward() once, or give them all to "
            "multiback.backward(losses). To back-propagate as you go, use `with multiback.cut(output) as cut:` and "
            "cut.value in place of the output."
        )
    return _finding(evidence, said, remedy, seconds=repeated)


def _zero_rows(evidence: Evidence) -> Finding | None:
    used, rows = evidence.sums["used"], evidence.sums["rows"]
    said = (
        f"Losses of slices sent zeros through the rest of the batch: {fmt.percent(1 - used / rows)} of the rows that "
        f"were traversed carried nothing ({evidence.example['used']} of {evidence.example['rows']} did in one call)."
    )
    remedy = (
        "One backward of all slices' losses fills every row once; multiback.rows gives each row's gradient; "
        "multiback.cut(model, data) costs the rows asked for."
    )
    return _finding(evidence, said, remedy)


def _coupled_rows(evidence: Evidence) -> Finding | None:
    example = evidence.example
    said = (
        f"Per-slice gradients were taken through a batch norm in train mode: {example['in']} rows went in and "
        f"{example['out']} came out, so a slice's gradient holds other rows' as well."
    )
    return _finding(
        evidence, said, "Put the batch norm in eval mode, or use group or layer norm, for per-slice gradients."
    )


def _needless_retain(evidence: Evidence) -> Finding | None:
    held, seconds = evidence.sums["bytes"] / evidence.count, evidence.sums["held_seconds"] / evidence.count
    until = "to the end of the recording" if evidence.example.get("to_exit") else f"{fmt.seconds(seconds)} each time"
    said = (
        f"retain_graph=True kept a graph that nothing used again, {evidence.count} time{'s' * (evidence.count > 1)}: "
        f"about {fmt.size(int(held))} held {until}."
    )
    return _finding(evidence, said, "Leave retain_graph=True out.", bytes=held)


def _growing(evidence: Evidence) -> Finding | None:
    nodes, carried = evidence.example["nodes"], evidence.example.get("carried") or []
    what = f"`{carried[0]}` carries it over" if carried else "something carries it over"
    said = f"The graph grows at every call, {' -> '.join(map(str, nodes))} nodes, back to earlier calls: {what}."
    remedy = "Detach what is carried over between steps, or start it anew."
    if carried:
        remedy = f"Detach it between steps ({carried[0]} = {carried[0]}.detach()), or start it anew."
    return _finding(evidence, said, remedy)


def _freed(evidence: Evidence) -> Finding | None:
    example = evidence.example
    survivors, lines = example.get("survivors") or [], example.get("lines") or []
    by = f" by the call at {example['by']}" if example.get("by") else ""
    if not survivors:
        what = "a tensor that was made before"
    else:
        made = f", assigned at line {', '.join(map(str, lines[0]))}" if lines and lines[0] else ""
        what = f"`{survivors[0]}`{made}{',' * bool(made)}"
    said = f"The graph had been freed{by}; {what} survives from before and leads into it."
    if example.get("stepped"):
        remedy = (
            f"The parameters have changed since: run the forward again, and with it whatever {what} is made from, so "
            "that nothing from before the update is used."
        )
    else:
        remedy = (
            "Add the losses up and call backward() once, or compute it anew for each backward; "
            "`with multiback.cut(output) as cut:` allows any number of backwards on cut.value."
        )
    return _finding(evidence, said, remedy)


def _changed(evidence: Evidence) -> Finding | None:
    example = evidence.example
    names = (
        example.get("names") or [f"a tensor of shape {shape}" for shape in example.get("shapes", [])] or ["a tensor"]
    )
    by = f" by the optimiser's step at {example['by']}" if example.get("by") else " in place"
    operation = (example.get("operations") or ["an operation"])[0]
    said = f"{names[0]} was changed{by} after the forward, and {operation} needs it as it was."
    remedy = (
        "Take all gradients of one forward before the step, or run the forward again after it; for two networks, "
        "detach what one makes before it goes into the other."
    )
    return _finding(evidence, said, remedy)


def _stale(evidence: Evidence) -> Finding | None:
    example = evidence.example
    name = example.get("name", "a parameter")
    how = {
        "step": f"by the optimiser's step at {example['by']}",
        "edit": f"in place, since the call at {example['by']}",
        "data": f"through .data, since the call at {example['by']}",
    }[example["how"]]
    said = (
        f"{name} and {max(int(example['leaves']) - 1, 0)} others were changed {how}, after the forward whose gradient "
        "this is; nothing raised, and the gradient belongs to neither state."
    )
    return _finding(evidence, said, "One step per forward, or a new forward after each step.")


def _polluted(evidence: Evidence) -> Finding | None:
    left = ", ".join(evidence.example["left_by"])
    said = (
        f"Is it meant that this step uses gradients which the backward at {left} left, and which another optimiser has "
        "used already?"
    )
    remedy = (
        "Where each network should follow its own loss alone, clear .grad between the backwards, or take "
        "torch.autograd.grad(loss, its parameters)."
    )
    return _finding(evidence, said, remedy, level="likely")


def _cycle(evidence: Evidence) -> Finding | None:
    held = evidence.sums["bytes"]
    said = (
        f"backward(create_graph=True) tied parameters to their own gradients: {evidence.count} graphs, about "
        f"{fmt.size(int(held))}, are still there after garbage collection."
    )
    remedy = "Use torch.autograd.grad(..., create_graph=True), or set .grad to None after use."
    return _finding(evidence, said, remedy, bytes=held)


def _unreduced(evidence: Evidence) -> Finding | None:
    said = (
        f"{evidence.example['backwards']} backwards followed one forward of DistributedDataParallel "
        f"({evidence.example['forward']}): only the first is reduced, and ranks end with different gradients."
    )
    if "difference" in evidence.example:
        said += f" They differed by {fmt.percent(evidence.example['difference'])} here."
    return _finding(evidence, said, "Add the losses up and call backward() once per forward.")


def _uneven(evidence: Evidence) -> Finding | None:
    sizes = ", ".join(f"{size:g}" for size in evidence.example["sizes"])
    said = (
        f"Is it meant that elements weigh differently? Means over {sizes} elements were back-propagated in one step, "
        f"so an element of one counts {evidence.example['ratio']:.3g} times one of another."
    )
    return _finding(evidence, said, "Sum over each slice and divide by the count of all.", level="likely")


def _cold_start(site: Site, *, opening: bool) -> Finding | None:
    """What the first call took; where it was no slower, only of the place that the program called first."""
    if site.calls < 3:  # two do not show which of them is the odd one
        return None
    first, later = site.first_seconds, (site.seconds - site.first_seconds) / (site.calls - 1)
    slowest = first >= site.most_seconds and site.calls >= _SLOWEST_OF and first >= _SLOWEST * later
    cold = first - later >= _COLD_SECONDS and (first >= _COLD * later or slowest)
    if not (cold or opening):
        return None
    faults = f", with {site.first_faults:,} page faults" if site.first_faults else ""
    said = f"The first call took {fmt.seconds(first)}, later ones {fmt.seconds(later)} on average{faults}."
    remedy = "Leave the first call out of timings; it sets up threads, buffers and fresh memory."
    if not cold:
        said, remedy = f"{said} It was the program's first backward.", "No cold start shows here."
    return Finding(
        code="cold-start",
        level="note",
        place=site.place,
        count=1,
        said=said,
        remedy=remedy,
        seconds=first - later if cold else None,
    )


def _page_faults(site: Site) -> Finding | None:
    if site.calls < 3 or (site.faults - site.first_faults) / (site.calls - 1) < _FAULTS_PER_CALL:
        return None
    said = f"Each call meets about {site.faults // site.calls:,} page faults: much of its time goes into fresh memory."
    remedy = (
        "Keep .grad buffers: multiback.backward(losses, overwrite=True), or zero_grad(set_to_none=False); or raise "
        "glibc's MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_."
    )
    return Finding(code="page-fault-bound", level="note", place=site.place, count=site.calls, said=said, remedy=remedy)


_FROM_EVIDENCE: dict[str, Callable[[Evidence], Finding | None]] = {
    "repeated-traversal": _repeated,
    "zero-rows": _zero_rows,
    "coupled-rows": _coupled_rows,
    "needless-retain": _needless_retain,
    "growing-graph": _growing,
    "freed-graph": _freed,
    "changed-in-place": _changed,
    "stale-gradient": _stale,
    "polluted-step": _polluted,
    "create-graph-cycle": _cycle,
    "unreduced-ranks": _unreduced,
    "uneven-mean": _uneven,
}

"""From evidence to findings: what stops a program, or makes its gradients wrong; pure, and without torch."""

from multiback.report import format as fmt
from multiback.traces import Evidence, Finding, FromEvidence, finding
from multiback.tracing.wasteful import detaching

_FEW = 4


def _freed(evidence: Evidence) -> Finding | None:
    example = evidence.example
    survivors, lines = example.get("survivors") or [], example.get("lines") or []
    by = f" by the call at {example['by']}" if example.get("by") else ""
    made = f", assigned at line {', '.join(map(str, lines[0]))}," if lines and lines[0] else ""
    what = f"`{survivors[0]}`{made}" if survivors else "a tensor that has no name here"
    said = f"The graph had been freed{by}; {what} survives from before and leads into it."
    name = f"`{survivors[0]}`" if survivors else "it"
    if example.get("fresh") and example.get("scalar"):
        remedy = f"Start {name} anew for each backward instead of adding to it, or add its value alone, detached."
    elif example.get("fresh"):
        remedy = (
            f"{detaching(example)} if only its value is wanted, as for a state between steps; else compute {name} "
            "anew for each backward, from what comes before it."
        )
    elif example.get("stepped"):
        remedy = (
            f"The parameters have changed since: run the forward again, and with it whatever {name} is made from, so "
            "that nothing from before the update is used."
        )
    elif example.get("kind") == "grad":
        remedy = (
            "Ask for everything in one call, torch.autograd.grad(loss, [a, b]), or give the call that frees the graph "
            "retain_graph=True."
        )
    else:
        remedy = (
            "Add the losses up and call backward() once, or compute it anew for each backward; "
            "`with multiback.cut(output) as cut:` allows any number of backwards on cut.value."
        )
    return finding(evidence, said, remedy)


def _changed(evidence: Evidence) -> Finding | None:
    example = evidence.example
    shapes = [f"a tensor of shape {shape}" for shape in example.get("shapes", [])]
    names = example.get("names") or shapes or ["a tensor"]
    by = f" by the optimiser's step at {example['by']}" if example.get("by") else " in place"
    operation = (example.get("operations") or ["an operation"])[0]
    said = f"{names[0]} was changed{by} after the forward, and {operation} needs it as it was."
    carried, edits = example.get("carried") or {}, example.get("edits")
    if carried.get("survivors"):
        names = " and ".join(f"`{name}`" for name in carried["survivors"][:3])
        said += f" The graph reaches back before that step by {names}."
        return finding(
            evidence,
            said,
            f"{detaching(carried)} between steps.",
        )
    if edits:
        lines = "; ".join(f"line {number}: {text}" for number, text in edits[:_FEW])
        more = f", and {fmt.counted(len(edits) - _FEW, 'line')} more" if len(edits) > _FEW else ""
        said += f" In place is what this file does at {lines}{more}."
    elif edits is not None:
        said += " This file shows no line that does so: look where the tensor is made."
    if edits is None or example.get("names"):
        remedy = (
            "Take all gradients of one forward before the step, or run the forward again after it; for two networks, "
            "detach what one makes before it goes into the other."
        )
        return finding(evidence, said, remedy)
    return finding(evidence, said, "Write it out of place (x = x + 1 for x += 1, relu for relu_), or change a clone.")


def _stale(evidence: Evidence) -> Finding | None:
    example = evidence.example
    others = int(example["leaves"]) - 1
    names = example.get("name", "a parameter")
    if others:
        names += f" and {fmt.counted(others, 'other')}"
    how = {
        "step": f"by the optimiser's step at {example['by']}",
        "edit": f"in place, since the call at {example['by']}",
        "data": f"through .data, since the call at {example['by']}",
    }[example["how"]]
    said = (
        f"{names} {'were' if others else 'was'} changed {how}, after the forward whose gradient this is; nothing "
        "raised, and the gradient is the old state's, or of a mixture of old and new."
    )
    return finding(evidence, said, "One step per forward, or a new forward after each step.")


def _coupled_rows(evidence: Evidence) -> Finding | None:
    example = evidence.example
    said = (
        f"Per-slice gradients were taken through a batch norm in train mode: {fmt.counted(example['in'], 'row')} went "
        f"in and {example['out']} came out, so a slice's gradient holds other rows' as well."
    )
    return finding(
        evidence, said, "Put the batch norm in eval mode, or use group or layer norm, for per-slice gradients."
    )


def _polluted(evidence: Evidence) -> Finding | None:
    left = ", ".join(evidence.example["left_by"])
    said = (
        f"Is it meant that this step uses gradients which the backward at {left} left, and from which another "
        "optimiser has stepped, for parameters of its own, already?"
    )
    remedy = (
        "One loss over two optimisers' parameters is fine. Where each network should follow its own loss alone, clear "
        ".grad between the backwards, or take torch.autograd.grad(loss, its parameters)."
    )
    return finding(evidence, said, remedy, level="likely")


def _unreduced(evidence: Evidence) -> Finding | None:
    difference = evidence.example.get("difference")
    if difference == 0:  # the ranks agree all the same
        return None
    said = (
        f"{evidence.example['backwards']} backwards followed one forward of DistributedDataParallel "
        f"({evidence.example['forward']}): only the first is reduced, and ranks end with different gradients."
    )
    if difference is not None:
        said += f" They differed by {fmt.percent(difference)} here."
    return finding(evidence, said, "Add the losses up and call backward() once per forward.")


def _uneven(evidence: Evidence) -> Finding | None:
    sizes = ", ".join(f"{size:g}" for size in evidence.example["sizes"])
    said = (
        f"Is it meant that elements weigh differently? Means over {sizes} elements were back-propagated in one step, "
        f"so an element of one counts {evidence.example['ratio']:.3g} times one of another."
    )
    return finding(evidence, said, "Sum over each slice and divide by the count of all.", level="likely")


FROM_EVIDENCE: FromEvidence = {
    "freed-graph": _freed,
    "changed-in-place": _changed,
    "stale-gradient": _stale,
    "coupled-rows": _coupled_rows,
    "polluted-step": _polluted,
    "unreduced-ranks": _unreduced,
    "uneven-mean": _uneven,
}

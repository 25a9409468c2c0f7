"""From evidence to findings: what costs time or memory and changes no result; pure, and without torch."""

from collections.abc import Mapping
from typing import Any

from multiback.report import format as fmt
from multiback.traces import Evidence, Finding, FromEvidence, finding

_APART = (
    "Gradients are kept apart here: multiback.jac, each or rows give each loss's gradient from one graph, by one "
    "traversal where losses own separate rows; multiback.cut runs chosen rows again."
)
_ADDED = (
    "All of them add to the same .grad: add the losses up and call backward() once, or multiback.backward(losses). As "
    "you go, `with multiback.cut(output) as cut:` does, and cut.value for output. What reads .grad in between finds "
    "earlier losses' gradients in it too; multiback.each tells them apart."
)


MIXED = "mixed"  # kind of what holds other things than tensors as well


def _repeated(evidence: Evidence) -> Finding | None:
    """A finding where one traversal gives the same; a question where losses need theirs apart and rows in common."""
    sums, example = evidence.sums, evidence.example
    calls, repeated, seconds = int(sums["traversals"]), sums["repeated"], sums["seconds"]
    if calls < 2 or repeated <= 0:
        return None
    said = (
        f"{calls:,} calls traversed {fmt.counted(evidence.count, 'kept graph')}: about {fmt.seconds(repeated)} of "
        f"{fmt.seconds(seconds)} went into parts that an earlier call had been through."
    )
    if example.get("stepped"):
        what = example.get("shared") or "what they share"
        detached = f"{example['shared']}.detach()" if example.get("shared") else "that, detached"
        remedy = (
            f"An optimiser stepped in between: a loss that is not to train what lies below `{what}` should get "
            f"{detached}. Where all of them train it, `with multiback.cut(...) as cut:` around it goes through it once."
        )
        return finding(evidence, said, remedy, seconds=repeated)
    if example.get("slices"):
        return finding(evidence, said, _APART if example.get("apart") else _ADDED, seconds=repeated)
    if example.get("apart") or example.get("chosen"):
        said = f"Are these gradients needed one by one? {said}"
        remedy = (
            "If only their sum is used, back-propagate the sum once. Where each is used, multiback.jac or each gives "
            "all from one call, which saves where losses own separate rows or parts of the model, and little else."
        )
        return finding(evidence, said, remedy, level="likely", seconds=repeated)
    return finding(evidence, said, _ADDED, seconds=repeated)


def _zero_rows(evidence: Evidence) -> Finding | None:
    used, rows, example = evidence.sums["used"], evidence.sums["rows"], evidence.example
    said = (
        f"Losses of slices sent zeros through the rest of the batch: {fmt.percent(1 - used / rows)} of the rows that "
        f"were traversed carried nothing (one call: {example['used']} of {example['rows']} carried something)."
    )
    remedy = (
        "One backward of all slices' losses fills every row once; multiback.rows gives each row's gradient; "
        "multiback.cut(model, data) costs the rows asked for."
    )
    return finding(evidence, said, remedy)


def _needless_retain(evidence: Evidence) -> Finding | None:
    count = max(evidence.count, 1)
    held, seconds = evidence.sums["bytes"] / count, evidence.sums["held_seconds"] / count
    to_exit = int(evidence.sums.get("to_exit", 0))
    which = f"{to_exit:,} of them " if count > 1 else ""
    last = f", {which}to the end of the recording" if to_exit else ""
    said = (
        f"retain_graph=True kept {fmt.counted(count, 'graph')} that nothing used again: about {fmt.size(int(held))}"
        f"{' each' * (count > 1)}, held {fmt.seconds(seconds)}{' on average' * (count > 1)}{last}."
    )
    return finding(evidence, said, "Leave retain_graph=True out.", bytes=held)


def _growing(evidence: Evidence) -> Finding | None:
    example = evidence.example
    if "held" in example:
        return _hoarded(evidence)
    names = [f"`{name}`" for name in dict.fromkeys(example.get("survivors") or [])][:3]
    what = f"{' and '.join(names)} {'carry' if len(names) > 1 else 'carries'}" if names else "something carries"
    sizes = " -> ".join(map(str, example["nodes"]))
    said = f"The graph grows at every call, {sizes} nodes, back to earlier calls: {what} it over."
    remedy = f"{detaching(example)} between steps, or start it anew."
    if example.get("retain"):
        remedy += " retain_graph=True is then not needed."
    return finding(evidence, said, remedy)


def _hoarded(evidence: Evidence) -> Finding | None:
    """A name that holds more and more graphs, through which no backward will go."""
    example = evidence.example
    name = f"`{example['survivors'][0]}`"
    where = f"{fmt.counted(example['length'], 'item')} by then" if example["length"] else "each time made from the last"
    said = f"{name} held more at each of {example['looks']} looks in succession, {where}, and with it "
    at = f" (line {evidence.place.line}: {example['line']})" if example["line"] else ""
    values = f"Let {name} hold values alone{at}: .detach() what is added, or .item() it for a number"
    if example["held"] == "freed":
        said += "graphs that a backward had been through and freed: about 1 KiB for every node stays."
        return finding(evidence, said, f"{values}.", bytes=evidence.sums.get("bytes"))
    said += "graphs that no backward has been through: all that every forward saved stays."
    remedy = f"{values}; where nothing is trained, run all of it under torch.no_grad()."
    return finding(evidence, said, remedy, bytes=evidence.sums.get("bytes"))


def detaching(example: Mapping[str, Any]) -> str:
    """How to detach what survives, in the program's own names; not a whole sentence."""
    survivors, kinds = example.get("survivors") or [], example.get("kinds") or []
    if not survivors:
        return "Detach what is carried over"
    edits = dict.fromkeys(_detached(name, kind) for name, kind in zip(survivors, kinds, strict=False))
    return f"Detach what is carried over ({'; '.join(list(edits)[:3])})"


def _detached(name: str, kind: str) -> str:
    """The edit for one name; what holds several tensors is detached as a whole."""
    if not kind:
        return f"{name} = {name}.detach()"
    root = name.partition("[")[0]
    if kind == MIXED:
        return f"{name} and the like"
    if kind == "dict":
        return f"{root} = {{key: one.detach() for key, one in {root}.items()}}"
    inner = f"one.detach() for one in {root}"
    return f"{root} = [{inner}]" if kind == "list" else f"{root} = tuple({inner})"


def _cycle(evidence: Evidence) -> Finding | None:
    held = evidence.sums["bytes"]
    said = (
        f"backward(create_graph=True) tied leaves to their own gradients: {fmt.counted(evidence.count, 'graph')}, "
        f"about {fmt.size(int(held))}, are still there after garbage collection."
    )
    remedy = (
        "Use torch.autograd.grad(..., create_graph=True), or set .grad of all that it reached, inputs too, to None."
    )
    return finding(evidence, said, remedy, bytes=held)


FROM_EVIDENCE: FromEvidence = {
    "repeated-traversal": _repeated,
    "zero-rows": _zero_rows,
    "needless-retain": _needless_retain,
    "growing-graph": _growing,
    "create-graph-cycle": _cycle,
}

"""The report of a trace: findings first, then every site's calls, then what could not be seen."""

from pathlib import PurePath

from multiback.report import format as fmt
from multiback.report.blocks import Document, Section, Table
from multiback.traces import Finding, Place, Site, TraceRecord

_PAGE = "docs/findings.md"
_TITLES = {
    "finding": "Findings",
    "likely": "Questions",
    "note": "Notes",
}


def build(record: TraceRecord) -> Document:
    """The report of a record."""
    parts = [_findings(record, level, title) for level, title in _TITLES.items()]
    parts += [_sites(record), _calls_by_index(record), _conduct(record)]
    title = f"multiback trace {' '.join(record.program)}: {record.ended}, {fmt.seconds(record.seconds)}"
    return Document(title, _advice(record), [part for part in parts if part is not None])


def build_errors(record: TraceRecord) -> Document:
    """What is said of autograd's errors alone."""
    found = [one for one in record.findings if one.code in ("freed-graph", "changed-in-place")]
    title = f"multiback explain {' '.join(record.program)}: {record.ended}"
    if not found:
        return Document(title, "nothing: no error of autograd's was seen.", [])
    return Document(title, found[0].remedy, [Section("Explained", None, [_sentence(one) for one in found])])


def _advice(record: TraceRecord) -> str:
    """One line: the dearest finding's remedy, or that there is none."""
    found = [one for one in record.findings if one.level == "finding"]
    if not record.sites:
        return "nothing: no backward was seen."
    if not found:
        return "nothing: no fault was found in the backward calls that were seen."
    saving = f" (about {fmt.seconds(found[0].seconds)} of this run)" if found[0].seconds else ""
    return f"{_at(found[0].place)}: {found[0].remedy}{saving}"


def _findings(record: TraceRecord, level: str, title: str) -> Section | None:
    found = [one for one in record.findings if one.level == level]
    if not found:
        return None
    told = set[tuple[str, str]]()
    lines = []
    for one in found:
        lines.append(_sentence(one, advised=(one.code, one.remedy) not in told))
        told.add((one.code, one.remedy))
    return Section(f"{title} ({len(found)})", None, lines)


def _sentence(finding: Finding, *, advised: bool = True) -> str:
    """A finding in one line; its remedy where the same has not been given above."""
    times = f", {finding.count} times" if finding.count > 1 else ""
    cost = [f"about {fmt.seconds(finding.seconds)}"] if finding.seconds else []
    cost += [f"about {fmt.size(finding.bytes)}"] if finding.bytes else []
    price = f" [{', '.join(cost)}]" if cost else ""
    head = f"{finding.code} at {_at(finding.place)}{times}{price}"
    return f"{head}: {finding.said} {f'{finding.remedy} ({_PAGE}#{finding.code})' if advised else '(Remedy as above.)'}"


def _sites(record: TraceRecord) -> Section | None:
    if not record.sites:
        return None
    head = ["site", "calls", "total", "first", "later", "faults", "nodes", "saved", "retain", "adds"]
    ordered = sorted(record.sites, key=lambda site: -site.seconds)
    told = (
        "later: the mean of calls after the first; faults: page faults a call; adds: calls onto a .grad of their own."
    )
    return Section("Backward calls by site", Table(head, [_row(site) for site in ordered]), [told])


def _row(site: Site) -> list[str]:
    later = (site.seconds - site.first_seconds) / (site.calls - 1) if site.calls > 1 else None
    grew = site.last_nodes != site.first_nodes
    nodes = f"{site.first_nodes}->{site.last_nodes}" if grew else str(site.first_nodes or "-")
    return [
        _at(site.place) + (" grad" if site.kind == "grad" else ""),
        fmt.count(site.calls),
        fmt.seconds(site.seconds),
        fmt.seconds(site.first_seconds),
        fmt.seconds(later),
        fmt.count(site.faults / max(site.calls, 1)),
        nodes,
        fmt.size(site.saved_bytes) if site.saved_bytes else "-",
        fmt.count(site.retaining_calls),
        fmt.count(site.accumulating_calls),
    ]


def _calls_by_index(record: TraceRecord) -> Section | None:
    """Seconds by call index, of sites that went through one graph more than once."""
    rows = []
    for site in sorted(record.sites, key=lambda site: -site.seconds):
        means = [one.seconds / one.calls if one.calls else None for one in site.by_index]
        if sum(mean is not None for mean in means) > 1:
            rows.append([_at(site.place), *(fmt.seconds(mean) for mean in means)])
    if not rows:
        return None
    head = ["site", *(f"call {index}" for index in range(1, 8)), "later"]
    return Section("Mean seconds by call index on one graph", Table(head, rows), [])


def _conduct(record: TraceRecord) -> Section:
    share = record.overhead_seconds / record.seconds if record.seconds else 0.0
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    lines = [
        f"{record.processes} process{'es' * (record.processes > 1)} recorded, {fmt.count(record.steps)} optimiser "
        f"steps; recording took {fmt.percent(share)} of the time. {versions}.",
        "Seconds and bytes of findings are this run's, and about: a saving leaves other costs out.",
    ]
    lines += [f"Not observed: {text}." for text in record.unobserved]
    lines += [f"The recorder failed here, and what it would have seen is missing: {text}." for text in record.faults]
    return Section("How this was recorded", None, lines)


def _at(place: Place) -> str:
    return f"{PurePath(place.file).name}:{place.line}"

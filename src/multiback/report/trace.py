"""The report of a trace: findings first, then every site's calls, then what could not be seen."""

from collections.abc import Callable
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


At = Callable[[Place], str]


def build(record: TraceRecord) -> Document:
    """The report of a record."""
    at = _short_places(record)
    parts = [_findings(record, level, title, at) for level, title in _TITLES.items()]
    parts += [_sites(record, at), _calls_by_index(record, at), _conduct(record)]
    title = f"multiback trace {' '.join(record.program)}: {record.ended}, {fmt.seconds(record.seconds)}"
    return Document(title, _advice(record, at), [part for part in parts if part is not None])


def build_errors(record: TraceRecord) -> Document:
    """What is said of autograd's errors alone."""
    found = [one for one in record.findings if one.code in ("freed-graph", "changed-in-place")]
    title = f"multiback explain {' '.join(record.program)}: {record.ended}"
    if not found:
        return Document(title, "nothing: no error of autograd's was seen.", [])
    at = _short_places(record)
    return Document(title, found[0].remedy, [Section("Explained", None, [_sentence(one, at) for one in found])])


def _advice(record: TraceRecord, at: At) -> str:
    """One line: the dearest finding's remedy, or that there is none."""
    found = [one for one in record.findings if one.level == "finding"]
    if not found and not record.sites:
        return "nothing: no backward was seen."
    if not found:
        return "nothing: no fault was found in the backward calls that were seen."
    saving = f" (about {fmt.seconds(found[0].seconds)} of this run)" if found[0].seconds else ""
    return f"{at(found[0].place)}: {found[0].remedy}{saving}"


def _findings(record: TraceRecord, level: str, title: str, at: At) -> Section | None:
    found = [one for one in record.findings if one.level == level]
    if not found:
        return None
    told = set[tuple[str, str]]()
    lines = []
    for one in found:
        lines.append(_sentence(one, at, advised=(one.code, one.remedy) not in told))
        told.add((one.code, one.remedy))
    return Section(f"{title} ({len(found)})", None, lines)


def _sentence(finding: Finding, at: At, *, advised: bool = True) -> str:
    """A finding in one line; its remedy where the same has not been given above."""
    times = f", {finding.count} times" if finding.count > 1 else ""
    cost = [f"about {fmt.seconds(finding.seconds)}"] if finding.seconds else []
    cost += [f"about {fmt.size(finding.bytes)}"] if finding.bytes else []
    price = f" [{', '.join(cost)}]" if cost else ""
    head = f"{finding.code} at {at(finding.place)}{times}{price}"
    return f"{head}: {finding.said} {f'{finding.remedy} ({_PAGE}#{finding.code})' if advised else '(Remedy as above.)'}"


def _sites(record: TraceRecord, at: At) -> Section | None:
    if not record.sites:
        return None
    head = ["site", "calls", "total", "first", "later", "faults", "nodes", "saved", "retain", "adds"]
    ordered = sorted(record.sites, key=lambda site: -site.seconds)
    told = (
        "later: the mean of calls after the first; faults: page faults a call; adds: calls that added to a .grad which "
        "an earlier call from there had left."
    )
    return Section("Backward calls by site", Table(head, [_row(site, at) for site in ordered]), [told])


def _row(site: Site, at: At) -> list[str]:
    grew = site.last_nodes != site.first_nodes
    nodes = f"{site.first_nodes}->{site.last_nodes}" if grew else str(site.first_nodes or "-")
    return [
        at(site.place) + (" grad" if site.kind == "grad" else ""),
        fmt.count(site.calls),
        fmt.seconds(site.seconds),
        fmt.seconds(site.first_seconds),
        fmt.seconds(site.later_seconds),
        fmt.count(site.faults / max(site.calls, 1)),
        nodes,
        fmt.size(site.saved_bytes) if site.saved_bytes else "-",
        fmt.count(site.retaining_calls),
        fmt.count(site.accumulating_calls),
    ]


def _calls_by_index(record: TraceRecord, at: At) -> Section | None:
    """Seconds by call index, of sites that went through one graph more than once."""
    rows = []
    for site in sorted(record.sites, key=lambda site: -site.seconds):
        means = [one.seconds / one.calls if one.calls else None for one in site.by_index]
        if sum(mean is not None for mean in means) > 1:
            rows.append([at(site.place), *(fmt.seconds(mean) for mean in means)])
    if not rows:
        return None
    head = ["site", *(f"call {index}" for index in range(1, 8)), "later"]
    return Section("Mean seconds by call index on one graph", Table(head, rows), [])


def _conduct(record: TraceRecord) -> Section:
    share = record.overhead_seconds / record.seconds if record.seconds else 0.0
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    several = record.processes > 1
    steps = f"{fmt.counted(record.steps, 'optimiser step')}{' in the one with most' * several}"
    lines = [
        f"{record.processes} process{'es' * several} recorded, {steps}; recording took {fmt.percent(share)} of the "
        f"time. {versions}.",
        "Seconds and bytes of findings are this run's, and about: a saving leaves other costs out.",
    ]
    lines += [f"Not observed: {text}." for text in record.unobserved]
    lines += [f"The recorder failed here, and what it would have seen is missing: {text}." for text in record.faults]
    return Section("How this was recorded", None, lines)


def _short_places(record: TraceRecord) -> At:
    """How places are shown: by the file's name, and as many of its folders as tell it from the record's others."""
    files = {one.place.file for one in (*record.sites, *record.findings)}

    def shown(file: str) -> str:
        parts = PurePath(file).parts
        for count in range(1, len(parts)):
            end = parts[-count:]
            if sum(PurePath(other).parts[-count:] == end for other in files) <= 1:
                return str(PurePath(*end))
        return file

    names = {file: shown(file) for file in files}
    return lambda place: f"{names.get(place.file, place.file)}:{place.line}"

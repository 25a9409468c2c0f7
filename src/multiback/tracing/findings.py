"""From what was recorded to findings: levels, sentences, costs and remedies; pure, and without torch.

Every function here takes a site or a piece of evidence and gives a finding or None. `docs/findings.md`
has a section per code.
"""

from msgspec import structs

from multiback.report import format as fmt
from multiback.traces import Code, Evidence, Finding, Level, Place, Site, TraceRecord
from multiback.tracing import wasteful, wrong

_COLD, _COLD_SECONDS = 2.0, 2e-3
_SLOWEST, _SLOWEST_OF = 1.2, 10  # where no later call was slower, of so many
_FAULTS_PER_CALL = 2000  # of 4 KiB: 8 MiB of fresh pages
_ON_KEPT_GRAPHS = ("repeated-traversal", "needless-retain")
_NEARLY_ALL = 1.05
_ORDER: dict[Level, int] = {"finding": 0, "likely": 1, "note": 2}
_GRAVITY: dict[Code, int] = {  # the program stops; its results are wrong; it grows; it costs
    "freed-graph": 0, "changed-in-place": 0, "stale-gradient": 1, "unreduced-ranks": 1, "coupled-rows": 1,
    "polluted-step": 1, "uneven-mean": 1, "growing-graph": 2, "create-graph-cycle": 2,
}  # fmt: skip
_LEAST_GRAVE = 3
_EXPLAINING = ("growing-graph", "unreduced-ranks", "stale-gradient")  # whose remedy ends repeated traversals as well


def judge(record: TraceRecord) -> list[Finding]:
    """All findings of a record, the gravest and dearest first."""
    calls = _calls_by_place(record)
    scaled = [_scaled(one, calls.get(one.place, 1.0)) for one in record.evidence]
    makers = {**wasteful.FROM_EVIDENCE, **wrong.FROM_EVIDENCE}
    found = [make(one) for one in scaled if (make := makers.get(one.code)) is not None]
    for number, site in enumerate(record.sites):
        found += [_cold_start(site, opening=not number), _page_faults(site)]
    there = [one for one in found if one is not None]
    causes = {one.place for one in there if one.code in _EXPLAINING}
    there = [one for one in there if one.code != "repeated-traversal" or one.place not in causes]
    return sorted(there, key=_rank)


def _rank(finding: Finding) -> tuple[int, int, float, int, Place]:
    gravity = _GRAVITY.get(finding.code, _LEAST_GRAVE)
    return _ORDER[finding.level], gravity, -(finding.seconds or 0.0), -(finding.bytes or 0), finding.place


def _calls_by_place(record: TraceRecord) -> dict[Place, float]:
    """By place, how many calls there were for each whose graph was walked."""
    calls, walked = dict[Place, int](), dict[Place, int]()
    for site in record.sites:
        calls[site.place] = calls.get(site.place, 0) + site.calls
        walked[site.place] = walked.get(site.place, 0) + site.walked_calls + site.errors
    return {place: count / walked[place] for place, count in calls.items() if walked[place]}


def _scaled(evidence: Evidence, share: float) -> Evidence:
    """What was seen on graphs that were followed, as if all had been."""
    if evidence.code not in _ON_KEPT_GRAPHS or share < _NEARLY_ALL:
        return evidence
    sums = {name: share * value for name, value in evidence.sums.items()}
    return structs.replace(evidence, count=round(share * evidence.count), sums=sums)


def _cold_start(site: Site, *, opening: bool) -> Finding | None:
    """What the first call took; where it was no slower, only of the place that the program called first."""
    if site.calls < 3:  # two do not show which of them is the odd one
        return None
    first, later = site.first_seconds, site.later_seconds or 0.0
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

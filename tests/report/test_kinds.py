"""The report on kinds of answer: a table of every way, reasons for those left out, and what to do."""

import msgspec
import pytest

from conftest import add_samples, build_record, way_facts
from multiback.benching.names import KINDS as NAMED
from multiback.measure.verdicts import Pair, Side
from multiback.records import Samples
from multiback.report import console, document
from multiback.report.lookup import KINDS

SECONDS = {"loop": 10.0, "batched": 4.0, "multiback": 1.0, "TorchJD": 5.0}


def make_record(kind, **changes):
    samples = Samples()
    for way, seconds in SECONDS.items():
        add_samples(samples, kind, way, seconds)
    add_samples(samples, kind, "multiback (again)", 1.0)
    ways = [way_facts(kind, way, peak_bytes=1000 * (1 + number)) for number, way in enumerate(SECONDS)]
    ways[3] = msgspec.structs.replace(ways[3], comparable=False, group=1, difference_from_reference=0.4)
    reason = "does not run here: the model must be an nn.Module"
    ways.insert(2, way_facts(kind, "torch.func", comparable=False, difference_from_reference=None, note=reason))
    pairs = [
        Pair(kind, Side(first), Side(second), "none")
        for first, second in (
            ("loop", "batched"),
            ("loop", "multiback"),
            ("loop", "TorchJD"),
            ("batched", "multiback"),
        )
    ]
    control = Pair(kind, Side("multiback"), Side("multiback (again)"), "none")
    return build_record(samples, ways, pairs, control=control, **changes)


def test_the_report_knows_the_kinds_that_can_be_asked():
    assert list(KINDS) == list(NAMED)


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_has_its_row_and_its_ratio_to_the_loop(kind):
    section = document.build(make_record(kind)).sections[0]
    assert section.table.head == ["way", "median", "peak", "held", "loop / way", "answer"]
    rows = {row[0]: row[1:] for row in section.table.rows}
    assert list(rows) == ["loop", "batched", "torch.func", "multiback", "TorchJD"]
    assert rows["multiback"][3].startswith("10.0x (")
    assert rows["multiback"][4] == "same"
    assert rows["TorchJD"][3:] == ["-", "differs"]
    assert rows["torch.func"][3:] == ["-", "-"]


def test_a_way_that_does_not_run_is_named_with_its_reason():
    lines = document.build(make_record("each")).sections[0].sentences
    assert "torch.func: does not run here: the model must be an nn.Module." in lines


@pytest.mark.parametrize(("kind", "noun"), [("rows", "gradients"), ("gram", "answer")])
def test_what_is_not_the_same_is_called_by_its_name(kind, noun):
    text = " ".join(console.to_text(make_record(kind)).split())
    assert f"TorchJD: not the same {noun} (max relative difference 0.4), so it is not ranked against loop." in text
    assert f"ways marked same give the same {noun}" in text


@pytest.mark.parametrize(("kind", "call"), [("each", "jac"), ("rows", "rows"), ("gram", "gram"), ("norms", "norms")])
def test_the_advice_is_the_fastest_way_with_the_same_answer(kind, call):
    advice = document.build(make_record(kind)).advice
    assert advice.startswith(f"call multiback.{call}(losses, parameters): 10.0x faster here than loop")


def test_the_advice_may_be_another_library(monkeypatch):
    monkeypatch.setitem(SECONDS, "batched", 0.5)
    advice = document.build(make_record("each")).advice
    assert advice.startswith("give torch.autograd.grad all losses at once, with is_grads_batched=True: 19.9x faster")


def test_a_kind_alone_brings_no_hint_at_slices():
    record = make_record("rows")
    record = msgspec.structs.replace(record, problem=msgspec.structs.replace(record.problem, num_losses=4))
    assert "--question slices" not in document.build(record).advice


def test_without_an_interval_the_ratio_stands_alone():
    samples = Samples()
    for way, seconds in SECONDS.items():
        add_samples(samples, "each", way, seconds, processes=1)
    ways = [way_facts("each", way) for way in SECONDS]
    record = build_record(samples, ways, [Pair("each", Side("loop"), Side("multiback"), "none")])
    rows = {row[0]: row for row in document.build(record).sections[0].table.rows}
    assert "(" not in rows["multiback"][4]

"""The planner decides from facts alone, and its plans print, save and load."""

import msgspec
import pytest

from multiback.errors import RecordError, RequestError
from multiback.planner import LARGE_BYTES, Facts, Offer, Plan, bytes_of, choose, preference

FACTS = Facts(
    kind="each",
    returned=True,
    reuse=False,
    losses=8,
    shared_bytes=1000,
    row_bytes=0,
    contracted_bytes=1000,
    largest_bytes=800,
    cotangent_bytes=100,
    working_bytes=50,
    saved_bytes=0,
    traversal_bytes=200,
    partitioned="none",
    basis="unchecked",
    create_graph=False,
    python=(),
    unbatched=(),
    failed={},
)


def facts(**changes):
    return msgspec.structs.replace(FACTS, **changes)


def offer(method, per_loss, *, refusal="", chunks=True):
    return Offer(method, refusal, lambda chunk: 1000 + per_loss * chunk, chunks)


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({}, "batched"),
        ({"unbatched": ("ConvolutionBackward0",)}, "loop"),
        ({"largest_bytes": LARGE_BYTES}, "contract"),
        ({"python": ("MyFunctionBackward",)}, "loop"),
        ({"losses": 1}, "loop"),
        ({"returned": False}, "loop"),
        ({"returned": False, "reuse": True}, "contract"),
        ({"kind": "gram"}, "contract-batched"),
        ({"kind": "norms", "unbatched": ("ConvolutionBackward0",)}, "contract"),
        ({"partitioned": "all"}, "partition"),
        ({"partitioned": "some"}, "batched"),
    ],
    ids=[
        "plain",
        "unbatched",
        "large",
        "python",
        "one loss",
        "iterator",
        "reused",
        "gram",
        "norms",
        "partition",
        "in part",
    ],
)
def test_preference_follows_the_shape_of_the_work(changes, first):
    order = preference(facts(**changes))
    assert order[0] == first
    assert sorted(order) == ["batched", "contract", "contract-batched", "loop", "partition"]


def test_the_first_able_offer_is_taken_and_the_rest_follow():
    offers = [offer("partition", 0, refusal="rows meet"), offer("batched", 10), offer("loop", 5, chunks=False)]
    plans = choose(facts(), offers, method="auto", chunk=None, budget=None)
    assert [plan.method for plan in plans] == ["batched", "loop"]
    assert plans[0].chunk == 8
    assert plans[0].refused == {"partition": "rows meet"}
    assert plans[0].others == {"loop": 1005}


def test_a_budget_is_met_by_smaller_chunks():
    (plan,) = choose(facts(), [offer("batched", 100)], method="auto", chunk=None, budget=1250)
    assert plan.chunk == 2
    assert plan.peak_bytes == 1200
    assert plan.budget == 1250


def test_what_does_not_fit_is_refused_beside_what_does():
    offers = [offer("batched", 1000), offer("loop", 50, chunks=False)]
    (plan,) = choose(facts(), offers, method="auto", chunk=None, budget=1100)
    assert plan.method == "loop"
    assert plan.refused == {"batched": "needs 1.95 KiB"}


def test_nothing_that_fits_is_an_error_with_the_least_that_would():
    offers = [offer("batched", 1000), offer("loop", 50, chunks=False)]
    with pytest.raises(RequestError, match="got 10 bytes, and 1050 is the smallest that would do"):
        choose(facts(), offers, method="auto", chunk=None, budget=10)


def test_a_single_method_is_taken_or_refused_with_its_reason():
    offers = [offer("batched", 10, refusal="no rule"), offer("loop", 5, chunks=False)]
    (plan,) = choose(facts(), offers, method="loop", chunk=None, budget=None)
    assert plan.method == "loop"
    with pytest.raises(RequestError, match='method: "batched" must be exact; no rule'):
        choose(facts(), offers, method="batched", chunk=None, budget=None)


def test_a_plan_is_followed_in_method_and_chunk():
    given = Plan(kind="each", losses=8, method="batched", chunk=3, peak_bytes=0)
    (plan,) = choose(facts(), [offer("batched", 10), offer("loop", 5)], method=given, chunk=None, budget=None)
    assert (plan.method, plan.chunk) == ("batched", 3)


def test_norms_stay_near_one_gradient_without_a_budget():
    (plan,) = choose(facts(kind="norms"), [offer("contract", 60)], method="auto", chunk=None, budget=None)
    assert plan.chunk < 8


def test_plans_print_their_decision_and_what_was_not_taken():
    plan = Plan(
        kind="rows",
        losses=4,
        method="partition",
        chunk=1,
        peak_bytes=2048,
        independence="certified",
        budget=4096,
        refused={"batched": "too large"},
        others={"loop": 1024},
        seconds={"partition": 0.01, "loop": 0.5},
    )
    assert str(plan).splitlines() == [
        "rows of 4 losses: partition, all at once, at most about 2 KiB above entry",
        "  rows: certified",
        "  budget: 4 KiB",
        "  not loop: about 1 KiB, 0.5 s",
        "  not batched: too large",
    ]


def test_plans_survive_a_file(tmp_path):
    plan = Plan(kind="gram", losses=4, method="contract", chunk=4, peak_bytes=10, refused={"loop": "why"})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("text", ["", "{}", '{"kind": "sum", "losses": 1, "method": "loop", "chunk": 1}'])
def test_a_file_that_holds_no_plan_is_an_error(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(RecordError, match="must be a plan that"):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(RecordError, match="must be a plan"):
        Plan.load(tmp_path / "none.json")


def test_a_plan_of_another_schema_is_an_error(tmp_path):
    plan = Plan(schema=99, kind="gram", losses=4, method="contract", chunk=4, peak_bytes=10)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(RecordError, match="must be of schema 1; got 99"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("budget", "size"),
    [(1000, 1000), ("1024", 1024), ("2GiB", 2 << 30), ("1.5 kib", 1536), ("3MB", 3_000_000), (None, None)],
)
def test_budgets_are_bytes_or_say_their_unit(budget, size):
    assert bytes_of(budget) == size

"""A traversal per loss, and a batched one for many: what torch offers by itself."""

from collections.abc import Iterator

from torch import Tensor
from typing_extensions import override

from multiback import traversals
from multiback.methods import failures
from multiback.methods.base import Method, Work, dense, placed, ranges
from multiback.methods.columns import Columns
from multiback.planner import Facts

# Nodes whose backward has no batching rule in the batching that `is_grads_batched` uses: torch runs
# them once per loss and stacks the results, which costs more than a traversal per loss.
UNBATCHED = frozenset(
    f"{name}Backward0"
    for name in (
        *("Convolution", "NativeBatchNorm", "NativeLayerNorm", "NativeGroupNorm", "Embedding", "EmbeddingBag"),
        *("ScaledDotProductFlashAttentionForCpu", "ScaledDotProductFlashAttention", "Gelu", "NllLoss", "NllLoss2D"),
        *("ScaledDotProductEfficientAttention", "MaxPool2DWithIndices", "MaxPool3DWithIndices", "AvgPool2D"),
        *("AdaptiveAvgPool2D", "Softmax", "LogSoftmax", "MkldnnRnnLayer"),
    )
)


class Loop(Method):
    """A traversal per loss: the slow reference, right wherever torch is."""

    name = "loop"
    chunks = False

    @override
    def refusal(self, facts: Facts) -> str:
        return ""

    @override
    def peak_bytes(self, facts: Facts, chunk: int) -> int:
        held = 2 * facts.losses * facts.gradient_bytes if facts.kind == "gram" else 0
        return facts.result_bytes + held + facts.gradient_bytes + facts.traversal_bytes

    @override
    def columns(self, work: Work, numbers: list[int], chunk: int) -> Iterator[Columns]:
        for place, loss in enumerate(work.request.scalars()):
            yield self._one(work, numbers, loss, place)

    @staticmethod
    def _one(work: Work, numbers: list[int], loss: Tensor, place: int) -> Columns:
        """One loss in a frame of its own, which holds nothing once its gradients have been given away."""
        request = work.request
        edges = [request.targets[number].given for number in numbers]
        keep = work.keeps(place + 1, all_leaves=True)
        found = traversals.plain(loss, edges, retain_graph=keep, create_graph=request.create_graph)
        rows = [None if grad is None else dense(grad).unsqueeze(0) for grad in found]
        work.ready(place + 1, kept=keep)
        return Columns(place, place + 1, request.targets, placed(work, numbers, list(rows)))


class Batched(Method):
    """A batched traversal for a chunk of losses (`is_grads_batched`)."""

    name = "batched"

    @override
    def refusal(self, facts: Facts) -> str:
        return unbatchable(facts)

    @override
    def peak_bytes(self, facts: Facts, chunk: int) -> int:
        held = 2 * facts.losses * facts.gradient_bytes if facts.kind == "gram" else 0
        once = facts.returned and facts.kind != "rows" and chunk >= facts.losses
        mine = 0 if once else chunk * facts.gradient_bytes
        return facts.result_bytes + held + mine + chunk * facts.traversal_bytes

    @override
    def columns(self, work: Work, numbers: list[int], chunk: int) -> Iterator[Columns]:
        request = work.request
        losses = request.vector()
        for start, stop in ranges(request.count, chunk):
            yield self._chunk(work, numbers, losses, start, stop)

    @staticmethod
    def _chunk(work: Work, numbers: list[int], losses: Tensor, start: int, stop: int) -> Columns:
        """A chunk in a frame of its own, which holds nothing once the chunk has been given away."""
        edges = [work.request.targets[number].given for number in numbers]
        keep = work.keeps(stop, all_leaves=True) or not failures.proven(work.survey)
        found = traversals.batched(losses, start, stop, edges, retain_graph=keep)
        failures.prove(work.survey)
        work.ready(stop, kept=keep)
        return Columns(start, stop, work.request.targets, placed(work, numbers, list(found)))


def unbatchable(facts: Facts) -> str:
    """Why no batched traversal can answer; empty where one may."""
    if facts.create_graph:
        return "a batched traversal makes no graph of its own"
    return facts.failed.get("batched", "")

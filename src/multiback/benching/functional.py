"""A problem's losses as functions of its parameters alone, differentiated by torch.func."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from typing_extensions import override

from multiback.benching.bound import Bound
from multiback.errors import ProblemError
from multiback.nested import map_tensors, tensors_in

_Values = dict[str, Tensor]


def gradients(bound: Bound) -> Callable[[], list[Tensor]]:
    """A call that gives [K, *shape] for every parameter, its own forward included.

    `vmap(grad)` over the rows where the target has one loss per row, else `jacrev`. Data are
    detached: what requires grad there is not asked for, and would leave a graph on the answer.
    """
    if not isinstance(bound.model, nn.Module):
        raise ProblemError(
            f"the model must be an nn.Module, whose parameters can be replaced; got {type(bound.model).__name__}"
        )
    parts = _Parts(bound)
    values = {name: value.detach() for name, value in parts.named_parameters() if value.requires_grad}
    data = map_tensors(bound.data, Tensor.detach)
    second = data if bound.second is bound.data else map_tensors(bound.second, Tensor.detach)
    if bound.has_row_losses and bound.num_rows > 1:
        return _per_row(parts, values, bound.num_rows, data, second)

    def losses(changed: _Values) -> Tensor:
        return functional_call(parts, changed, (data, second))

    jacobian = jacrev(losses)
    return lambda: list(jacobian(values).values())


def _per_row(parts: "_Parts", values: _Values, count: int, data: Any, second: Any) -> Callable[[], list[Tensor]]:
    """Per-sample gradients as torch's own tutorial has them."""
    own = second is data

    def holds_rows(tensor: Tensor) -> bool:
        return tensor.ndim > 0 and tensor.shape[0] == count

    def loss(changed: _Values, *rows: Tensor) -> Tensor:
        left = iter(rows)

        def cut(tensor: Tensor) -> Tensor:
            return next(left).unsqueeze(0) if holds_rows(tensor) else tensor

        row = map_tensors(data, cut)
        found = functional_call(parts, changed, (row, row if own else map_tensors(second, cut)))
        if found.numel() != 1:
            raise ProblemError(f"one row must give one loss; got {found.numel()}")
        return found[0]

    rows = [tensor for tensor in tensors_in(data if own else [data, second]) if holds_rows(tensor)]
    answer = vmap(grad(loss), in_dims=(None, *[0] * len(rows)))
    return lambda: list(answer(values, *rows).values())


class _Parts(nn.Module):
    """The model and the losses that are modules together, so that one call replaces all their parameters."""

    def __init__(self, bound: Bound) -> None:
        super().__init__()
        self.parts = nn.ModuleList(bound.modules)
        self._bound = bound

    @override
    def forward(self, data: Any, second: Any) -> Tensor:
        return self._bound.vector(self._bound.forward(data), second)

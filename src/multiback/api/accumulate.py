"""What users call: request -> method -> answer."""

from multiback import graph
from multiback.arguments import Losses, Weights, Wrt
from multiback.errors import RequestError
from multiback.methods import SUM_METHODS, check_method, contract, summed
from multiback.request import sum_request


def backward(
    losses: Losses,
    *,
    wrt: Wrt | None = None,
    weights: Weights | None = None,
    overwrite: bool = False,
    retain_graph: bool = False,
    method: str = "auto",
) -> None:
    """Add the weighted sum of K losses' gradients to `.grad`, by one traversal of the graph.

    Parameters
    ----------
    losses : a tensor of any shape, or a sequence of tensors, flattened in order to K real scalars.
        A tensor of N elements is N losses, where `Tensor.backward` would raise.
    wrt : a module (its trainable parameters), tensors, or a mapping to tensors; by default every
        leaf of the graph, as `Tensor.backward` does. Others' `.grad` is not touched.
    weights : K finite numbers, by default ones.
    overwrite : as if `.grad` had been reset to None first, but into the buffers that are there.
        On large weights this spares the page faults of fresh buffers. Where no gradient arrives,
        `.grad` ends as None.
    retain_graph : keep the graph for further traversals; otherwise it is freed.
    method : `auto`, `summed` (a plain traversal) or `contract` (weight gradients of linear layers
        are computed inside the traversal, straight into `.grad`; refused where that is not exact).

    Raises
    ------
    RequestError : losses, weights, wrt or method break a rule; nothing has been changed.
    RuntimeError : from autograd, as from `Tensor.backward`, such as on a freed graph.

    Notes
    -----
    One traversal. Peak bytes are at most those of `torch.autograd.backward`; contraction makes no
    temporary of a weight's size. `auto` contracts only linear weights of 2^18 elements and more,
    met by 256 rows and fewer, whose `.grad` is there, dense and of the weight's dtype, and never
    where parameter hooks, checkpointing or torch.distributed could notice. It never depends on
    timing. Contracted gradients equal plain ones within the dtype's tolerance; their rounding may
    differ. Post hooks on a layer's node and prehooks on `AccumulateGrad` cannot be seen from
    Python: with those, use `method="summed"`.

    Examples
    --------
    >>> import torch, multiback as mb
    >>> weight = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> mb.backward([weight.sum(), (weight ** 2).sum()], weights=[1.0, 0.5])
    >>> weight.grad
    tensor([2., 3.])
    """
    check_method(method, SUM_METHODS)
    request = sum_request(losses, wrt=wrt, weights=weights, overwrite=overwrite, retain_graph=retain_graph)
    if request.wrt is not None and not graph.reaches(request.losses, request.wrt):
        raise RequestError(
            "wrt: must hold a tensor of the losses' graph; none of it is part of it, so nothing would arrive. Name the "
            "tensors that the forward used, not new views of them."
        )
    if method == "contract" or (method == "auto" and contract.worthwhile(request)):
        prepared = contract.prepare(request, any_size=method == "contract")
        if not isinstance(prepared, str):
            contract.run(request, prepared)
            return
        if method == "contract":
            raise RequestError(f'method: "contract" must be exact; {prepared}. Use method="auto" or "summed".')
    summed.run(request)

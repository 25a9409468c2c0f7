"""What users call to cut: an existing output, or a model and its data."""

from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from multiback.cuts.deferred import DeferredCut
from multiback.cuts.existing import Cut, refuse_inference_mode
from multiback.cuts.inference import Keep, Options, infer
from multiback.cuts.models import Model
from multiback.cuts.sources import Collate, source_of
from multiback.cuts.spanning import SpanningCut
from multiback.distributed import Group
from multiback.errors import OptionError
from multiback.nested import map_tensors
from multiback.planner import bytes_of

T = TypeVar("T")
_NOTHING: Any = object()
_BATCH = 256


@overload
def cut(output: T, /) -> Cut[T]: ...
@overload
def cut(
    model: Callable[..., Any],
    data: Any,
    /,
    *,
    batch_size: int = _BATCH,
    keep: Keep = "auto",
    budget: int | str | None = None,
    device: str | torch.device | None = None,
    keep_on: str | torch.device | None = None,
    collate_fn: Collate | None = None,
    workers: int = 0,
    progress: bool | None = None,
    group: None = None,
) -> DeferredCut: ...
@overload
def cut(
    model: Callable[..., Any],
    data: Any,
    /,
    *,
    batch_size: int = _BATCH,
    keep: Keep = "auto",
    budget: int | str | None = None,
    device: str | torch.device | None = None,
    keep_on: str | torch.device | None = None,
    collate_fn: Collate | None = None,
    workers: int = 0,
    progress: bool | None = None,
    group: Any,
) -> SpanningCut: ...
def cut(
    model: Any,
    data: Any = _NOTHING,
    /,
    *,
    batch_size: int = _BATCH,
    keep: Keep = "auto",
    budget: int | str | None = None,
    device: str | torch.device | None = None,
    keep_on: str | torch.device | None = None,
    collate_fn: Collate | None = None,
    workers: int = 0,
    progress: bool | None = None,
    group: Any = None,
) -> Any:
    """Infer first, back-propagate later: leaves stand in for outputs, so that losses on them are cheap.

    `mb.cut(output)` stands in for an output that has a graph; after any number of losses on its
    `value`, one traversal of the model follows. `mb.cut(model, data)` infers all rows in batches and
    keeps only the outputs; gradients run again just the rows that a loss touches.

    Parameters
    ----------
    model : the output, alone; or a module or function that is called on batches of the data: with a
        tensor as its argument, with a tuple's as arguments, with a dict's as keywords.
    data : a tensor, a tuple or dict of tensors, with the N rows in dimension 0 of each; or a map-style
        data set of N items, which is read again by number, so that it may be larger than memory.
    batch_size : rows inferred at once, and the most that are run again at once.
    keep : "recompute", "graph" (keep the graphs of all batches), or "auto": graphs if those of all
        batches are predicted to fit `budget`; a request for few rows runs them again all the same,
        where that takes fewer operations than a traversal of their batch's graph.
    budget : bytes, or a text such as "2GiB", that kept graphs may take; by default 1 GiB.
    device : where batches are run; by default where they are.
    keep_on : where outputs are kept, such as "cpu"; by default where they are made.
    collate_fn, workers : how items of a data set become a batch, and by how many processes, as for
        `torch.utils.data.DataLoader`.
    progress : show a progress line; by default where standard error is a terminal.
    group : a process group of torch.distributed, such as `torch.distributed.group.WORLD`. Each rank
        gives its own rows; `value` holds those of all, and gradients are of the sum of the ranks'
        losses, of parameters on every rank.

    Returns
    -------
    Cut, DeferredCut or, with a group, SpanningCut : `value`, `grad_of`, `grads_of`, `backward`.

    Raises
    ------
    OptionError, RequestError : an argument breaks its rule.

    Notes
    -----
    Rows are run again in inference's train or eval modes and autocast. A batch that drew random
    numbers (dropout) is run again whole, from the same state. Buffers end as inference left them, so
    batch norm's statistics are updated once; in train mode its batches are run again whole, and the
    gradient is that of the sum over these batches, not of one batch of N rows. What a forward writes
    elsewhere, and hooks on modules, happen again.

    Examples
    --------
    >>> import torch, multiback as mb
    >>> net, images = torch.nn.Linear(3, 2), torch.rand(8, 3)
    >>> cut = mb.cut(net, images, keep="recompute")
    >>> found = cut.grad_of(cut.value[5].square().sum())
    >>> found.rows, found.values.shape
    (tensor([5]), torch.Size([1, 3]))

    >>> with mb.cut(net(images)) as cut:
    ...     for row in cut.value:
    ...         row.square().sum().backward()
    >>> net.weight.grad.shape
    torch.Size([2, 3])
    """
    if data is _NOTHING:
        if callable(model) and not isinstance(model, Tensor):
            raise OptionError(
                f"data: must be given with a model; got {type(model).__name__} alone. Say mb.cut(model, data), or "
                "mb.cut(model(data))."
            )
        given = {
            **({"batch_size": batch_size} if batch_size != _BATCH else {}),
            **({"keep": keep} if keep != "auto" else {}),
            **{name: value for name, value in (("budget", budget), ("device", device), ("keep_on", keep_on)) if value},
            **{name: value for name, value in (("collate_fn", collate_fn), ("workers", workers)) if value},
            **({} if group is None else {"group": group}),
        }
        if given:
            raise OptionError(
                f"{next(iter(given))}: must go with a model and its data; got an output alone. Leave it out."
            )
        return Cut(model)
    if not callable(model) or isinstance(model, Tensor):
        raise OptionError(
            f"model: must be a module or a function where data follow; got {type(model).__name__}. Give an output "
            "alone: mb.cut(output)."
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise OptionError(f"batch_size: must be a positive whole number; got {batch_size!r}. Leave it out for 256.")
    if keep not in ("graph", "recompute", "auto"):
        raise OptionError(f'keep: must be one of graph, recompute, auto; got {keep!r}. Leave it out for "auto".')
    refuse_inference_mode()
    source = source_of(data, collate_fn, workers)
    target = None if device is None else _device("device", device)
    room = None if keep_on is None else _device("keep_on", keep_on)
    types = {p.device.type for p in model.parameters()} if isinstance(model, nn.Module) else set[str]()
    types |= {tensor.device.type for tensor in source.tensors} | ({target.type} if target else set())

    def move(group: Any) -> Any:
        return group if target is None else map_tensors(group, lambda tensor: tensor.to(target))

    options = Options(batch_size, keep, bytes_of(budget), room, progress)

    def made() -> DeferredCut:
        return DeferredCut(infer(Model(model, types), source, move, options), progress)

    if group is None:
        return made()
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise OptionError(
            "model: must be a plain module where a group is given, which sums gradients itself; got a "
            "DistributedDataParallel. Give its .module."
        )
    ranks = Group(group)
    return SpanningCut(ranks.together(made), ranks)


def _device(name: str, device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(1, device=found).tolist()
        return found
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        raise OptionError(f'{name}: must be a device of this machine such as "cpu"; got {device!r}.') from error

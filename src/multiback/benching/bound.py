"""A problem bound to this process: forward, losses, gradients, and everything put back after a run."""

import copy
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from multiback.benching.problems import Problem
from multiback.errors import ProblemError
from multiback.nested import called, dense, fresh, map_tensors, named_tensors, tensors_in
from multiback.records import Grads
from multiback.states import Randomness

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_SMALL_STATE = 1 << 20


class Bound:
    """One problem, ready to be run again and again from the same state.

    `begin` gives a run fresh data leaves and the asked `.grad` policy; `end` puts parameters,
    buffers, random number generators and `.grad` back. Copies of parameters and buffers are made
    only once something has written to them. What a way must make once and not in every run, such
    as a copy of the model, it puts into `kept`; what it returns, a function in `returned` brings
    into one list of tensors.
    """

    def __init__(self, problem: Problem, *, device: str = "cpu", dtype: torch.dtype | None = None) -> None:
        self._problem = _moved(problem, device, dtype)
        self.device = device
        self.model = self._problem.model
        functions = self._problem.losses
        self._functions: list[Callable[..., Any]] = list(functions) if isinstance(functions, Sequence) else [functions]
        self.modules = [part for part in (self.model, *self._functions) if isinstance(part, nn.Module)]
        named = [item for module in self.modules for item in module.named_parameters() if item[1].requires_grad]
        self._named = list({id(parameter): (name, parameter) for name, parameter in named}.values())
        self.parameters: list[Tensor] = [parameter for _, parameter in self._named]
        self._state = [t for module in self.modules for t in (*module.parameters(), *module.buffers())]
        self._attributes = [(child, _attributes(child)) for module in self.modules for child in module.modules()]
        self._saved = [tensor.detach().clone() for tensor in self._state]
        self._versions = [tensor._version for tensor in self._state]
        # writes through .data leave no trace in the version; small states are compared in full
        self._small = sum(tensor.numel() for tensor in self._state) <= _SMALL_STATE
        self._random = Randomness.read()
        self.data: Any = None
        self.returned: Callable[[], list[Tensor]] | None = None
        self.kept: dict[str, Any] = {}
        self._check()

    @cached_property
    def num_losses(self) -> int:
        """K, counted by one forward the first time; a process that times its first call must not ask."""
        outer, self.data = self.data, map_tensors(self._problem.data, fresh)
        try:
            return len(self.losses(self.forward()))
        finally:
            self._restore()
            self.data = outer

    # ---- running ---------------------------------------------------------------------------

    def begin(self, grads: Grads) -> None:
        """Fresh data leaves, and `.grad` as the policy says."""
        self.data = map_tensors(self._problem.data, fresh)
        self.reset_grads(grads)

    def end(self) -> None:
        """Put parameters, buffers, carried attributes, random state and `.grad` back."""
        self.returned = None
        self.data = None
        self._restore()

    def _restore(self) -> None:
        for module, attributes in self._attributes:
            _restore_attributes(module, attributes)
        with torch.no_grad():
            for index, (tensor, saved) in enumerate(zip(self._state, self._saved, strict=True)):
                # copying marks a tensor as changed, so what is unchanged must not be copied
                written = tensor._version != self._versions[index]
                if written or (self._small and not torch.equal(tensor, saved)):
                    tensor.detach().copy_(saved)
                    self._versions[index] = tensor._version
        self._random.restore()

    def in_float64(self) -> "Bound":
        """A copy of the problem in float64, in which rounding is told from a difference.

        Raises whatever copying or converting the user's model raises.
        """
        losses = [copy.deepcopy(function) for function in self._functions]
        for loss in losses:
            if isinstance(loss, nn.Module):
                loss.double()
        problem = Problem(copy.deepcopy(self.model), self._problem.data, losses, self._problem.targets)
        return Bound(problem, device=self.device, dtype=torch.float64)

    def reset_grads(self, grads: Grads) -> None:
        """None, as it stands (made where missing), or zeroed in place; for parameters and data alike."""
        for tensor in self.wrt:
            if grads == "none":
                tensor.grad = None
            elif tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
            elif grads == "prealloc":
                tensor.grad.zero_()

    def zero_grads(self) -> None:
        """Zero what `.grad` holds, in place, so that a run's gradients can be read from it."""
        for tensor in self.wrt:
            if tensor.grad is not None:
                tensor.grad.zero_()

    def forward(self, data: Any = None, model: Callable[..., Any] | None = None) -> Any:
        """The output on this run's data, or on `data`; by a copy of the model where one is given."""
        return called(model or self.model, self.data if data is None else data)

    def losses(self, output: Any) -> list[Tensor]:
        """All K scalar losses, in order."""
        found = [scalar for function in self._functions for scalar in self._scalars(function, output)]
        if not found:
            raise ProblemError("losses: must give at least one loss; got none. Return a tensor with elements.")
        return found

    def loss(self, index: int, output: Any) -> Tensor:
        """Loss `index` alone, without computing the others where each has a function of its own."""
        if self.num_losses == len(self._functions):
            return self._scalars(self._functions[index], output)[0]
        return self.losses(output)[index]

    def total(self, output: Any) -> Tensor:
        """The sum of all losses, as a user would write it: `l1 + l2`, or `l.sum()` for a vector."""
        total: Tensor | None = None
        for tensor in self.loss_tensors(output):
            part = tensor.sum() if tensor.ndim else tensor
            total = part if total is None else total + part
        if total is None:
            raise ProblemError("losses: must give at least one loss; got none. Return a tensor with elements.")
        return total

    def loss_tensors(self, output: Any, second: Any = None) -> list[Tensor]:
        """The loss functions' results as they are, unflattened and checked; `second` in place of data or targets."""
        return [tensor for function in self._functions for tensor in self._tensors(function, output, second)]

    def vector(self, output: Any, second: Any = None) -> Tensor:
        """All K losses in one tensor [K]."""
        tensors = self.loss_tensors(output, second)
        return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])

    # ---- rows ------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Rows of the data along dimension 0; 1 where no tensor has one."""
        shapes = [tensor.shape[0] for tensor in tensors_in(self._problem.data) if tensor.ndim]
        return shapes[0] if shapes else 1

    @property
    def has_row_losses(self) -> bool:
        """Whether one function gives one loss per row of the data, as far as their number tells."""
        return len(self._functions) == 1 and self.num_losses == self.num_rows

    def row_of(self, value: Any, row: int) -> Any:
        """`value` with every tensor of B rows cut to one row, keeping the dimension."""
        rows = self.num_rows
        return map_tensors(value, lambda t: t[row : row + 1] if t.ndim and t.shape[0] == rows else t)

    def row_loss(self, output_row: Any, row: int) -> Tensor:
        """The loss of one row, from that row's output and that row's data or targets."""
        scalars = self._scalars(self._functions[0], output_row, self.row_of(self.second, row))
        if len(self._functions) != 1 or len(scalars) != 1:
            raise ProblemError(
                f"losses: one row must give one loss, by one function; got {len(scalars)} from the first of "
                f'{len(self._functions)}. Give one function with reduction="none".'
            )
        return scalars[0]

    # ---- gradients -------------------------------------------------------------------------

    @property
    def wrt(self) -> list[Tensor]:
        """What gradients are taken of: trainable parameters, then this run's data that require grad."""
        return [*self.parameters, *(tensor for tensor in tensors_in(self.data) if tensor.requires_grad)]

    @property
    def parameter_names(self) -> list[str]:
        """The names of `parameters`, in order."""
        return [name for name, _ in self._named]

    def wrt_names(self) -> list[str]:
        """The names of `wrt`, in order."""
        return self.parameter_names + [name for name, t in named_tensors("data", self.data) if t.requires_grad]

    def gradients(self) -> list[Tensor]:
        """What a run answered, not copied: what it returned, else the gradients of `wrt`, zeros where there is none."""
        if self.returned is not None:
            return [dense(tensor.detach()) for tensor in self.returned()]
        grads = [(tensor, tensor.grad) for tensor in self.wrt]
        return [torch.zeros_like(tensor) if grad is None else dense(grad.detach()) for tensor, grad in grads]

    def shapes(self) -> tuple[dict[str, list[int]], dict[str, str]]:
        """Shapes and dtypes of the data tensors, by name."""
        tensors = dict(named_tensors("data", self._problem.data))
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
        return {name: list(tensor.shape) for name, tensor in tensors.items()}, dtypes

    def inputs(self) -> list[Tensor]:
        """All tensors of this run's data and targets, for telling inputs from saved values."""
        return [*tensors_in(self.data), *tensors_in(self._problem.targets)]

    def carried(self) -> list[tuple[str, Tensor]]:
        """Tensors with a graph that sit in the model's attributes or buffers, by name."""
        if not isinstance(self.model, nn.Module):
            return []
        return [
            (name, tensor)
            for prefix, module in self.model.named_modules()
            for attribute, value in (*module.__dict__.items(), *module.named_buffers(recurse=False))
            if attribute not in _REGISTRIES
            for name, tensor in named_tensors(f"{prefix}.{attribute}" if prefix else attribute, value)
            if tensor.grad_fn is not None
        ]

    def detach_carried(self) -> None:
        """Detach every carried tensor, in the attribute where it sits."""
        if not isinstance(self.model, nn.Module):
            return
        for module in self.model.modules():
            for attribute, value in [*module.__dict__.items(), *module.named_buffers(recurse=False)]:
                if attribute not in _REGISTRIES and any(t.grad_fn is not None for t in tensors_in(value)):
                    setattr(module, attribute, map_tensors(value, Tensor.detach))

    # ---- inside ----------------------------------------------------------------------------

    @property
    def second(self) -> Any:
        """What losses take beside the output: the targets, or else this run's data."""
        return self.data if self._problem.targets is None else self._problem.targets

    def _tensors(self, function: Callable[..., Any], output: Any, second: Any = None) -> list[Tensor]:
        result = function(output, self.second if second is None else second)
        tensors = list(result) if isinstance(result, (list, tuple)) else [result]
        for number, tensor in enumerate(tensors, 1):
            _check_loss(tensor, f"loss {number}" if len(tensors) > 1 else "the loss", function)
        return tensors

    def _scalars(self, function: Callable[..., Any], output: Any, second: Any = None) -> list[Tensor]:
        return [scalar for tensor in self._tensors(function, output, second) for scalar in _flat(tensor)]

    def _check(self) -> None:
        if not callable(self.model):
            raise ProblemError(f"model: must be callable; got {type(self.model).__name__}. Give an nn.Module.")
        for function in self._functions:
            if not callable(function):
                raise ProblemError(
                    f"losses: must be a function or a sequence of functions; got {type(function).__name__}. "
                    "Give functions `(output, data) -> tensor`."
                )
        data = tensors_in(self._problem.data)
        if not data:
            raise ProblemError("data: must hold at least one tensor; got none. Give a tensor, a tuple or a dict.")
        if not self.parameters and not any(tensor.requires_grad for tensor in data):
            raise ProblemError(
                "model: must have a trainable parameter, or data that require grad; got neither. "
                "Set requires_grad_() on the parameters or on the data."
            )


def _flat(tensor: Tensor) -> list[Tensor]:
    """The elements of a tensor as scalars, each by plain indexing as a user's loop would take it."""
    if tensor.ndim == 0:
        return [tensor]
    flat = tensor.flatten() if tensor.ndim > 1 else tensor
    return [flat[index] for index in range(flat.shape[0])]


def _check_loss(tensor: Any, name: str, function: Callable[..., Any]) -> None:
    where = f"losses: {name} of {getattr(function, '__name__', type(function).__name__)}"
    if not isinstance(tensor, Tensor):
        raise ProblemError(f"{where} must be a tensor; got {type(tensor).__name__}. Return a tensor or several.")
    if tensor.is_complex():
        raise ProblemError(f"{where} must be real; got {tensor.dtype}. Take .real or .abs() of it.")
    if not tensor.is_floating_point():
        raise ProblemError(f"{where} must be floating; got {tensor.dtype}. Compute it from the output.")
    if not tensor.requires_grad:
        raise ProblemError(
            f"{where} must have a graph; nothing that requires grad leads to it. "
            "Compute it from the output, without detach() or no_grad()."
        )


def _moved(problem: Problem, device: str, dtype: torch.dtype | None) -> Problem:
    """The problem on `device`, floating tensors in `dtype`."""

    def move(tensor: Tensor) -> Tensor:
        wanted = dtype if tensor.is_floating_point() else None
        moved = tensor.detach().to(device, wanted or tensor.dtype)
        return moved.requires_grad_(tensor.requires_grad and moved.is_floating_point())

    model = problem.model
    if isinstance(model, nn.Module):
        model = model.to(device) if dtype is None else model.to(device, dtype)
    return Problem(model, map_tensors(problem.data, move), problem.losses, map_tensors(problem.targets, move))


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """A module's attributes, its registries of parameters and buffers included; lists and dicts with a copy."""
    return {
        name: (value, value.copy() if isinstance(value, (list, dict)) else None)
        for name, value in module.__dict__.items()
    }


def _restore_attributes(module: nn.Module, attributes: dict[str, tuple[Any, Any]]) -> None:
    """Undo what a run assigned to a module's attributes, such as a hidden state that it carries."""
    for name in [name for name in module.__dict__ if name not in attributes]:
        del module.__dict__[name]
    for name, (value, kept) in attributes.items():
        module.__dict__[name] = value
        if isinstance(value, list):
            value[:] = kept
        elif isinstance(value, dict) and value.keys() | kept.keys():
            value.clear()
            value.update(kept)

"""The model of a cut: its modules, parameters, buffers and modes, and running it again as it was."""

import itertools
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multiback.cuts import fingerprints
from multiback.cuts.fingerprints import Fingerprints
from multiback.cuts.globally import hearing_of_hooks, plain_attention
from multiback.cuts.naming import modules_of, name_of, runs_compiled
from multiback.errors import OptionError, StaleForwardError
from multiback.nested import called, map_tensors
from multiback.states import Attributes, Autocast, Buffer, BufferValues, Modes, Randomness, buffers_of, random_kept


@dataclass(frozen=True, eq=False)
class Replayed:
    """Buffers and plain attributes that a forward changes, as they were before it."""

    buffers: BufferValues
    attributes: Attributes

    def restore(self) -> None:
        """Put them back."""
        self.buffers.restore()
        self.attributes.restore()


class Model:
    """A callable, and the modules that it has been seen to run, as they stood when they were first met.

    Of a module all parts are known beforehand, and of a function the modules that it names; others are
    met when they are called.
    Parameters that belong to no module are added when a graph shows them.

    Attributes
    ----------
    hooks_tensors : whether it puts hooks on tensors as it runs.
    leaves : parameters and other leaves that require grad, once inference is over.
    needs_copy : whether it writes to its data, so that it must be given copies of the leaves.
    """

    def __init__(self, call: Callable[..., Any], device_types: Iterable[str]) -> None:
        self._call = call
        self._autocast = Autocast.read(device_types)
        self.modes = Modes()
        self._modules: list[nn.Module] = []
        self._buffers: list[Buffer] = []
        self._fresh: list[Buffer] = []  # not yet seen through a forward
        self._written: dict[Buffer, None] = {}
        self._parts: list[tuple[str, nn.Module, dict[str, nn.Module | None]]] = []
        self._places: list[tuple[nn.Module, str, Tensor | None, str, bool]] = []
        self._unwritten: list[tuple[Buffer, Tensor]] = []
        self._before: Fingerprints | None = None
        self._outset: tuple[Randomness, BufferValues, Attributes] | None = None
        self._attributes: Attributes | None = None
        self.leaves: list[Tensor] = []
        self.needs_copy = self.hooks_tensors = False
        for module in modules_of(call):
            self._meet(module, BufferValues())

    def _meet(self, module: nn.Module, held: BufferValues) -> None:
        """Take in a module that is about to run for the first time."""
        if module in self.modes:
            return
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            raise OptionError(
                f"model: must be made of Python modules, whose state can be put back; got {type(module).__name__} with "
                "a part that torch.jit has compiled. Give the module that was compiled, or cut its output."
            )
        self._modules.append(module)
        self.modes.add(module)
        known = {(id(buffer.module), buffer.key) for buffer in self._buffers}
        found = [buffer for buffer in buffers_of([module]) if (id(buffer.module), buffer.key) not in known]
        self._buffers += found
        self._fresh += found
        held.add(found)

    @property
    def computing_dtypes(self) -> list[torch.dtype]:
        """The dtypes in which it may compute: its parameters' and autocast's."""
        found = {p.dtype for module in self._modules for p in module.parameters() if p.is_floating_point()}
        return [*found, *self._autocast.dtypes]

    def infer(self, data: Any) -> tuple[Any, Randomness | None, "Replayed"]:
        """The output, with a graph, and what is needed to have it again: random state, if any was drawn, and the rest.

        After an exception, random state, buffers and attributes are as before the first batch.
        """
        random, held = Randomness.read(), BufferValues([*self._written, *self._fresh])
        versions = [(buffer, buffer.version) for buffer in self._buffers]
        attributes = Attributes(self._modules)
        if self._outset is None:
            self._outset = random, BufferValues(), attributes
        try:
            with torch.enable_grad(), plain_attention(), self._meeting(held):
                output = called(self._call, self._given(data))
        except BaseException:
            held.restore()
            attributes.restore()
            self.undo()
            raise
        changed = held.changed()
        self._outset[1].take_over(held.only(changed))
        self._written.update(dict.fromkeys(changed))
        self._written.update(dict.fromkeys(buffer for buffer, version in versions if buffer.version != version))
        self._fresh.clear()
        drawn = not random.same_as(Randomness.read())
        replayed = [buffer for buffer in self._written if not _is_running_statistic(buffer)]
        return output, random if drawn else None, Replayed(held.only(replayed), attributes.changed())

    def undo(self) -> None:
        """Random state, buffers and attributes as before the first batch."""
        if self._outset is not None:
            for state in self._outset:
                state.restore()

    @contextmanager
    def _meeting(self, held: BufferValues) -> Generator[None]:
        """Take in every module that this thread calls, and notice hooks that it puts on tensors."""
        thread = threading.get_ident()

        def meet(module: nn.Module, _args: object) -> None:
            if threading.get_ident() == thread:
                self._meet(module, held)

        if runs_compiled(self._call):  # whose code such a hook would break up
            yield
            return

        def tell() -> None:
            self.hooks_tensors = True

        handle = nn.modules.module.register_module_forward_pre_hook(meet)
        try:
            with hearing_of_hooks(tell):
                yield
        finally:
            handle.remove()

    def _given(self, data: Any) -> Any:
        return map_tensors(data, torch.clone) if self.needs_copy else data

    def settle(self, leaves: Iterable[Tensor]) -> None:
        """Remember what parameters and buffers hold, once inference is over; `leaves` are a graph's."""
        self._outset = None
        named: dict[int, tuple[Callable[[], str], Tensor]] = {}
        for root in self._modules:
            for prefix, module in root.named_modules():
                self._parts.append((prefix, module, dict(module._modules)))
                for key, parameter in module._parameters.items():
                    name = f'parameter "{prefix}.{key}"' if prefix else f'parameter "{key}"'
                    trained = parameter is not None and parameter.requires_grad
                    self._places.append((module, key, parameter, name, trained))
                    if parameter is not None:
                        named.setdefault(id(parameter), (lambda name=name: name, parameter))
        for leaf in leaves:
            named.setdefault(id(leaf), (lambda leaf=leaf: name_of(leaf), leaf))
        for buffer in self._buffers:
            tensor = buffer.tensor
            if tensor is not None and buffer not in self._written and not _is_running_statistic(buffer):
                self._unwritten.append((buffer, tensor))
                named.setdefault(id(tensor), (lambda buffer=buffer: f'buffer "{buffer.name}"', tensor))
        self.leaves = [tensor for _, tensor in named.values() if tensor.requires_grad and tensor.is_leaf]
        self._before = Fingerprints(list(named.values()))
        self._attributes = Attributes(self._modules)

    def described_leaves(self) -> list[tuple[str, list[int], str, int | None]]:
        """Of every leaf its name in a module, or else a fingerprint of its values; its shape and dtype."""
        names = {id(tensor): name for _, _, tensor, name, _ in self._places}
        found = []
        for leaf in self.leaves:
            name = names.get(id(leaf), "")
            value = None if name else fingerprints.of_tensor(leaf)
            found.append((name, list(leaf.shape), str(leaf.dtype), None if value is None else int(value)))
        return found

    def check_unchanged(self) -> None:
        """StaleForwardError where a parameter or a buffer is not as it was at inference."""
        changed = self._replaced() or (None if self._before is None else self._before.changed())
        if changed is not None:
            raise StaleForwardError(
                f"cut: must be used before the model changes; {changed} has changed since inference, so this forward's "
                "gradient is stale. Ask for all gradients before the step, or make a new cut after it."
            )

    def _replaced(self) -> str | None:
        """The name of the first module or parameter that is another object than at inference."""
        for prefix, module, children in self._parts:
            now = module._modules
            if (now or children) and [*now, *map(id, now.values())] != [*children, *map(id, children.values())]:
                pairs = itertools.zip_longest(now.items(), children.items(), fillvalue=("", None))
                key = next(one[0] or other[0] for one, other in pairs if not _is_one(one, other))
                return f'module "{prefix}.{key}"' if prefix else f'module "{key}"'
        for module, key, tensor, name, trained in self._places:
            if module._parameters.get(key) is not tensor or (tensor is not None and tensor.requires_grad != trained):
                return name
        for buffer, tensor in self._unwritten:
            if buffer.tensor is not tensor:
                return f'buffer "{buffer.name}"'
        return None if self._attributes is None else self._attributes.differing()

    def has_backward_hooks(self) -> bool:
        """Whether it has put hooks on tensors as it ran, or has modules with hooks on their backward."""
        parts = (part for root in self._modules for part in root.modules())
        return self.hooks_tensors or any(part._backward_hooks or part._backward_pre_hooks for part in parts)

    def acting_on_grad(self) -> str | None:
        """The name of a parameter with a post-accumulate hook, such as one that steps an optimiser."""
        return next(
            (name for _, _, one, name, _ in self._places if getattr(one, "_post_accumulate_grad_hooks", None)), None
        )

    def hooked(self) -> str | None:
        """The name of a parameter with a hook on its gradient."""
        return next((name for _, _, one, name, _ in self._places if getattr(one, "_backward_hooks", None)), None)

    @contextmanager
    def again(
        self, random: Randomness | None, replayed: Replayed, *, tried: bool = False
    ) -> Generator[Callable[[Any], Any]]:
        """Run it with a graph, in the modes and autocast of inference, from its state then.

        What it writes to buffers and attributes, and draws, is undone when the context is left, after
        the traversal. One that has been `tried` is expected to draw nothing.
        """
        with self.undisturbed(quick=tried):
            if random is not None:
                random.restore()
            replayed.restore()
            yield self._run

    @contextmanager
    def undisturbed(self, *, quick: bool = True) -> Generator[None]:
        """In the modes of inference; buffers, attributes and generators are put back, as parts may run forward again.

        `quick` where no numbers are expected to be drawn.
        """
        outer = BufferValues(self._written)
        attributes = Attributes(self._modules) if self._attributes is None else self._attributes
        with random_kept(quick=quick), self.modes.replayed():
            try:
                yield
            finally:
                outer.restore()
                attributes.restore()

    @contextmanager
    def without_hooks_on_parameters(self) -> Generator[None]:
        """Gradients that are no loss's must not reach the program's hooks."""
        parameters = (parameter for root in self._modules for parameter in root.parameters())
        hooks = [one._backward_hooks for one in parameters if getattr(one, "_backward_hooks", None)]
        put_off = [(found, dict(found)) for found in hooks]
        try:
            for found, _ in put_off:
                found.clear()
            yield
        finally:
            for found, those in put_off:
                found.update(those)

    def _run(self, data: Any) -> Any:
        with torch.enable_grad(), self._autocast.replayed(), plain_attention():
            return called(self._call, self._given(data))


def _is_one(one: tuple[str, object], other: tuple[str, object]) -> bool:
    """Whether two children are the same object under the same name."""
    return one[0] == other[0] and one[1] is other[1]


def _is_running_statistic(buffer: Buffer) -> bool:
    """Whether it is a batch norm's statistic that train mode only writes."""
    return isinstance(buffer.module, nn.modules.batchnorm._NormBase) and buffer.module.training

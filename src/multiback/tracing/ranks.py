"""DistributedDataParallel: backwards since each forward that should be reduced, and what ranks end with."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multiback.traces import Evidence, Place
from multiback.tracing import places


class Ranks:
    """Watches the forwards of DDP modules; `undo` puts their class back."""

    def __init__(self, active: Callable[[], bool], fault: Callable[[str, Exception], None]) -> None:
        self._modules: dict[int, tuple[weakref.ref[Any], Place, bool, int]] = {}
        self._of: dict[int, int] = {}
        self.undo: Callable[[], None] = lambda: None
        self.checksums: dict[str, float] = {}
        if torch.distributed.is_available():
            self._patch(active, fault)

    def _patch(self, active: Callable[[], bool], fault: Callable[[str, Exception], None]) -> None:
        kind: Any = torch.nn.parallel.DistributedDataParallel
        original = kind.forward

        def forward(module: Any, *args: Any, **options: Any) -> Any:
            if active():
                try:
                    self._begun(module)
                except Exception as error:
                    fault("at a DDP forward", error)
            return original(module, *args, **options)

        kind.forward = forward

        def undo() -> None:
            if kind.forward is forward:
                kind.forward = original

        self.undo = undo

    def _begun(self, module: Any) -> None:
        if not torch.is_grad_enabled():
            return
        place = places.place_of(places.caller(places.current()))
        reduced = bool(module.require_backward_grad_sync)
        self._modules[id(module)] = (weakref.ref(module), place, reduced, 0)
        self._of.update({id(parameter): id(module) for parameter in module.parameters()})

    def after(self, leaves: list[Tensor], place: Place, see: Callable[[Evidence], None]) -> None:
        """A backward has reached these leaves."""
        for key in {self._of[id(leaf)] for leaf in leaves if id(leaf) in self._of}:
            module, forward, reduced, count = self._modules[key]
            self._modules[key] = (module, forward, reduced, count + 1)
            if count and reduced and module() is not None:
                total = sum(float(leaf.grad.double().sum()) for leaf in leaves if leaf.grad is not None)
                self.checksums.setdefault(str(place), total)
                example = {"backwards": count + 1, "forward": forward.short}
                see(Evidence(code="unreduced-ranks", place=place, example=example))

"""DistributedDataParallel: backwards since each forward that should be reduced, and what ranks end with."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multiback.traces import Evidence, Place
from multiback.tracing import places

_SEVERAL = 2  # ranks


class Ranks:
    """What is known of the DDP modules whose forwards and backwards this process has seen."""

    def __init__(self) -> None:
        self._modules: dict[int, tuple[weakref.ref[Any], Place, bool, int]] = {}
        self._of: dict[int, int] = {}
        self.checksums: dict[str, float] = {}

    def begun(self, module: Any) -> None:
        """A forward is about to run."""
        if not torch.is_grad_enabled():
            return
        place = places.place_of(places.caller(places.current()))
        alone = torch.distributed.get_world_size(module.process_group) < _SEVERAL
        reduced = bool(module.require_backward_grad_sync) and not alone
        gone = {key for key, (known, *_) in self._modules.items() if known() is None}
        self._modules = {key: known for key, known in self._modules.items() if key not in gone}
        self._of = {leaf: key for leaf, key in self._of.items() if key not in gone} if gone else self._of
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

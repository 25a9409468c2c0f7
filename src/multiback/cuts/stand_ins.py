"""The leaves that stand in for a cut's outputs: what accumulates on them, and a warning where it is lost."""

import warnings
import weakref
from abc import ABC, abstractmethod
from types import TracebackType

from torch import Tensor
from typing_extensions import Self

from multiback.cuts.cotangents import STAND_INS
from multiback.errors import ForgottenBackwardWarning, RequestError


class StandIns(ABC):
    """What both cuts do with their leaves."""

    _leaves: list[Tensor]

    @abstractmethod
    def backward(self, *, retain_graph: bool = False) -> None:
        """Send what has accumulated on to the model."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        failed = error is not None or kind is not None
        waits = self._waits(failed=failed)
        if failed:
            self._forgotten.detach()
        elif waits:
            self.backward()

    def _waits(self, *, failed: bool) -> bool:
        """Whether a block that ends, or has `failed`, leaves gradient to be sent on."""
        return not failed and any(leaf.grad is not None for leaf in self._leaves)

    def _watch(self, leaves: list[Tensor]) -> None:
        """Warn where a gradient on these leaves never reaches the model."""
        for leaf in leaves:
            STAND_INS[leaf] = True
        self._forgotten = weakref.finalize(self, _warn_forgotten, leaves)
        weakref.finalize(self, _watch_orphans, leaves).atexit = False

    def _accumulated(self) -> list[Tensor | None]:
        """The gradient on every leaf; RequestError where there is none at all."""
        gradients = [leaf.grad for leaf in self._leaves]
        if all(gradient is None for gradient in gradients):
            raise RequestError(
                "cut.backward(): must follow a loss on cut.value; no gradient has arrived there since it was made or "
                "last used up. Call loss.backward() on losses computed from cut.value first."
            )
        return gradients

    def _use_up(self) -> None:
        """Losses that follow start afresh."""
        for leaf in self._leaves:
            leaf.grad = None
        self._forgotten = weakref.finalize(self, _warn_forgotten, self._leaves)


def _watch_orphans(leaves: list[Tensor]) -> None:
    """Warn from now on, since their cut has gone, of a gradient that arrives on stand-ins."""
    for leaf in leaves:
        if leaf.requires_grad:
            leaf.register_hook(_warn_orphan)


def _warn_orphan(_gradient: Tensor) -> None:
    warnings.warn(
        ForgottenBackwardWarning(
            "a gradient arrives on the value of a cut that is gone, so it cannot reach the model. Keep the cut until "
            "its backward()."
        ),
        stacklevel=2,
    )


def _warn_forgotten(leaves: list[Tensor]) -> None:
    """Warn of gradients on stand-ins that never went on to the model."""
    if any(leaf.grad is not None for leaf in leaves):
        warnings.warn(
            ForgottenBackwardWarning(
                "a cut ends with gradient on its value that never reached the model. Call cut.backward() after the "
                "losses, or use it as `with mb.cut(...) as cut:`."
            ),
            stacklevel=2,
        )

"""The one patch of torch that all recordings of a process share: the engine's entry, optimiser steps, DDP forwards."""

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch._guards
from torch.optim import optimizer as optimizers

from multiback.tracing.hiding import untraced

Engine = Callable[..., Any]


class Listener(Protocol):
    """What a recording hears."""

    def call(self, engine: Engine, outputs: Any, *args: Any, **options: Any) -> Any:
        """Run the engine as asked."""

    def inside(self, outputs: Any, args: tuple[Any, ...]) -> None:
        """A call inside another one is about to run."""

    def before_step(self, optimizer: Any) -> None:
        """An optimiser is about to step."""

    def after_step(self, optimizer: Any) -> None:
        """It has stepped."""

    def forward(self, module: Any) -> None:
        """A DDP module's forward is about to run."""

    def forked(self) -> None:
        """The process is a child of the one that began to listen."""


class Patches:
    """In place while anybody listens; what others have patched over them since passes through and stays theirs."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._undo: list[Callable[[], None]] = []
        self._lock = threading.RLock()  # a signal handler may begin a recording of its own
        self._stepping = 0
        self._patch_number = 0

    def add(self, listener: Listener) -> None:
        """Let it hear."""
        with self._lock:
            self._listeners = (*self._listeners, listener)
            if not self._undo:
                self._patch()

    def remove(self, listener: Listener) -> None:
        """Let it hear no more; the last one takes the patches along, once no optimiser is within a step.

        Torch goes through its table of hooks during a step, which must not change then.
        """
        with self._lock:
            self._listeners = tuple(one for one in self._listeners if one is not listener)
            self._unpatch_if_unused()

    def _unpatch_if_unused(self) -> None:
        with self._lock:
            if not self._listeners and not self._stepping:
                for undo in reversed(self._undo):
                    undo()
                self._undo.clear()

    def _patch(self) -> None:
        self._patch_number += 1
        self._undo = [_replace(torch.autograd, "_engine_run_backward", self._engine)]
        if torch.distributed.is_available():
            self._undo.append(_replace(torch.nn.parallel.DistributedDataParallel, "forward", self._forward))

        def before_step(optimizer: Any, _args: Any, _options: Any) -> None:
            self._stepping += 1
            for listener in self._listeners:
                listener.before_step(optimizer)

        def after_step(optimizer: Any, _args: Any, _options: Any) -> None:
            for listener in self._listeners:
                listener.after_step(optimizer)
            self._stepping = max(0, self._stepping - 1)

        before = optimizers.register_optimizer_step_pre_hook(untraced(before_step))
        after = optimizers.register_optimizer_step_post_hook(untraced(after_step))
        self._undo += [before.remove, after.remove]

    def _engine(self, engine: Engine) -> Engine:
        mine = self._patch_number

        def watched(outputs: Any, *args: Any, **options: Any) -> Any:
            if not self._listeners:  # the last one ended within a step
                self._stepping = 0
                self._unpatch_if_unused()
            if mine != self._patch_number:  # somebody who wraps the engine has kept an earlier patch of ours
                return engine(outputs, *args, **options)
            if torch._C._current_graph_task_id() != -1:
                for listener in self._listeners:
                    listener.inside(outputs, args)
                return engine(outputs, *args, **options)
            if torch._C._functorch.peek_interpreter_stack() is not None or _is_compiling():
                return engine(outputs, *args, **options)
            run = engine
            for listener in self._listeners:
                run = functools.partial(listener.call, run)
            return run(outputs, *args, **options)

        return untraced(watched, through=True)

    def _forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        mine = self._patch_number

        @functools.wraps(forward)
        def watched(module: Any, *args: Any, **options: Any) -> Any:
            for listener in self._listeners if mine == self._patch_number else ():
                listener.forward(module)
            return forward(module, *args, **options)

        return untraced(watched, through=True)

    def forked(self) -> None:
        """In a child: nobody listens here, and a lock may be held by a thread that is not."""
        listeners, self._listeners = self._listeners, ()
        self._lock = threading.RLock()
        for listener in listeners:
            listener.forked()
        self._unpatch_if_unused()


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Put another callable in the place of one; gives what puts it back, unless somebody has replaced it since."""
    original = getattr(owner, name)
    made = make(original)
    setattr(owner, name, made)

    def undo() -> None:
        if getattr(owner, name) is made:
            setattr(owner, name, original)

    return undo


def _is_compiling() -> bool:
    """Whether torch.compile is making a graph, for which it calls the engine itself."""
    return torch._guards.TracingContext.try_get() is not None


PATCHES = Patches()
os.register_at_fork(after_in_child=PATCHES.forked)

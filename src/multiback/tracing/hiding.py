"""Keeps the recorder's own work from modes, tensor subclasses and torch.compile."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def unseen() -> Generator[None]:
    """Operations of the recorder's own, which the program's modes and tensor subclasses do not hear of."""
    with torch._C.DisableTorchFunctionSubclass():
        if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                yield
        else:
            yield


def untraced(function: F, *, through: bool = False) -> F:
    """The function, into which torch.compile does not look, nor into what it calls unless that goes `through` to torch.

    As `torch.compiler.disable` says it, whose import of the compiler takes a second.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        action = frames._FrameAction
        below = action.DEFAULT if through else action.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(action.SKIP, below))
    return function

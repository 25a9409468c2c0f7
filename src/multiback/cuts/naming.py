"""Finds what a program calls a tensor: the longest dotted name in any module that is alive."""

import gc

from torch import Tensor, nn


def name_of(tensor: Tensor) -> str:
    """How a message calls a leaf: its name in a module that holds it, else its shape.

    Looks through every object alive, some 50 milliseconds: for messages alone.
    """
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    children = {id(child) for module in modules for child in module._modules.values()}
    names = [
        f'parameter "{name}" of {type(root).__name__}'
        for root in modules
        if id(root) not in children
        for name, parameter in root.named_parameters(remove_duplicate=False)
        if parameter is tensor
    ]
    return max(names, key=len, default=f"a leaf of shape {list(tensor.shape)}")

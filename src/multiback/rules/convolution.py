"""Convolutions, one to three dimensions, transposed or not, in any grouping.

The weight gradients of G groups of images are one convolution backward with the groups folded into
the convolution's own (`torch.ops.aten.convolution_backward`); that costs about what one ordinary
weight gradient costs, where unfolding costs several times that.
"""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from multiback.rules.site import Site, Use, use_of

KINDS = ("ConvolutionBackward0",)


class ConvolutionSite(Site):
    """One convolution; a unit is an image."""

    copies = 5  # folded, and laid out anew by the library that convolves

    @override
    def _unit_size(self) -> int:
        size = 1
        for extent in self.shape[1:]:
            size *= extent
        return size

    @override
    def _rest(self) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    @override
    def raw_names(self) -> tuple[str, ...]:
        return ("_raw_saved_input",) if any(use.role == "weight" for use in self.uses) else ()

    @override
    def saved(self) -> Tensor | None:
        return self.node._saved_input if self.raw_names else None

    @override
    def contract(self, use: Use, cotangent: Tensor, saved: Tensor | None, out: Tensor | None = None) -> Tensor:
        if use.role == "bias":
            return cotangent.flatten(3).sum((1, 3)) if cotangent.ndim > 3 else cotangent.sum(1)
        if saved is None:
            raise AssertionError("a weight's site reads its input")
        if saved.shape[0] == 1 and cotangent.shape[0] > 1:
            if not self.node._saved_transposed:
                return self._shared(use, cotangent, saved[0])
            saved = saved.expand(cotangent.shape[0], *saved.shape[1:])
        groups, images, channels = cotangent.shape[0], cotangent.shape[1], saved.shape[2]
        if images > groups or (channels <= 4 and images >= 4):  # measured: few groups are quicker one by one
            leading = use.shape[0]
            return torch.stack([self._gradient(g, a, leading, use, 1) for g, a in zip(cotangent, saved, strict=True)])
        weight = self._gradient(_fold(cotangent), _fold(saved), groups * use.shape[0], use, groups)
        return weight.reshape(groups, *use.shape)

    def _shared(self, use: Use, cotangent: Tensor, saved: Tensor) -> Tensor:
        """All groups meet the same images: they become more output channels of every channel group."""
        groups, images, channels = cotangent.shape[:3]
        own = self.node._saved_groups
        spatial = cotangent.shape[3:]
        folded = cotangent.reshape(groups, images, own, channels // own, *spatial).movedim(0, 2)
        folded = folded.reshape(images, groups * channels, *spatial)
        weight = self._gradient(folded, saved, groups * channels, use, 1)
        weight = weight.reshape(own, groups, channels // own, *use.shape[1:]).movedim(1, 0)
        return weight.reshape(groups, *use.shape)

    def _gradient(self, cotangent: Tensor, images: Tensor, leading: int, use: Use, factor: int) -> Tensor:
        node = self.node
        empty = torch.empty(leading, *use.shape[1:], dtype=cotangent.dtype, device=cotangent.device)
        return torch.ops.aten.convolution_backward(
            cotangent,
            images,
            empty,
            None,
            node._saved_stride,
            node._saved_padding,
            node._saved_dilation,
            node._saved_transposed,
            node._saved_output_padding,
            factor * node._saved_groups,
            [False, True, False],
        )[1]


def _fold(images: Tensor) -> Tensor:
    """[G, n, C, ...] as n images of G * C channels."""
    groups, count, channels = images.shape[:3]
    if count == 1:
        return images.reshape(1, groups * channels, *images.shape[3:])
    return images.transpose(0, 1).reshape(count, groups * channels, *images.shape[3:])


def match(node: Any) -> Site | None:
    """The site of a convolution whose weight or bias is a leaf; None where neither is used."""
    found = [use for use in (use_of(node, 1, "weight"), use_of(node, 2, "bias")) if use is not None]
    return ConvolutionSite(node, found) if found else None

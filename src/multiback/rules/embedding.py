"""Embeddings: the gradients of looked-up rows, added to the rows that were looked up."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from multiback.rules.site import Site, Use, pair_sums, use_of

KINDS = ("EmbeddingBackward0",)


class EmbeddingSite(Site):
    """One look-up; a unit is an index."""

    @override
    def _unit_size(self) -> int:
        return self.shape[-1]

    @property
    @override
    def raw_names(self) -> tuple[str, ...]:
        return ("_raw_saved_indices",)

    @override
    def saved(self) -> Tensor | None:
        return self.node._saved_indices.reshape(-1)

    def _padded(self, cotangent: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
        """Both as [G, n, ...], with nothing from the padding index."""
        indices = saved.expand(cotangent.shape[0], -1)
        padding = self.node._saved_padding_idx
        if padding < self.uses[0].shape[0]:  # "no padding", -1, appears as 2^64 - 1
            cotangent = cotangent.masked_fill((indices == padding).unsqueeze(-1), 0)
        return cotangent, indices

    @override
    def contract(self, use: Use, cotangent: Tensor, saved: Tensor | None, out: Tensor | None = None) -> Tensor:
        if saved is None:
            raise AssertionError("an embedding's site reads its indices")
        cotangent, indices = self._padded(cotangent, saved)
        found = cotangent.new_zeros(cotangent.shape[0], *use.shape) if out is None else out.zero_()
        if saved.shape[0] == 1 and cotangent.shape[0] > 1:
            return found.index_add_(1, saved[0], cotangent)
        return found.scatter_add_(1, indices.unsqueeze(-1).expand_as(cotangent), cotangent)

    @override
    def gram(self, use: Use, cotangent: Tensor, saved: Tensor | None) -> Tensor:
        groups, count, width = cotangent.shape
        if saved is None or (groups * count) ** 2 > groups * use.numel:
            return super().gram(use, cotangent, saved)
        cotangent, indices = self._padded(cotangent, saved)
        flat, looked = cotangent.reshape(-1, width), indices.reshape(-1)
        return pair_sums((flat @ flat.t()) * (looked[:, None] == looked[None]), groups)

    @override
    def squares(self, use: Use, cotangent: Tensor, saved: Tensor | None) -> Tensor:
        if saved is None or cotangent.shape[1] ** 2 > use.numel:
            return super().squares(use, cotangent, saved)
        cotangent, indices = self._padded(cotangent, saved)
        same = indices[:, :, None] == indices[:, None, :]
        return (torch.bmm(cotangent, cotangent.mT) * same).sum((1, 2))


def match(node: Any) -> Site | None:
    """The site of a dense look-up; None for others.

    `scale_grad_by_freq` divides by counts over the whole batch, so that its rows are not independent.
    """
    if node._saved_sparse or node._saved_scale_grad_by_freq:
        return None
    use = use_of(node, 0, "weight")
    return EmbeddingSite(node, [use]) if use is not None else None

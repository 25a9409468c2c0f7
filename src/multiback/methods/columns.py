"""Gradients of several losses in a form that has not been multiplied out: what every method hands over."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multiback.independence.owners import Cyclic, Owners, Part
from multiback.request import Target
from multiback.rules.site import Site, Use, matrix


@dataclass(frozen=True, eq=False)
class Contraction:
    """One site's part in the gradients of K losses: its saved input and what reached it.

    Without `owners`, `cotangent` is [K, units, ...], one per loss; with them it is [units, ...], and
    every unit belongs to the loss that owns it.
    """

    site: Site
    cotangent: Tensor
    saved: Tensor | None
    owners: Owners | None
    count: int

    def gradients(self, use: Use, out: Tensor | None = None) -> Tensor:
        """[K, *use.shape], in `out` where given."""
        if out is not None and out.dtype != use.dtype:
            return out.copy_(self.gradients(use))
        if self.owners is None:
            return _in(out, self.site.contract(use, self.cotangent, _shared(self.saved), out))
        parts = self.owners.parts()
        if len(parts) == 1 and parts[0].owners is None:
            return _in(out, self.site.contract(use, *self._gathered(parts[0]), out))
        found = self.cotangent.new_empty(self.count, *use.shape, dtype=use.dtype) if out is None else out
        found.zero_()
        for part in parts:
            found[part.owners] = self.site.contract(use, *self._gathered(part))
        return found

    def _gathered(self, part: Part) -> tuple[Tensor, Tensor | None]:
        saved = None if self.saved is None else part.gather(self.saved)
        return part.gather(self.cotangent), saved

    def one(self, use: Use, loss: int, out: Tensor | None = None) -> Tensor:
        """[*use.shape], the gradient of one loss, in `out` where given."""
        if out is not None and out.dtype != use.dtype:
            return out.copy_(self.one(use, loss))
        whole = None if out is None else out.unsqueeze(0)
        return _in(whole, self.site.contract(use, *self._of(loss), whole))[0]

    def _of(self, loss: int) -> tuple[Tensor, Tensor | None]:
        """Cotangent and saved input of one loss, as a group of one."""
        if self.owners is None:
            return self.cotangent[loss : loss + 1], _shared(self.saved)
        mine = (self.owners.index(self.cotangent.device) == loss).nonzero().flatten()
        return self.cotangent[mine][None], None if self.saved is None else self.saved[mine][None]

    def gram(self, use: Use) -> Tensor | None:
        """[K, K]; None where only `gradients` can give it."""
        if self.owners is None:
            return self.site.gram(use, self.cotangent, _shared(self.saved))
        parts = self.owners.parts()
        if len(parts) == 1 and parts[0].owners is None:
            return self.site.gram(use, *self._gathered(parts[0]))
        return None

    def squares(self, use: Use) -> Tensor:
        """[K], squared L2 norms."""
        if self.owners is None:
            return self.site.squares(use, self.cotangent, _shared(self.saved))
        found = self.cotangent.new_zeros(self.count)
        for part in self.owners.parts():
            values = self.site.squares(use, *self._gathered(part))
            if part.owners is None:
                found = values
            else:
                found[part.owners] = values
        return found


def _in(out: Tensor | None, found: Tensor) -> Tensor:
    """What a rule found, in `out` whether or not it wrote there itself."""
    return found if out is None or found.data_ptr() == out.data_ptr() else out.copy_(found)


def _shared(saved: Tensor | None) -> Tensor | None:
    return None if saved is None else saved.unsqueeze(0)


@dataclass(frozen=True, eq=False)
class Spread:
    """Gradients of K losses with respect to rows that one loss owns each: all in one tensor of the target's shape."""

    gradient: Tensor
    owners: Owners
    count: int

    def gradients(self) -> Tensor:
        """[K, *shape], zeros in the rows of other losses."""
        found = self.gradient.new_zeros(self.count, *self.gradient.shape)
        owner = self.owners.index(self.gradient.device)
        mine = (owner >= 0).nonzero().flatten()
        found[owner[mine], mine] = self.gradient[mine]
        return found

    def owned(self) -> Tensor:
        """[*shape], zeros in rows of no loss."""
        if isinstance(self.owners, Cyclic):
            return self.gradient if self.gradient.is_contiguous() else self.gradient.contiguous()
        mine = (self.owners.index(self.gradient.device) >= 0).reshape(-1, *(1 for _ in self.gradient.shape[1:]))
        return torch.where(mine, self.gradient, torch.zeros_like(self.gradient))

    def one(self, loss: int) -> Tensor:
        """[*shape] of one loss."""
        owner = self.owners.index(self.gradient.device)
        mine = (owner == loss).reshape(-1, *(1 for _ in self.gradient.shape[1:]))
        return torch.where(mine, self.gradient, torch.zeros_like(self.gradient))

    def squares(self) -> Tensor:
        """[K], squared norms."""
        rows = real_rows(self.gradient).square().sum(1)
        owner = self.owners.index(rows.device)
        owned = owner >= 0
        return rows.new_zeros(self.count).index_add_(0, owner[owned], rows[owned])


Answer = Tensor | Spread | list[tuple[Contraction, Use]] | None


@dataclass(frozen=True, eq=False)
class Columns:
    """The gradients of losses `start` to `stop`, per target: a tensor [c, *shape], contractions, or None for zeros."""

    start: int
    stop: int
    targets: Sequence[Target]
    answers: list[Answer]

    def __len__(self) -> int:
        return self.stop - self.start

    def gradients(self, number: int, out: Tensor | None = None) -> Tensor:
        """[c, *shape] of one target, in `out` where given."""
        return self._found(number) if out is None else self._written(number, out)

    def _written(self, number: int, out: Tensor) -> Tensor:
        answer = self.answers[number]
        if isinstance(answer, list):
            return summed_gradients(answer, out)
        return out.zero_() if answer is None else out.copy_(self._found(number))

    def _found(self, number: int) -> Tensor:
        target, answer = self.targets[number], self.answers[number]
        if answer is None:
            return target.zeros(len(self))
        if isinstance(answer, Tensor):
            return answer
        if isinstance(answer, Spread):
            return answer.gradients()
        return summed_gradients(answer).to(target.device, target.dtype)

    def one(self, loss: int) -> list[Tensor]:
        """Every target's gradient of one loss."""
        found = []
        for target, answer in zip(self.targets, self.answers, strict=True):
            if answer is None:
                found.append(target.zeros())
            elif isinstance(answer, Tensor):
                found.append(answer[loss - self.start])
            elif isinstance(answer, Spread):
                found.append(answer.one(loss - self.start))
            else:
                total = answer[0][0].one(answer[0][1], loss - self.start)
                for contraction, use in answer[1:]:
                    total += contraction.one(use, loss - self.start)
                found.append(total.to(target.device, target.dtype))
        return found

    def write(self, loss: int, kept: list[Tensor]) -> None:
        """The same into tensors that are there, without another of their size where a rule can."""
        for own, target, answer in zip(kept, self.targets, self.answers, strict=True):
            if isinstance(answer, list) and len(answer) == 1 and own.dtype == target.dtype:
                contraction, use = answer[0]
                contraction.one(use, loss - self.start, own)
            else:
                own.copy_(Columns(self.start, self.stop, [target], [answer]).one(loss)[0])

    def gram(self) -> Tensor:
        """[c, c], over all targets together."""
        total: Tensor | None = None
        for number, answer in enumerate(self.answers):
            if answer is None:
                continue
            value = None
            if isinstance(answer, list) and len(answer) == 1:
                value = answer[0][0].gram(answer[0][1])
            elif isinstance(answer, Spread):  # losses own different rows
                value = torch.diag(answer.squares())
            if value is None:
                rows = real_rows(self.gradients(number))
                value = rows @ rows.t()
            total = value if total is None else _added(total, value)
        return torch.zeros(len(self), len(self)) if total is None else total

    def squares(self) -> Tensor:
        """[c], squared norms over all targets together."""
        total: Tensor | None = None
        for number, answer in enumerate(self.answers):
            if answer is None:
                continue
            if isinstance(answer, list) and len(answer) == 1:
                value = answer[0][0].squares(answer[0][1])
            elif isinstance(answer, Spread):
                value = answer.squares()
            else:
                value = real_rows(self.gradients(number)).square().sum(1)
            total = value if total is None else _added(total, value)
        return torch.zeros(len(self)) if total is None else total


def summed_gradients(pairs: list[tuple[Contraction, Use]], out: Tensor | None = None) -> Tensor:
    """[K, *use.shape], over all uses, in `out` where given."""
    total = pairs[0][0].gradients(pairs[0][1], out)
    for contraction, use in pairs[1:]:
        total += contraction.gradients(use)
    return total


def real_rows(gradients: Tensor) -> Tensor:
    """[c, elements], complex numbers as pairs."""
    if gradients.is_complex():
        gradients = torch.view_as_real(gradients)
    return matrix(gradients)


def _added(total: Tensor, value: Tensor) -> Tensor:
    dtype = torch.promote_types(total.dtype, value.dtype)
    return total.to(dtype) + value.to(total.device, dtype)

"""The gradient of a loss at the data rows that it touches."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multiback.nested import map_tensors, tensors_in


@dataclass(frozen=True, eq=False)
class RowGradient:
    """d loss / d data, held for those rows alone whose gradient may be other than zero.

    Attributes
    ----------
    rows : int64 [n], ascending: which rows of the data.
    values : in the data's structure, a tensor [n, ...] for every floating tensor, None for others;
        `values[i]` belongs to `rows[i]`. For data that are one tensor it is one tensor.
    num_rows : N, the number of rows of the data.

    A row on which the loss does not depend, or on which its derivative is zero throughout, is left out.
    """

    rows: Tensor
    values: Any
    num_rows: int

    def dense(self) -> Any:
        """Gradients in the data's own shape, [N, ...], zero in all other rows; N rows of memory."""

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros(self.num_rows, *values.shape[1:]).index_copy_(
                0, self.rows.to(values.device), values
            )

        return map_tensors(self.values, spread)

    def __repr__(self) -> str:
        """Which rows, and the shapes of their gradients."""
        shown = ", ".join(map(str, self.rows[:6].tolist())) + (", ..." if len(self.rows) > 6 else "")
        shapes = ", ".join(str(list(value.shape)) for value in tensors_in(self.values))
        return f"RowGradient(rows=[{shown}] of {self.num_rows}, values {shapes})"


def nonzero_rows(tensors: list[Tensor]) -> Tensor:
    """The rows, int64 on the CPU, ascending, in which any tensor holds something other than zero."""
    touched: Tensor | None = None
    for tensor in tensors:
        here = tensor.reshape(tensor.shape[0], -1).any(1).cpu()
        touched = here if touched is None else touched | here
    return torch.empty(0, dtype=torch.int64, device="cpu") if touched is None else touched.nonzero()[:, 0]

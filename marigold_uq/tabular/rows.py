"""Tables of different lengths side by side: S tables padded to the longest, with weights of 0 in the padding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StackedRows:
    """Columns of S tables; row n of table s is real if n < counts[s]."""

    columns: dict[str, Tensor]  # name -> (S, N, ...)
    weights: Tensor  # (S, N), 0 in the padding
    counts: tuple[int, ...]

    @classmethod
    def stack(cls, tables: Sequence[Mapping[str, Tensor]], weights: Sequence[Tensor] | None = None) -> "StackedRows":
        """Pad tables of one set of columns, each (n_s, ...). Weights are scaled to mean 1 in each table."""
        counts = tuple(len(next(iter(table.values()))) for table in tables)
        for number, (table, count) in enumerate(zip(tables, counts, strict=True)):
            lengths = {name: len(column) for name, column in table.items()}
            if count == 0 or set(lengths.values()) != {count}:
                raise ValueError(f"columns of table {number} have {lengths} rows; expected one length of at least 1")
        columns = {name: pad([table[name] for table in tables]) for name in tables[0]}
        given = weights if weights is not None else [torch.ones(count) for count in counts]
        return cls(columns, pad([w / w.mean() for w in given]), counts)

    @property
    def num_models(self) -> int:
        """S."""
        return len(self.counts)


def pad(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors (n_s, ...) as one (S, max n_s, ...), zeros behind the shorter ones."""
    return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True)


def gather_rows(column: Tensor, index: Tensor) -> Tensor:
    """Entry [s, index[s, b]] of a column (S, N, ...): (S, B, ...)."""
    num_models, length = column.shape[:2]
    flat = index + length * torch.arange(num_models, device=index.device).unsqueeze(1)
    return column.flatten(0, 1).index_select(0, flat.reshape(-1)).unflatten(0, tuple(index.shape))

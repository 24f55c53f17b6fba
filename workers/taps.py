"""Tap rows: the residual stream after chosen blocks, written where a co-located drafter can read it."""

import torch
from torch import Tensor

from ..cluster.errors import ConfigError


class TapScratch:
    """The scratch buffer of one rank, overwritten by every step.

    `buffer` is [max_num_batched_tokens, num_taps, hidden]; row i belongs to row i of the step's flat batch,
    tap j to `tap_layer_ids[j]`. Every rank writes the same values: they follow the all-reduce.
    """

    def __init__(self, tap_layer_ids: tuple[int, ...], buffer: Tensor) -> None:
        assert buffer.shape[1] == len(tap_layer_ids), "a column for each tap"
        self.buffer = buffer
        self._column_of = {layer_id: column for column, layer_id in enumerate(tap_layer_ids)}

    def has(self, layer_id: int) -> bool:
        return layer_id in self._column_of

    def write(self, layer_id: int, residual: Tensor) -> None:
        """Keep `residual` [N, hidden], the stream after block `layer_id`, if it is tapped."""
        column = self._column_of.get(layer_id)
        if column is not None:
            self.buffer[: len(residual), column].copy_(residual)

    def publish(self) -> None:
        """Wait until the rows are there: a GPU does not order another process's reads after our writes."""
        if self.buffer.is_cuda:
            torch.cuda.current_stream(self.buffer.device).synchronize()


def tap_shape(
    tap_layer_ids: tuple[int, ...], *, num_layers: int, hidden_size: int, max_num_rows: int
) -> tuple[int, int, int]:
    """Of the buffer; ConfigError for a block that the model does not have."""
    if wrong := [layer_id for layer_id in tap_layer_ids if not 0 <= layer_id < num_layers]:
        raise ConfigError(f"tap_layer_ids {wrong} are not blocks of this model; use 0 to {num_layers - 1}")
    return max_num_rows, len(tap_layer_ids), hidden_size

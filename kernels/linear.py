"""x @ weight.T + bias, prepared once per weight for the device it lives on."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor


class PlainLinear:
    """The weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """The weight in oneDNN's blocked layout; the plain one can be freed.

    What a row becomes does not depend on how many rows it is computed with. oneDNN has another summation
    order for a single row of some shapes; in float32 those are computed as two. In bfloat16 that would double
    the cost of a decode to avoid a rounding that differs in one of some thousand numbers: left as it is.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias
        self._is_single_special = weight.dtype == torch.float32 and self._has_own_order_for_one(
            weight.shape[1]
        )

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_single_special and x.shape[0] == 1:
            return self._multiply(x.expand(2, -1).contiguous())[:1]
        return self._multiply(x)

    def _has_own_order_for_one(self, num_in: int) -> bool:
        probe = torch.linspace(-1, 1, 2 * num_in).sin_().view(2, num_in)
        return not torch.equal(self._multiply(probe[:1])[0], self._multiply(probe)[0])

    def _multiply(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")


def prepare_linear(weight: Tensor, bias: Tensor | None) -> PlainLinear | PackedLinear:
    """Choose how a weight [out, in] is multiplied with; the caller keeps no other reference to it."""
    if weight.device.type == "cpu" and _can_pack():
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


@functools.cache
def _can_pack() -> bool:
    """Whether this torch has oneDNN's prepacked product: a private operation, so absence is normal."""
    try:
        _ = torch.ops.mkldnn._reorder_linear_weight
        _ = torch.ops.mkldnn._linear_pointwise
    except AttributeError:
        return False
    return torch.backends.mkldnn.is_available()

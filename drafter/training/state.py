"""The state of training on disk: one safetensors file, replaced as a whole.

Held are the weights, their moving average and the optimizer's moments; the order of the data and its random
choices follow from the step. Nothing is pickled. The file is the same whether processes have copies of the
weights or shards of them, and one may go on where the other was.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from ...cluster.errors import ConfigError
from .network import DrafterNetwork
from .shards import publish

_MOMENTS = ("exp_avg", "exp_avg_sq")
_AVERAGE_EVERY = 4  # steps; an average over fifty needs no more, and each is a pass over all weights


class TrainState:
    """A network in training. `average` is what is evaluated and exported."""

    def __init__(self, network: DrafterNetwork, *, lr: float, weight_decay: float, decay: float) -> None:
        """`decay` is the moving average's, once it has run in."""
        self.network = network
        self.step = 0
        self.elapsed_s = 0.0  # training proper, over all processes that took part one after another
        self.num_tokens = 0  # answer tokens seen
        self._decay = decay
        self._parameters = dict(network.named_parameters())
        self.average = {name: weight.detach().clone() for name, weight in self._parameters.items()}
        matrices = [weight for weight in self._parameters.values() if weight.dim() > 1]
        vectors = [weight for weight in self._parameters.values() if weight.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)

    @torch.no_grad()
    def advance(self, max_norm: float, lr: float) -> float:
        """Clip, step, average; returns the gradient's norm before clipping."""
        gradients = [weight.grad for weight in self._parameters.values() if weight.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        # Clipping is left to the optimizer, which divides as it reads: one pass less over all gradients.
        self.optimizer.grad_scale = (norm / max_norm).clamp(min=1.0)  # pyright: ignore[reportAttributeAccessIssue] - as GradScaler sets it
        self.optimizer.found_inf = torch.zeros_like(norm)  # pyright: ignore[reportAttributeAccessIssue]
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.step % _AVERAGE_EVERY == 0:
            decay = min(self._decay, self.step / (self.step + 9)) ** _AVERAGE_EVERY  # else the start lingers
            for name, weight in self._parameters.items():
                self.average[name].lerp_(weight, 1 - decay)
        return float(norm)

    def save(self, path: Path, settings: dict[str, Any], *, is_writer: bool = True) -> None:
        """With shards all processes call it, to put the whole together; one writes."""
        tensors = {f"weight/{name}": weight.detach() for name, weight in self._parameters.items()}
        tensors |= {f"average/{name}": weight for name, weight in self.average.items()}
        for name, weight in self._parameters.items():
            moments = self.optimizer.state[weight]
            tensors |= {f"{moment}/{name}": moments[moment] for moment in _MOMENTS}
        tensors = {name: whole(tensor) for name, tensor in tensors.items()}
        if not is_writer:
            return
        head = {
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "num_tokens": self.num_tokens,
            "settings": settings,
        }
        partial = path.with_name(f"{path.name}.partial")
        save_file({k: v.contiguous() for k, v in tensors.items()}, partial, {"state": json.dumps(head)})
        publish(partial, path)

    @torch.no_grad()
    def load(self, path: Path, settings: dict[str, Any]) -> None:
        """Go on from a file. Raises ConfigError for one of other settings, naming the first that differs."""
        head, tensors = _read(path)
        different = [name for name in settings if head["settings"].get(name) != settings[name]]
        if different:
            name = different[0]
            raise ConfigError(
                f"{path} was trained with {name} = {head['settings'].get(name)!r}, not {settings[name]!r}; "
                "keep the setting, or choose another --out"
            )
        for name, weight in self._parameters.items():
            weight.copy_(_like(tensors[f"weight/{name}"], weight))
            self.average[name].copy_(_like(tensors[f"average/{name}"], weight))
            self.optimizer.state[weight] = {
                "step": torch.tensor(float(head["step"]), device=weight.device),
                **{moment: _like(tensors[f"{moment}/{name}"], weight) for moment in _MOMENTS},
            }
        self.step, self.elapsed_s = head["step"], head["elapsed_s"]
        self.num_tokens = head["num_tokens"]


def whole(tensor: Tensor) -> Tensor:
    """Put a tensor's shards together, where it has any; every process must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(tensor: Tensor, weight: Tensor) -> Tensor:
    """A tensor that all processes have, on the device of `weight` and in its shards, if it has any."""
    moved = tensor.to(weight.device)
    if not isinstance(weight, DTensor):
        return moved
    return distribute_tensor(moved, weight.device_mesh, weight.placements, src_data_rank=None)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            head = json.loads((file.metadata() or {})["state"])
            # copies: the file is replaced while its mapping would still be in use
            return head, {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{path} is no state of training ({error}); delete it to begin anew") from None

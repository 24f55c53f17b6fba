"""The loop that trains a drafter, in one process or as one of many.

    OUT/shards.json         what is read; a directory that grows meanwhile changes nothing
    OUT/state.safetensors   to go on from, replaced at every checkpoint
    OUT/log.csv, walk.csv   the curves; `curves.png` is drawn from them
    OUT/drafter/            the result, in the published layout

A step is a function of the settings, the data and its number, so training that was killed and started again
with the same command ends with the weights of one that was not (bit for bit on CPU; a time limit excepted).
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ...cluster.errors import ConfigError
from ...kernels.dtypes import has_bfloat16_products
from ..target import Target
from .batches import Batch, Examples, steps_per_pass, training_batches
from .blocks import slot_weights
from .corpus import note_shards, open_corpus
from .curves import Curves, StepRecord
from .export import export_drafter, vocab_tensors, write_config
from .head import Scores, TrainingHead
from .initial import drafter_config, pick_mask_token, start_from_drafter, start_from_target
from .losses import FinalNorm, token_losses
from .network import DrafterNetwork
from .shape import TargetShape
from .shards import Example
from .state import TrainState, whole
from .walk import Walk, walk

_STD_EXAMPLES = 200  # sequences whose tap rows are measured
_LEAST_STD = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """What decides the result, beside the data."""

    num_layers: int = 2
    block_size: int = 8
    mask_token_id: int | None = None  # None: the special token that the data use least
    gamma: float | None = None  # of the slots' weights; None: half the block
    passes: float = 3.0
    max_minutes: float | None = None  # the schedule ends by then, whatever `passes` says
    batch_size: int = 2  # sequences per step and process
    num_anchors: int = 16  # per sequence
    lr: float = 1e-3
    warmup_steps: int = 40
    hold_share: float = 0.3  # of training at the full rate, before the cosine
    last_lr_share: float = 0.03
    weight_decay: float = 0.01
    max_norm: float = 1.0
    average_decay: float = 0.98
    max_vocab: int = 16384  # of the head in training, the most frequent; 0: all
    sampled_vocab: int = 0  # of the others, at each step; 0: they are not trained on
    export_vocab: int = 0  # tokens the exported drafter can say; 0: all, over the target's own head
    seed: int = 0
    distill_share: float = 0.0  # of the loss: the distance from the target's own distribution
    init: str | None = None  # a drafter to go on from; None: the target's last layers

    def check(self) -> None:
        """Raise ConfigError for what trains nothing."""
        if self.passes <= 0 or self.lr <= 0 or min(self.batch_size, self.num_anchors) < 1:
            raise ConfigError("passes, lr, batch_size and num_anchors must be above 0")
        if not 0 <= self.distill_share <= 1:
            raise ConfigError(f"distill {self.distill_share} is a share; give a number from 0 to 1")
        if self.gamma is not None and self.gamma <= 0:
            raise ConfigError(f"gamma {self.gamma} must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class FitPace:
    """When to stop by for what is not training."""

    log_every: int = 50  # steps
    save_every: int = 500
    walk_every: int = 1000
    walk_len: int = 32  # held-out sequences


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train together."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of_process_group(cls) -> "Ranks":
        """What `torch.distributed` says, if it is set up."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()


@dataclass(frozen=True, slots=True)
class Fitted:
    """The end of training; `loss` is the mean of the last logged steps."""

    path: Path
    num_steps: int
    num_tokens: int
    elapsed_s: float
    loss: float
    walk: Walk


def fit(
    data: Sequence[Path],
    model_path: Path,
    out: Path,
    settings: FitSettings,
    pace: FitPace,
    device: torch.device,
    report: Callable[[StepRecord, int], None],
    ranks: Ranks | None = None,
    *,
    is_sharded: bool = False,
) -> Fitted:
    """Train on the directories `data` to the end of the schedule and export to `out`/drafter.

    `report` gets the logged steps and the number of all. With several ranks `out` is shared; rank 0 writes.
    `is_sharded`: each rank keeps a share of weights, moments and average (FSDP) instead of a copy (DDP).
    """
    settings.check()
    ranks = ranks or Ranks.of_process_group()
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(data, model_path, out, settings, device, ranks, is_sharded=is_sharded)
    return trainer.run(pace, report)


class Trainer:
    """Data, model and state of one process."""

    def __init__(
        self,
        data: Sequence[Path],
        model_path: Path,
        out: Path,
        settings: FitSettings,
        device: torch.device,
        ranks: Ranks,
        *,
        is_sharded: bool = False,
    ) -> None:
        if is_sharded and ranks.size == 1:
            raise ConfigError("one process has nothing to share; leave out --shard, or give --workers N")
        self.settings, self.device, self.ranks, self.out = settings, device, ranks, out
        if ranks.rank == 0:
            note_shards(data, out / "shards.json")
        if ranks.size > 1:
            dist.barrier()
        corpus = open_corpus(data, out / "shards.json", model_path)
        self.examples, self.heldout = corpus.train, corpus.heldout
        if settings.distill_share and not corpus.has_last:
            raise ConfigError(
                "some data do not hold what --distill needs; make them with `paceline train data --keep-last`"
            )
        self._final_norm = FinalNorm(model_path, device) if settings.distill_share else None
        shape = TargetShape.load(model_path)
        target = Target.load(model_path, shape.max_len, torch.float32, torch.device("cpu"))
        counts = self.examples.token_counts(shape.vocab_size)
        mask_token_id = settings.mask_token_id
        if mask_token_id is None:
            mask_token_id = pick_mask_token(model_path, shape, counts)
        if not 0 <= settings.export_vocab < shape.vocab_size:
            raise ConfigError(
                f"a drafter's own vocabulary must be smaller than the {shape.vocab_size} tokens"
            )
        config = drafter_config(
            shape,
            num_layers=settings.num_layers,
            block_size=settings.block_size,
            tap_layer_ids=corpus.tap_layer_ids,
            mask_token_id=mask_token_id,
        )
        self.spec = write_config(out / "drafter", config, target)
        self._vocab: dict[str, Tensor] | None = None
        if size := settings.export_vocab:  # of the result alone
            self._vocab = vocab_tensors(target, counts, size)
            write_config(out / "drafter", config | {"draft_vocab_size": size}, target)
        self.compute_dtype = torch.bfloat16 if _has_bfloat16(device) else torch.float32
        network = DrafterNetwork(self.spec, max(max(self.examples.lens), max(self.heldout.lens)))
        network.tap_scale.copy_(1 / tap_std(self.examples))
        if settings.init is None:
            start_from_target(network, model_path, target, settings.seed)
        else:
            start_from_drafter(network, Path(settings.init), target)
        network.to(device)
        if is_sharded:
            shard(network)
        self.state = TrainState(
            network, lr=settings.lr, weight_decay=settings.weight_decay, decay=settings.average_decay
        )
        self._forward: nn.Module = network
        if ranks.size > 1 and not is_sharded:
            self._forward = nn.parallel.DistributedDataParallel(network)
        on_device = _moved(target, device)
        self.head = TrainingHead.of(
            on_device, counts, settings.max_vocab, self.compute_dtype, settings.sampled_vocab
        )
        self.whole_head = TrainingHead.of(on_device, counts, 0, self.compute_dtype).weight
        self._weights = slot_weights(settings.block_size, settings.gamma or settings.block_size / 2).to(
            device
        )
        per_pass = steps_per_pass(self.examples.lens, settings.batch_size, ranks.size)
        self.num_steps = max(1, round(settings.passes * per_pass))

    def run(self, pace: FitPace, report: Callable[[StepRecord, int], None]) -> Fitted:
        state, settings = self.state, self.settings
        file, described = self.out / "state.safetensors", self._described()
        if file.exists():
            state.load(file, described)
        curves = Curves(self.out, settings.block_size - 1, state.step, is_written=self.ranks.rank == 0)
        loss, last_save = curves.last_loss, state.step
        batches = training_batches(
            self.examples,
            batch_size=settings.batch_size,
            num_anchors=settings.num_anchors,
            block_len=settings.block_size,
            seed=settings.seed,
            first_step=state.step,
            rank=self.ranks.rank,
            num_ranks=self.ranks.size,
            with_teachers=settings.distill_share > 0,
        )
        with contextlib.closing(batches):
            while (share := self._share_done()) < 1:
                self._step(next(batches), share, curves)
                is_last = self._share_done() >= 1
                if state.step % pace.log_every == 0 or is_last:
                    record = curves.flush(state, self._lr(share))
                    loss = record.loss
                    report(record, self.num_steps)
                if not is_last and state.step % pace.walk_every == 0:
                    curves.add_walk(state, self.walk(pace.walk_len))
                is_due = state.step % pace.log_every == 0 and state.step - last_save >= pace.save_every
                if is_due or is_last:  # between two rows of the log, so that a resumed one has the same
                    last_save = state.step
                    self._save(file, described)
        final = self.walk(pace.walk_len)
        curves.add_walk(state, final)
        path = self.out / "drafter"
        averaged = self._averaged()
        if self.ranks.rank == 0:
            export_drafter(path, averaged, self._card(loss, final), self._vocab)
            curves.draw()
        return Fitted(path, state.step, state.num_tokens, state.elapsed_s, loss, final)

    def walk(self, num_sequences: int) -> Walk:
        """Of the averaged weights on held-out greedy text."""
        examples = [self.heldout[index] for index in range(min(num_sequences, len(self.heldout)))]
        network = self._averaged()
        with self._autocast():
            return walk(network, examples, self.head.embedding, self.whole_head)

    def _step(self, batch: Batch, share: float, curves: Curves) -> None:
        began_s = time.perf_counter()
        batch = batch.to(self.device)
        labels = self.head.classes(batch.blocks.labels)  # [n, A, B - 1]
        with self._autocast():
            states = self._forward(batch.taps, batch.blocks, self.head.embedding)
            kept = labels >= 0
            scores = self._scores(states[kept], labels[kept])
            teacher_logits = None
            if batch.teachers is not None and self._final_norm is not None:
                with torch.no_grad():
                    teacher_logits = self._scores(self._final_norm(batch.teachers[kept]), labels[kept]).logits
        weights = self._weights.expand_as(labels)[kept]
        losses = token_losses(scores, teacher_logits, self.settings.distill_share)
        loss = (losses * weights).sum() / weights.sum().clamp(min=1e-6)
        loss.backward()
        self.state.advance(self.settings.max_norm, self._lr(share))
        right = torch.zeros_like(kept)
        right[kept] = scores.logits.detach().argmax(-1) == scores.classes
        num_tokens = batch.num_tokens * self.ranks.size  # the other ranks' batches are about as long
        self.state.num_tokens += num_tokens
        curves.add(loss.detach(), right.sum((0, 1)), (batch.blocks.labels >= 0).sum((0, 1)), num_tokens)
        self.state.elapsed_s += time.perf_counter() - began_s

    def _scores(self, states: Tensor, classes: Tensor) -> Scores:
        """With the head's sample of this step and rank."""
        seed = (self.settings.seed * 1_000_003 + self.state.step) * self.ranks.size + self.ranks.rank
        first = self.head.draw(seed)
        return self.head.scores(self.state.network, states.to(self.compute_dtype), classes, first)

    def _share_done(self) -> float:
        share = self.state.step / self.num_steps
        if (limit := self.settings.max_minutes) is None:
            return share
        elapsed = torch.tensor(self.state.elapsed_s / 60 / limit)
        if self.ranks.size > 1:  # every rank must stop at the same step
            elapsed = elapsed.to(self.device)
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        return max(share, float(elapsed))

    def _lr(self, share: float) -> float:
        """Warm-up, a plateau, then a cosine."""
        settings = self.settings
        rise = min(1.0, (self.state.step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
        fall = max(0.0, (share - settings.hold_share) / max(1e-9, 1 - settings.hold_share))
        last = settings.last_lr_share
        return settings.lr * rise * (last + (1 - last) * 0.5 * (1 + math.cos(math.pi * min(1.0, fall))))

    def _averaged(self) -> DrafterNetwork:
        network = DrafterNetwork(self.spec, len(self.state.network.cos_sin) - self.spec.block_size)
        network.to(self.device)
        network.tap_scale.copy_(self.state.network.tap_scale)
        network.load_state_dict({name: whole(weight) for name, weight in self.state.average.items()})
        return network.eval()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.compute_dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.compute_dtype)

    def _save(self, file: Path, described: dict[str, Any]) -> None:
        self.state.save(file, described, is_writer=self.ranks.rank == 0)
        if self.ranks.size > 1:
            dist.barrier()

    def _described(self) -> dict[str, Any]:
        return {**asdict(self.settings), "num_ranks": self.ranks.size, "num_examples": len(self.examples)}

    def _card(self, loss: float, final: Walk) -> dict[str, Any]:
        return {
            "steps": self.state.step,
            "answer tokens in the data": self.examples.num_answer_tokens,
            "answer tokens seen": self.state.num_tokens,
            "minutes": round(self.state.elapsed_s / 60, 1),
            "loss at the end": round(loss, 3),
            "settings": asdict(self.settings),
            "held-out walk": {
                "mean tokens per verify": round(final.mean_tokens_per_verify, 3),
                "per slot": [round(share, 3) for share in final.per_slot],
            },
        }


def shard(network: DrafterNetwork) -> None:
    """Divide the parameters among the processes; a layer's are put together while it computes."""
    mesh = init_device_mesh(next(network.parameters()).device.type, (dist.get_world_size(),))
    for layer in network.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)


def tap_std(examples: Examples) -> Tensor:
    """[taps * H]: the standard deviation of every dimension of the tap rows of answers."""
    some: Iterator[Example] = (examples[index] for index in range(min(len(examples), _STD_EXAMPLES)))
    rows = torch.cat([example.taps[example.prompt_len : -1].float().flatten(1) for example in some])
    return rows.std(0).clamp(min=_LEAST_STD)


def _has_bfloat16(device: torch.device) -> bool:
    return torch.cuda.is_bf16_supported() if device.type == "cuda" else has_bfloat16_products()


def _moved(target: Target, device: torch.device) -> Target:
    head = None if target.head is None else target.head.to(device)
    return Target(
        architecture=target.architecture,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        vocab_size=target.vocab_size,
        max_model_len=target.max_model_len,
        embedding=target.embedding.to(device),
        head=head,
    )

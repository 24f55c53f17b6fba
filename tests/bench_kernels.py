"""What a step costs on this CPU and where the time goes, with our kernels and with torch's.

Run `python tests/bench_kernels.py [--rows 1 8 32] [--context 200] [--threads 2] [--rounds 20]`; prints a
table in Markdown. Both back ends live in this process and take turns, so that a busy machine disturbs both
alike; a figure is that of the fastest round, in milliseconds. With one thread it is processor time, which a
busy machine disturbs less. The bandwidth is that of summing 1 GiB with as many threads.

products: the linears of all layers; head: that of the vocabulary; attention: its plan too; small: norms,
rotation, activation, K/V writes; sampler: from logits to tokens; rest: the Python in between.
"""

import argparse
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.cluster.choices import BackendChoice
from paceline.cluster.config import Config, EngineConfig, ModelConfig
from paceline.cluster.messages import Admit, Chunk, SamplingParams, StepPlan
from paceline.cluster.model_source import resolve_model
from paceline.kernels.backend import Backend, choose_backend
from paceline.kernels.rows import Rows
from paceline.workers.runner import Runner

PARTS = ("products", "head", "attention", "small", "sampler")
BACKENDS: tuple[BackendChoice, ...] = ("torch", "native")
SMALL = ("rms_norm", "add_rms_norm", "silu_and_mul", "place_qkv")
LINEARS = ("qkv", "output", "gate_up", "down")
PAGE_SIZE = 16
MAX_PREFILL = 512
TOKEN_ID = 504
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # of one layer's linears: outputs, inputs


class Clock:
    """Seconds per part of the steps since the last reset."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = self.now()
            result = call(*args, **kwargs)
            self.seconds[part] += self.now() - began
            return result

        return run


class Steps:
    """Steps of a runner over `num_rows` sequences of `context_len` tokens and more."""

    def __init__(
        self,
        path: Path,
        backend: BackendChoice,
        num_threads: int,
        num_rows: int,
        context_len: int,
        rounds: int,
    ) -> None:
        max_len = context_len + 2 * rounds + 2
        num_pages = -(-max_len // PAGE_SIZE)
        engine = EngineConfig(
            num_threads=num_threads, backend=backend, kv_cache_gib=num_pages * num_rows * 0.0008 + 0.01
        )
        self._runner = Runner(path, Config(model=ModelConfig(max_model_len=max_len), engine=engine))
        self._step, self._context_len, self._num_rows = 0, context_len, num_rows
        params = SamplingParams(max_tokens=max_len, temperature=0.0)
        prompt = [TOKEN_ID] * context_len
        self.execute(admit=[Admit(row, prompt, context_len, params) for row in range(num_rows)])
        for row in range(num_rows):
            pages = list(range(row * num_pages, (row + 1) * num_pages))
            for start in range(0, context_len, MAX_PREFILL):
                length = min(MAX_PREFILL, context_len - start)
                self.execute(chunks=[Chunk(row, start, length, [], pages, 0)])
                pages = []

    def execute(self, **parts: Any) -> None:
        self._step += 1
        self._runner.execute(StepPlan(step=self._step, **parts))

    def decode(self) -> None:
        rows = range(self._num_rows)
        self.execute(chunks=[Chunk(row, self._context_len, 1, [TOKEN_ID], [], 1) for row in rows])
        self._context_len += 1

    def watch(self, clock: Clock) -> None:
        """Time the operations from now on."""
        model: Any = self._runner._model
        backend, sampler = model._backend, self._runner._sampler
        model._head = clock.timed("head", model._head)
        model._layers = [
            dataclasses.replace(
                layer, **{name: clock.timed("products", getattr(layer, name)) for name in LINEARS}
            )
            for layer in model._layers
        ]
        for name in SMALL:
            setattr(backend, name, clock.timed("small", getattr(backend, name)))
        plan_attention = backend.plan_attention

        def plan(*args: Any, **kwargs: Any) -> Any:
            planned = clock.timed("attention", plan_attention)(*args, **kwargs)
            planned.run = clock.timed("attention", planned.run)
            return planned

        backend.plan_attention = plan
        sampler.decide = clock.timed("sampler", sampler.decide)


def measure(
    steps: dict[BackendChoice, Steps], now: Callable[[], float], rounds: int
) -> dict[str, list[float]]:
    """Per back end, milliseconds of a step, then of each part and of the rest."""
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for name, runner in steps.items():
            began = now()
            runner.decode()
            best[name] = min(best[name], now() - began)
    clock = Clock(now)
    for runner in steps.values():
        runner.watch(clock)
    split: dict[str, list[float]] = {name: [float("inf")] for name in steps}
    for _ in range(rounds):
        for name, runner in steps.items():
            clock.seconds.clear()
            began = now()
            runner.decode()
            total = now() - began
            parts = [clock.seconds[part] for part in PARTS]
            split[name] = min(split[name], [total, *parts, total - sum(parts)])
    return {name: [1e3 * s for s in (best[name], *split[name][1:])] for name in steps}


def fastest(now: Callable[[], float], rounds: int, call: Callable[[], Any]) -> float:
    """Seconds."""
    seconds: list[float] = []
    for _ in range(rounds):
        began = now()
        call()
        seconds.append(now() - began)
    return min(seconds)


def prefill(now: Callable[[], float], rounds: int) -> None:
    """Print what many rows of one prompt cost, with the shapes of the default model's layer."""
    backends = {name: choose_backend("cpu", name) for name in BACKENDS}
    print("\n| |", " | ".join(BACKENDS), "|\n|---|---|---|")
    for num_rows in (128, 512):
        rates: list[str] = []
        for backend in backends.values():
            linears = [backend.linear(torch.randn(shape).bfloat16().float(), None) for shape in SHAPES]
            inputs = [torch.randn(num_rows, num_in) for _, num_in in SHAPES]
            seconds = fastest(
                now, rounds, lambda f=linears, x=inputs: [g(y) for g, y in zip(f, x, strict=True)]
            )
            num_operations = 2 * num_rows * sum(num_out * num_in for num_out, num_in in SHAPES)
            rates.append(f"{num_operations / seconds / 1e9:.0f} GF/s")
        print(f"| linears of {num_rows} rows |", " | ".join(rates), "|")
    for num_rows in (512, 2048):
        times = [1e3 * fastest(now, rounds, attention(backend, num_rows)) for backend in backends.values()]
        print(f"| attention of {num_rows} rows, one layer |", " | ".join(f"{ms:.1f} ms" for ms in times), "|")


def attention(backend: Backend, num_rows: int) -> Callable[[], Any]:
    """One layer's attention of a whole prompt, planned and run."""
    num_pages = num_rows // PAGE_SIZE
    k_pages, v_pages = torch.randn(2, num_pages, PAGE_SIZE, 3, 64)
    q, places = torch.randn(num_rows, 9, 64), torch.arange(num_rows)
    rows = Rows(places, places, [num_rows], [num_rows], torch.arange(num_pages)[None])

    def attend() -> Tensor:
        plan = backend.plan_attention(rows, num_heads=9, num_kv_heads=3, head_dim=64, page_size=PAGE_SIZE)
        return plan.run(q, k_pages, v_pages)

    return attend


def bandwidth(now: Callable[[], float]) -> float:
    """Bytes per second of a sum over more memory than any cache holds."""
    memory = torch.ones(1 << 28)
    return memory.numel() * 4 / fastest(now, 5, memory.sum)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    path = resolve_model("default")
    torch.set_num_threads(options.threads)
    now = time.thread_time if options.threads == 1 else time.perf_counter
    print(f"{options.threads} threads, {options.context} tokens of context, ", end="")
    print(f"memory is read at {bandwidth(now) / 1e9:.1f} GB/s\n")
    print("| rows | back end | step |", " | ".join((*PARTS, "rest")), "|")
    print("|---" * (4 + len(PARTS)) + "|")
    for rows in options.rows:
        steps: dict[BackendChoice, Steps] = {
            name: Steps(path, name, options.threads, rows, options.context, options.rounds)
            for name in BACKENDS
        }
        for name, figures in measure(steps, now, options.rounds).items():
            print("|", rows, "|", name, "|", " | ".join(f"{ms:.1f}" for ms in figures), "|", flush=True)
    prefill(now, options.rounds)


if __name__ == "__main__":
    main()

"""The transformers peer: `generate` on static batches in a process of its own, without HTTP.

Run by `peers` as `python -m paceline.deploy.bench.transformers_peer` with a Setting as JSON on standard
input; the Measurements go to standard output as JSON.
"""

import sys
import time
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from .client import Timing
from .load import Load
from .measure import Measurement, summarise
from .setting import Setting, num_requests_at, take


class ArrivalStreamer(BaseStreamer):
    """Keeps the time at which `generate` hands out each step's tokens. Its first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        del value
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def main() -> None:
    setting = msgspec.json.decode(sys.stdin.buffer.read(), type=Setting)
    torch.set_grad_enabled(False)
    model: Any = AutoModelForCausalLM.from_pretrained(
        setting.model_path, dtype=getattr(torch, setting.dtype), local_files_only=True
    )
    model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    # With no end-of-sequence id nothing stops early; a pad id is then demanded, and never used.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    prompts = iter(setting.prompts)
    for concurrency in setting.concurrencies:
        _generate(model, take(prompts, concurrency), num_new_tokens=4)
    measurements = [
        _measure(
            model, concurrency, take(prompts, num_requests_at(concurrency)), setting.workload.num_new_tokens
        )
        for concurrency in setting.concurrencies
    ]
    sys.stdout.buffer.write(msgspec.json.encode(measurements))


def _measure(model: Any, concurrency: int, prompts: list[list[int]], num_new_tokens: int) -> Measurement:
    timings: list[Timing] = []
    started = time.perf_counter()
    for first in range(0, len(prompts), concurrency):
        batch = prompts[first : first + concurrency]
        times_s = _generate(model, batch, num_new_tokens)
        timings += [Timing(num_tokens=num_new_tokens, times_s=times_s)] * len(batch)
    return summarise(timings, Load(concurrency=concurrency), time.perf_counter() - started)


def _generate(model: Any, batch: list[list[int]], num_new_tokens: int) -> list[float]:
    """Seconds from the call to each step's tokens; every sequence of a static batch sees the same."""
    ids = torch.tensor(batch, device=model.device)
    streamer = ArrivalStreamer()
    started = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_new_tokens,
        do_sample=False,
        streamer=streamer,
    )
    times_s = [at - started for at in streamer.times[1:]]
    assert len(times_s) == num_new_tokens, f"{len(times_s)} steps for {num_new_tokens} tokens"
    return times_s


if __name__ == "__main__":
    main()

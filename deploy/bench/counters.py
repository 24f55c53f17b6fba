"""What a server counts of itself, read from `/metrics`: steps, where their time went, and drafts."""

import asyncio

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from .client import Client

HEARTBEAT_S = 1.5  # the numbers behind /metrics are no older than this


class StepCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Sums since the server started. Steps are told by Paceline only, drafts also by vLLM."""

    num_steps: int = 0
    plan_s: float = 0.0
    wait_s: float = 0.0
    compute_s: float = 0.0
    num_blocks: int = 0  # of drafts, verified
    num_drafts: int = 0
    num_accepted: int = 0

    def since(self, earlier: "StepCounters") -> "StepCounters":
        ours, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(earlier)
        return StepCounters(**{name: ours[name] - theirs[name] for name in ours})

    @property
    def step_s(self) -> float:
        """Mean length of a step: deciding it, then waiting for its result."""
        return (self.plan_s + self.wait_s) / self.num_steps

    @property
    def overhead_s(self) -> float:
        """Mean seconds of a step in which no rank computed: scheduler, channel, and rank wake-up."""
        return self.step_s - self.compute_s / self.num_steps

    @property
    def tokens_per_block(self) -> float | None:
        """Tokens that a verified block gave, its anchor's own among them; None without drafts."""
        return 1 + self.num_accepted / self.num_blocks if self.num_blocks else None


async def read_step_counters(client: Client) -> StepCounters | None:
    """The idle engine's counters, or None where the server has none of them."""
    await asyncio.sleep(HEARTBEAT_S)
    text = await client.metrics()
    return None if text is None else parse_step_counters(text)


def parse_step_counters(exposition: str) -> StepCounters | None:
    """Read the counters out of a Prometheus text exposition, summed over label sets."""
    sums = dict.fromkeys(StepCounters.__struct_fields__, 0.0)
    is_found = False
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name in _FIELD_OF:
                sums[_FIELD_OF[sample.name]] += sample.value
                is_found = True
    return msgspec.convert(sums, StepCounters, strict=False) if is_found else None


_FIELD_OF = {
    "paceline:steps_total": "num_steps",
    "paceline:step_plan_seconds_total": "plan_s",
    "paceline:step_wait_seconds_total": "wait_s",
    "paceline:step_compute_seconds_total": "compute_s",
    "vllm:spec_decode_num_drafts_total": "num_blocks",
    "vllm:spec_decode_num_draft_tokens_total": "num_drafts",
    "vllm:spec_decode_num_accepted_tokens_total": "num_accepted",
}

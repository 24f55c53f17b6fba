"""What /metrics counts, and what a failed start and a model are called."""

from typing import get_args

import pytest

from paceline.cluster.config import ModelConfig
from paceline.cluster.errors import ConfigError, EngineError, ModelError
from paceline.cluster.messages import ShardState, ShardStats, Stats
from paceline.deploy.api.front import served_name
from paceline.deploy.metrics import Metrics
from paceline.deploy.serve import _cause


def shown(metrics: Metrics) -> dict[str, float]:
    """Values by name and the labels that vary."""
    lines = [line for line in metrics.render().decode().splitlines() if line[0] != "#"]
    return {
        line.rpartition(" ")[0].replace('engine="0",', ""): float(line.rpartition(" ")[2]) for line in lines
    }


def test_heartbeats_become_gauges_and_counters() -> None:
    stats = Stats(
        num_pages=40, num_free_pages=30, num_running=3, num_waiting=2, num_generated_tokens=99, plan_s=1.5
    )
    numbers = shown(Metrics("m", "0", lambda: stats))
    assert numbers['vllm:kv_cache_usage_perc{model_name="m"}'] == 0.25
    assert numbers['vllm:num_requests_running{model_name="m"}'] == 3
    assert numbers['vllm:num_requests_waiting{model_name="m"}'] == 2
    assert numbers['vllm:generation_tokens_total{model_name="m"}'] == 99
    assert numbers['paceline:step_plan_seconds_total{model_name="m"}'] == 1.5


def test_what_drafting_does_is_shown_under_the_names_dashboards_know() -> None:
    stats = Stats(
        num_prefix_queries=100,
        num_prefix_hits=64,
        num_drafts=10,
        num_draft_tokens=30,
        num_accepted_tokens=14,
        accepted_per_pos=[8, 4, 2],
        draft_s=0.5,
        num_commit_rows=44,
        num_slides=2,
        num_context_restarts=1,
        last_num_drafts=3,
    )
    numbers = shown(Metrics("m", "0", lambda: stats))
    for name, value in (
        ("vllm:prefix_cache_queries_total", 100),
        ("vllm:prefix_cache_hits_total", 64),
        ("vllm:spec_decode_num_drafts_total", 10),
        ("vllm:spec_decode_num_draft_tokens_total", 30),
        ("vllm:spec_decode_num_accepted_tokens_total", 14),
        ("paceline:draft_seconds_total", 0.5),
        ("paceline:commit_rows_total", 44),
        ("paceline:slides_total", 2),
        ("paceline:context_restarts_total", 1),
        ("paceline:effective_k", 3),
    ):
        assert numbers[f'{name}{{model_name="m"}}'] == value
    by_position = [
        numbers[f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="{position}"}}']
        for position in range(3)
    ]
    assert by_position == [8, 4, 2]


def test_every_shard_is_shown_with_its_state() -> None:
    shards = [
        ShardStats(shard=0, state="ready", num_pages=50, num_free_pages=20, num_context_tokens=400),
        ShardStats(shard=1, state="lost", num_failed_drafts=3, draft_s=1.5),
    ]
    numbers = shown(Metrics("m", "0", lambda: Stats(shards=shards)))

    def of(name: str, shard: int, **labels: str) -> float:
        varying = "".join(f',{key}="{value}"' for key, value in labels.items())
        return numbers[f'paceline:{name}{{model_name="m",shard="{shard}"{varying}}}']

    up = {(i, s): of("shard_up", i, state=s) for i in (0, 1) for s in get_args(ShardState)}
    assert {key for key, value in up.items() if value} == {(0, "ready"), (1, "lost")}
    assert (of("context_tokens", 0), of("context_pages", 0), of("context_free_pages", 0)) == (400, 50, 20)
    assert (of("failed_drafts_total", 1), of("shard_draft_seconds_total", 1)) == (3, 1.5)


def test_before_the_first_heartbeat_nothing_divides_by_zero() -> None:
    assert shown(Metrics("m", "0", Stats))['vllm:kv_cache_usage_perc{model_name="m"}'] == 0


def test_a_request_is_timed_once_however_it_ends() -> None:
    metrics = Metrics("m", "0", Stats)
    for reason in ("stop", "length", None):
        timer = metrics.start()
        for num_tokens in (0, 1, 4):
            timer.add(num_tokens)
        if reason is not None:
            timer.finish(reason)
        timer.close()
    numbers = shown(metrics)
    for reason in ("stop", "length", "abort"):
        assert numbers[f'vllm:request_success_total{{finished_reason="{reason}",model_name="m"}}'] == 1
    assert numbers['vllm:time_to_first_token_seconds_count{model_name="m"}'] == 3
    assert numbers['vllm:inter_token_latency_seconds_count{model_name="m"}'] == 3
    assert numbers['vllm:e2e_request_latency_seconds_count{model_name="m"}'] == 3


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (ModelConfig(), "SmolLM2-135M-Instruct"),
        (ModelConfig(model="org/name"), "org/name"),
        (ModelConfig(model="/models/tiny.Q4_1.gguf"), "tiny.Q4_1"),
        (ModelConfig(model="org/name", served_model_name="mine"), "mine"),
    ],
)
def test_the_name_of_the_model(model: ModelConfig, name: str) -> None:
    assert served_name(model) == name


def test_a_directory_is_served_under_its_own_name(tmp_path) -> None:
    assert served_name(ModelConfig(model=str(tmp_path))) == tmp_path.name


def test_the_error_of_a_replica_comes_out_of_serve_s_account() -> None:
    quoted = (
        "Replica failed:\n  File x\npaceline.cluster.errors.ConfigError: too little; raise kv_cache_gib\n"
    )
    error = _cause(quoted)
    assert type(error) is ConfigError
    assert str(error) == "too little; raise kv_cache_gib"
    assert type(_cause("paceline.cluster.errors.ModelError: no such thing")) is ModelError
    assert type(_cause("paceline.cluster.errors.RequestError: odd")) is EngineError
    assert type(_cause("something else")) is EngineError

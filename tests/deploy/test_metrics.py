"""What /metrics counts, and what a failed start and a model are called."""

from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.cluster.config import ModelConfig
from paceline.cluster.errors import ConfigError, EngineError, ModelError
from paceline.cluster.messages import Output, ShardState, ShardStats, Stats
from paceline.deploy.api.front import served_name
from paceline.deploy.metrics import Metrics, merged
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
    for reason in ("stop", "length", "error", None):
        timer = metrics.start(prompt_len=40, max_tokens=100)
        for first, num_tokens in ((0, 0), (0, 1), (1, 4)):
            timer.add(num_tokens, Output(request_id="r", first_index=first, num_cached_tokens=32))
        if reason is not None:
            timer.finish(reason)
        timer.close()
    numbers = shown(metrics)
    for reason in ("stop", "length", "abort", "error"):
        assert numbers[f'vllm:request_success_total{{finished_reason="{reason}",model_name="m"}}'] == 1
    assert numbers['vllm:time_to_first_token_seconds_count{model_name="m"}'] == 4
    assert numbers['vllm:inter_token_latency_seconds_count{model_name="m"}'] == 4
    assert numbers['vllm:e2e_request_latency_seconds_count{model_name="m"}'] == 4


# vLLM 0.33's, but for what this engine does not have: adapters, sleep, transfer of K/V, images, watermarks.
VLLM_NAMES = """
num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc cache_config_info
prompt_tokens_total prompt_tokens_by_source_total prompt_tokens_cached_total
prompt_tokens_cached_by_source_total generation_tokens_total request_success_total
num_preemptions_total prefix_cache_queries_total
prefix_cache_hits_total admission_rejections_total corrupted_requests_total
time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket
request_time_per_output_token_seconds_bucket request_queue_time_seconds_bucket
request_inference_time_seconds_bucket request_prefill_time_seconds_bucket request_decode_time_seconds_bucket
request_prompt_tokens_bucket request_generation_tokens_bucket request_max_num_generation_tokens_bucket
request_params_n_bucket request_params_max_tokens_bucket request_num_preemptions_bucket
request_prefill_kv_computed_tokens_bucket iteration_tokens_total_bucket
spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
spec_decode_num_accepted_tokens_per_pos_total
"""


def test_every_name_that_dashboards_of_vllm_ask_for_is_there() -> None:
    names = {
        sample.partition("{")[0] for sample in shown(Metrics("m", "0", lambda: Stats(accepted_per_pos=[1])))
    }
    assert {f"vllm:{name}" for name in VLLM_NAMES.split()} <= names


def test_where_a_request_spent_its_time() -> None:
    metrics = Metrics("m", "0", Stats)
    timer = metrics.start(prompt_len=40, max_tokens=100)
    timer.add(1, Output(request_id="r", first_index=0, num_cached_tokens=32, queue_s=1e6))
    timer.add(4, Output(request_id="r", first_index=1, num_preemptions=2))
    timer.finish("length")
    numbers = shown(metrics)
    for name, value in (
        ("request_queue_time_seconds", 1e6),
        ("request_prefill_time_seconds", 0),
        ("request_prompt_tokens", 40),
        ("request_prefill_kv_computed_tokens", 8),
        ("request_generation_tokens", 5),
        ("request_params_max_tokens", 100),
        ("request_num_preemptions", 2),
    ):
        assert numbers[f'vllm:{name}_sum{{model_name="m"}}'] == value, name


def test_counts_by_size_become_histograms() -> None:
    stats = Stats(
        steps_by_rows=[5, 0, 2], num_rows=12, blocks_by_len=[0, 3, 0, 1], num_draft_tokens=6, num_rejected=4
    )
    numbers = shown(Metrics("m", "0", lambda: stats))

    def buckets(name: str) -> dict[str, float]:
        found = {key: value for key, value in numbers.items() if key.startswith(f"{name}_bucket")}
        return {key.partition('le="')[2].partition('"')[0]: value for key, value in found.items()}

    assert buckets("vllm:iteration_tokens_total") == {"1.0": 5, "2.0": 5, "4.0": 7, "+Inf": 7}
    assert buckets("paceline:block_drafts") == {"0.0": 0, "1.0": 3, "2.0": 3, "3.0": 4, "+Inf": 4}
    assert numbers['vllm:iteration_tokens_total_sum{model_name="m"}'] == 12
    assert numbers['vllm:admission_rejections_total{model_name="m",reason="max_num_queued_reqs"}'] == 4


def test_replicas_are_shown_together() -> None:
    texts = [Metrics("m", name, lambda: Stats(num_running=3)).render() for name in ("a", "b")]
    together = merged(texts)
    families = {family.name: family for family in text_string_to_metric_families(together.decode())}
    assert families.keys() == {f.name for f in text_string_to_metric_families(texts[0].decode())}
    running = families["vllm:num_requests_running"].samples
    assert {sample.labels["engine"]: sample.value for sample in running} == {"a": 3, "b": 3}
    assert together.count(b"# HELP vllm:num_requests_running ") == 1


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

"""`paceline bench` without a server: engine, scheduler, budget, conversations and simulator."""

import json
from pathlib import Path
from random import Random

import pytest
from streams import tiny_config
from tiny import make_checkpoint
from tiny_drafter import config_of, make_drafter

from paceline.cluster.errors import UserError
from paceline.deploy.bench import turns
from paceline.deploy.bench.budget import BUDGET, NONE, Wrong, measure_budget, row_of
from paceline.deploy.bench.client import BenchError
from paceline.deploy.bench.simulate import read_costs
from paceline.deploy.bench.step import BareEngine, measure_steps
from paceline.deploy.bench.turns import MODES, measure_turns
from paceline.deploy.cli import main


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one for the tiny checkpoint."""
    config = config_of(options={"target_layer_ids": [0, 2]}, num_target_layers=3)
    return make_drafter(tmp_path_factory.mktemp("drafter"), config)


def prompts_of(count: int, length: int = 20) -> list[list[int]]:
    chooser = Random(4)
    return [[chooser.randrange(3, 250) for _ in range(length)] for _ in range(count)]


@pytest.mark.parametrize("name", ["none", "ngram", "checkpoint"])
def test_a_bare_engine_generates_the_same_with_and_without_drafts(
    checkpoint: Path, drafter: Path, name: str
) -> None:
    """And its parts add up to its steps."""
    plain = BareEngine(tiny_config(drafter="none"), checkpoint)
    engine = BareEngine(tiny_config(drafter=str(drafter) if name == "checkpoint" else name), checkpoint)
    prompts = prompts_of(3)
    expected = [answer.token_ids for answer in plain.run(prompts, 24)]
    assert [answer.token_ids for answer in engine.run(prompts, 24)] == expected
    decode = engine.sums["decode"].row(3, "decode")
    assert decode.num_tokens + engine.sums["prefill"].num_tokens == 3 * 24
    assert decode.target_ms > 0
    assert (decode.draft_ms > 0) == (name != "none")
    assert decode.tokens_per_s == pytest.approx(1e3 * decode.num_tokens / decode.num_steps / decode.step_ms)


def test_steps_are_measured_by_batch_and_kind(checkpoint: Path) -> None:
    engine = BareEngine(tiny_config(drafter="none"), checkpoint)
    rows = measure_steps(engine, [1, 4], iter(prompts_of(10)), max_tokens=6)
    assert [(row.batch, row.kind) for row in rows] == [
        (1, "prefill"),
        (1, "decode"),
        (4, "prefill"),
        (4, "decode"),
    ]
    assert [sum(row.num_rows for row in rows if row.batch == batch) for batch in (1, 4)] == [25, 100]


def test_the_budget_is_compared_with_every_fixed_number(checkpoint: Path, drafter: Path) -> None:
    (row,) = measure_budget(
        tiny_config(drafter=str(drafter)),
        checkpoint,
        [2],
        [1, 3],
        iter(prompts_of(8)),
        max_tokens=8,
        num_rounds=2,
        is_wrong=True,
    )
    assert row.tokens_per_s.keys() == {NONE, "k=1", "k=3", BUDGET}
    assert row.over_none > 0


def test_the_best_fixed_number_is_chosen_by_its_median() -> None:
    rounds = [{NONE: 10.0, "k=1": k1, BUDGET: 19.0} for k1 in (20.0, 5.0, 20.0)]
    row = row_of(4, rounds, [NONE, "k=1"])
    assert row.over_best_fixed == pytest.approx(0.95)
    assert row.over_none == pytest.approx(1.9)


def test_a_wrong_proposer_is_wrong_each_time(checkpoint: Path) -> None:
    """Repeating tokens make prompt lookup right; spoilt, nothing of it stands."""
    repeated = [[5, 6, 7, 8] * 6]
    config = tiny_config(drafter="ngram", draft_budget=False)
    engine = BareEngine(config, checkpoint, Wrong)
    engine.run(repeated, 32)
    stats = engine.scheduler.stats()
    assert stats.num_draft_tokens > 0
    assert stats.num_accepted_tokens < 0.2 * stats.num_draft_tokens


def test_conversations_find_their_pages_and_keep_their_tokens(checkpoint: Path, drafter: Path) -> None:
    words = [prompts_of(4, 16) for _ in range(4)]
    cold, warm, halved = measure_turns(tiny_config(drafter=str(drafter)), checkpoint, words, 8)
    assert [cold.mode, warm.mode, halved.mode] == list(MODES)
    assert cold.saved == 0
    assert warm.saved > 0.4
    assert halved.num_rows_read == warm.num_rows_read
    assert all(row.tokens_per_block is not None for row in (cold, warm, halved))


def test_a_mode_that_changed_a_token_would_be_seen(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converse = turns._converse

    def faulty(mode: str, *arguments: object) -> object:
        row, texts = converse(mode, *arguments)  # type: ignore[arg-type]
        if mode == "warm":
            texts[0][-1] ^= 1
        return row, texts

    monkeypatch.setattr(turns, "_converse", faulty)
    with pytest.raises(BenchError, match="warm conversations"):
        measure_turns(tiny_config(drafter="none"), checkpoint, [prompts_of(1, 16), prompts_of(1, 16)], 4)


def test_the_scheduler_alone_is_measured_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "scheduler", "--running", "4", "--running", "8", "--num-steps", "10", "--json"]) == 0
    )
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["mode"], row["running"]) for row in rows] == [("plain", 4), ("plain", 8)]
    assert all(0 < row["median_ms"] <= row["p99_ms"] for row in rows)


def test_deciding_is_measured_with_drafts_and_with_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    modes = ["--mode", "plain", "--mode", "drafts", "--mode", "budget"]
    assert main(["bench", "scheduler", "--running", "4", "--num-steps", "10", "--json", *modes]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["mode"] for row in rows] == ["plain", "drafts", "budget"]
    assert all(0 < row["median_ms"] <= row["p99_ms"] for row in rows)


def test_a_load_is_simulated_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "capacity.png"
    options = ["--groups", "1", "--groups", "2", "--rate", "1", "--rate", "4", "--num-requests", "12"]
    assert main(["bench", "simulate", *options, "--json", "--png", str(picture)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows.keys() == {"1 groups", "2 groups"}
    assert rows["2 groups"][1]["measured"]["ttft_p50_s"] <= rows["1 groups"][1]["measured"]["ttft_p50_s"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_trace_and_costs_are_read_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, costs = tmp_path / "trace.jsonl", tmp_path / "costs.json"
    trace.write_text(
        '{"at_s": 0, "prompt_len": 8, "output_len": 3}\n{"at_s": 1, "prompt_len": 8, "output_len": 3}\n'
    )
    costs.write_text('{"step": [[1, 100]]}')
    assert main(["bench", "simulate", "--trace", str(trace), "--costs", str(costs), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["1 groups"]
    assert row["measured"]["ttft_p50_s"] == pytest.approx(0.1)
    assert row["measured"]["e2e_p50_s"] == pytest.approx(0.3)
    costs.write_text('{"steps": []}')
    with pytest.raises(UserError, match="write"):
        read_costs(str(costs))
    assert main(["bench", "simulate", "--costs", "gpu"]) == 2
    assert "small-cpu" in capsys.readouterr().err


def test_a_batch_above_the_places_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "--batch", "64", "--max-num-seqs", "32"]) == 2
    assert "raise it" in capsys.readouterr().err

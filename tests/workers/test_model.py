"""The decoder against transformers: logits and tap rows, per family and on the real model."""

import json
from pathlib import Path

import pytest
import torch
from drive import make_config
from tiny import FAMILIES, VOCAB_SIZE, Family, make_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.cluster.messages import Admit, Chunk, SamplingParams, StepPlan
from paceline.workers.runner import Runner

LEN = 100
GREEDY = SamplingParams(max_tokens=1, temperature=0)


def reference(
    path: Path, token_ids: list[int], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    """Logits [N, V], then the residual stream after each block but the last [N, H]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        outputs = model(torch.tensor([token_ids]), output_hidden_states=True)
    return (outputs.logits[0], *(state[0] for state in outputs.hidden_states[1:-1]))


def random_ids(num_ids: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (num_ids,), generator=generator).tolist()


def admit(runner: Runner, token_ids: list[int]) -> None:
    runner.execute(StepPlan(step=1, admit=[Admit(7, token_ids, len(token_ids), GREEDY)]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_tied", [False, True])
def test_logits_and_tap_rows_equal_transformers(family: Family, is_tied: bool, tmp_path: Path) -> None:
    """Over two prefill chunks on scattered pages, so that window, rope scaling and paging all matter."""
    path = make_checkpoint(tmp_path, family, tie_word_embeddings=is_tied)
    token_ids = random_ids(LEN)
    expected, *residuals = reference(path, token_ids)
    runner = Runner(path, make_config(), tap_layer_ids=(1, 0))
    admit(runner, token_ids)
    taps = runner.tap_buffer
    assert taps is not None
    first = runner.logits([Chunk(7, 0, 70, [], [9, 3, 5, 1, 7], 70)])
    first_taps = taps[:70].clone()
    second = runner.logits([Chunk(7, 70, 30, [], [20, 2], 30)])
    assert (torch.cat([first, second]) - expected).abs().max() < 1e-4
    expected_taps = torch.stack([residuals[1], residuals[0]], dim=1)
    assert (torch.cat([first_taps, taps[:30]]) - expected_taps).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["llama3", "llama-linear", "llama-yarn", "qwen2-window"])
def test_config_of_transformers_4_means_the_same(family: Family, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family)
    token_ids = random_ids(LEN)
    expected, *_ = reference(path, token_ids)
    config_path = path / "config.json"
    config = json.loads(config_path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    if family == "llama-linear":
        scaling["type"] = scaling.pop("rope_type")
    config["rope_scaling"] = scaling if scaling.get("rope_type") != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    config_path.write_text(json.dumps(config))
    runner = Runner(path, make_config())
    admit(runner, token_ids)
    got = runner.logits([Chunk(7, 0, LEN, [], list(range(7)), LEN)])
    assert (got - expected).abs().max() < 1e-4


def test_last_block_can_be_tapped(tmp_path: Path) -> None:
    """Its residual stream is what the final norm reads."""
    path = make_checkpoint(tmp_path, "llama")
    token_ids = random_ids(20)
    runner = Runner(path, make_config(), tap_layer_ids=(2,))
    admit(runner, token_ids)
    logits = runner.logits([Chunk(7, 0, 20, [], [0, 1], 20)])
    taps = runner.tap_buffer
    assert taps is not None
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        expected = model.lm_head(model.model.norm(taps[:20, 0]))
    assert (logits - expected).abs().max() < 1e-4


def test_real_model_logits_equal_transformers(default_model: Path) -> None:
    """Its activations reach thousands and its logits 40, so float32 itself is only good to about 1e-4 here.

    Hence the measure is the exact answer (float64): ours may not be much farther from it than transformers'
    float32 is, nor differ from transformers' by more than both roundings together.
    """
    text = "A paceline is a line of riders who take turns in each other's slipstream. "
    token_ids = AutoTokenizer.from_pretrained(default_model)(text * 6).input_ids
    exact, *_ = reference(default_model, token_ids, torch.float64)
    theirs, *_ = reference(default_model, token_ids)
    runner = Runner(default_model, make_config())
    admit(runner, token_ids)
    num = len(token_ids)
    ours = runner.logits([Chunk(7, 0, num, [], list(range(-(-num // 16))), num)])
    their_error = (theirs - exact).abs().max()
    assert (ours - exact).abs().max() < 1.5 * their_error
    assert (ours - theirs).abs().max() < max(1e-4, 2 * their_error)

"""Which drafters are understood, and what is said of those that are not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_drafter import (
    HIDDEN_SIZE,
    MASK_TOKEN_ID,
    NUM_TARGET_LAYERS,
    TAP_LAYER_IDS,
    VOCAB_SIZE,
    config_of,
    make_drafter,
    make_target,
)

from paceline.cluster.errors import ModelError
from paceline.cluster.messages import Commit, Open, Propose, SamplingParams
from paceline.cluster.rope_spec import RopeSpec
from paceline.drafter.dflash_proposer import DFlashProposer
from paceline.drafter.spec import DrafterSpec
from paceline.drafter.weights import load_weights

FULL, SLIDING = "full_attention", "sliding_attention"


def write_config(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def spec_of(path: Path, config: dict[str, Any], block_size: int | None = None) -> DrafterSpec:
    return DrafterSpec.load(write_config(path, config), make_target(), block_size)


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    """The config without some options, wherever they are."""
    kept = {name: value for name, value in config.items() if name not in names}
    kept["dflash_config"] = {k: v for k, v in config["dflash_config"].items() if k not in names}
    return kept


def test_options_are_found_in_the_new_and_in_the_old_place(tmp_path: Path) -> None:
    new = config_of()
    old = without(new, "block_size") | {"block_size": 8}
    null = config_of(options={"block_size": None}) | {"block_size": 8}

    assert spec_of(tmp_path, old) == spec_of(tmp_path, null) == spec_of(tmp_path, new)
    assert spec_of(tmp_path, new).tap_layer_ids == tuple(TAP_LAYER_IDS)
    assert spec_of(tmp_path, new).block_size == 8


def test_rope_is_found_in_both_layouts(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    new = spec_of(tmp_path, config_of(rope_parameters=yarn | {"rope_theta": 5e5}, rope_theta=None))
    old = spec_of(tmp_path, config_of(rope_scaling=yarn, rope_theta=5e5))

    assert new == old
    assert new.rope == RopeSpec(kind="yarn", theta=5e5, factor=4.0, original_max_len=512)
    assert new.max_len == 2048


def speculators_config(draft_vocab_size: int) -> dict[str, Any]:
    published = config_of()
    decoder = {
        name: value for name, value in published.items() if name not in ("architectures", "dflash_config")
    }
    return {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": decoder,
        "block_size": 8,
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": HIDDEN_SIZE,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in TAP_LAYER_IDS],
        "mask_token_id": MASK_TOKEN_ID,
        "sliding_window_non_causal": False,
    }


def test_speculators_count_layers_from_the_embedding(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, speculators_config(VOCAB_SIZE))

    assert spec == spec_of(tmp_path, config_of())


def test_a_reduced_vocabulary_drafts_the_targets_ids(tmp_path: Path) -> None:
    """The drafts are the best among the kept tokens; no other is ever drafted."""
    whole_path = make_drafter(tmp_path / "whole", config_of())
    target = make_target()
    assert target.head is not None
    kept = torch.arange(3, VOCAB_SIZE, 7)
    weights = load_file(whole_path / "model.safetensors") | {
        "lm_head.weight": target.head[kept].clone(),
        "embed_tokens.weight": target.embedding.clone(),
        "d2t": kept - torch.arange(len(kept)),
        "t2d": torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, kept, True),
    }
    (reduced_path := tmp_path / "reduced").mkdir()
    write_config(reduced_path, speculators_config(len(kept)))
    save_file(weights, reduced_path / "model.safetensors")

    whole, reduced = (
        DFlashProposer.load(path, target, context_bytes=1 << 20, page_size=16, dtype=torch.float32)
        for path in (whole_path, reduced_path)
    )
    states = torch.randn(5, HIDDEN_SIZE)
    logits = whole.network.logits(states)

    assert torch.equal(reduced.network.logits(states)[:, kept], logits[:, kept])
    assert set(reduced.network.logits(states).argmax(-1).tolist()) <= set(kept.tolist())


@pytest.mark.parametrize(
    ("options", "windows", "causal"),
    [
        ({"layer_types": (FULL, SLIDING)}, (None, 24), (False, True)),
        ({"layer_types": (FULL, SLIDING), "is_causal": False}, (None, 24), (False, False)),
        ({"layer_types": (FULL, SLIDING), "options": {"causal": True}}, (None, 24), (True, True)),
        (
            {"layer_types": (FULL, SLIDING), "is_causal": False, "options": {"causal": True}},
            (None, 24),
            (False, False),
        ),
        ({"layer_types": (FULL, SLIDING), "use_sliding_window": False}, (None, None), (False, True)),
        ({"layer_types": (SLIDING, SLIDING), "use_sliding_window": None}, (24, 24), (True, True)),
        ({"layer_types": (FULL, SLIDING), "sliding_window_non_causal": True}, (None, 24), (False, False)),
    ],
)
def test_which_layers_slide_and_which_see_only_back(
    tmp_path: Path, options: dict[str, Any], windows: Any, causal: Any
) -> None:
    spec = spec_of(tmp_path, config_of(**options))

    assert spec.windows == windows
    assert spec.causal == causal


@pytest.mark.parametrize(
    ("layer_types", "max_context_len"),
    [((FULL, FULL), 512), ((FULL, SLIDING), 512), ((SLIDING, SLIDING), 23)],
)
def test_only_a_drafter_of_sliding_layers_alone_forgets(
    tmp_path: Path, layer_types: tuple[str, ...], max_context_len: int
) -> None:
    assert spec_of(tmp_path, config_of(layer_types=layer_types)).max_context_len == max_context_len


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 128}, "hidden size is 128, that of the target"),
        ({"vocab_size": 640}, "vocabulary of 640, the target's is 512"),
        ({"num_target_layers": 36}, "target of 36 layers, this one has 8"),
        ({"options": {"target_layer_ids": None}}, "target_layer_ids is missing"),
        ({"options": {"target_layer_ids": [1, 3, 3]}}, "names a layer twice"),
        ({"options": {"target_layer_ids": [1, 3, NUM_TARGET_LAYERS]}}, "not all layers of the target"),
        ({"options": {"target_layer_ids": [-1, 3, 5]}}, "not all layers of the target"),
        ({"options": {"target_layer_ids": "1,3,5"}}, "must be a list"),
        ({"options": {"mask_token_id": VOCAB_SIZE}}, "outside the target's vocabulary"),
        ({"options": {"mask_token_id": None}}, "mask_token_id is missing"),
        ({"options": {"block_size": None}}, "block_size is missing"),
        ({"options": {"block_size": 1}}, "not between 2 and 1"),
        ({"options": {"block_size": 7.5}}, "whole number"),
        ({"options": {"projector_type": "dspark"}}, "DSpark"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM is no drafter we have"),
        ({"architectures": None}, "none is no drafter"),
        ({"layer_types": (FULL,), "num_hidden_layers": 2}, "layer_types must name"),
        ({"rope_scaling": {"rope_type": "su", "factor": 4.0}}, "'su' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"rms_norm_eps": "small"}, "must be a number"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"generation": 2, "options": {"conv_group_size": 24}}, "does not divide"),
        ({"generation": 2, "options": {"selector_rank": None}}, "selector_rank is missing"),
    ],
)
def test_what_cannot_draft_for_this_target_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        spec_of(tmp_path, config_of(**change))


def test_a_block_may_be_shorter_than_trained_but_not_longer(tmp_path: Path) -> None:
    assert spec_of(tmp_path, config_of(), block_size=3).block_size == 3
    with pytest.raises(ModelError, match="not between 2 and 8"):
        spec_of(tmp_path, config_of(), block_size=9)


@pytest.mark.parametrize("text", [None, "{", "[]", '{"dflash_config": 3}'])
def test_a_damaged_config_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        DrafterSpec.load(tmp_path, make_target())


def load(path: Path, config: dict[str, Any], **changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """load_weights of a tiny drafter after some tensors were replaced, added, or (None) removed."""
    make_drafter(path, config)
    weights = load_file(path / "model.safetensors")
    for name, tensor in changes.items():
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor
    save_file(weights, path / "model.safetensors")
    target = make_target()
    spec = DrafterSpec.load(path, target)
    return load_weights(path, spec, target, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "fc.weight",
            torch.zeros(HIDDEN_SIZE, 5 * HIDDEN_SIZE),
            r"wrong fc.weight is \(64, 320\), not \(64, 192\)",
        ),
        ("norm.weight", None, "missing norm.weight"),
        ("layers.0.self_attn.g_proj.weight", torch.zeros(4, 4), "unexpected layers.0.self_attn.g_proj"),
        ("norm.weight", torch.full((HIDDEN_SIZE,), float("nan")), "not finite, norm.weight first"),
        ("norm.weight", torch.zeros(HIDDEN_SIZE, dtype=torch.int8), "norm.weight is I8, not one of F32"),
        ("d2t", torch.full((VOCAB_SIZE,), 1), "d2t names tokens"),
        ("d2t", torch.zeros(VOCAB_SIZE), "d2t is F32, not one of I64"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load(tmp_path, config_of(), **{name: tensor})


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    file = make_drafter(tmp_path, config_of()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    target = make_target()
    with pytest.raises(ModelError, match="cannot be read"):
        load_weights(tmp_path, DrafterSpec.load(tmp_path, target), target, torch.float32, torch.device("cpu"))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    make_drafter(tmp_path, config_of())
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    target = make_target()
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        load_weights(tmp_path, DrafterSpec.load(tmp_path, target), target, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("generation", [1, 2])
def test_other_writers_names_load_as_the_published_ones(tmp_path: Path, generation: int) -> None:
    config = config_of(layer_types=(FULL,), generation=generation)
    published = load(tmp_path / "published", config)
    renamed = {}
    q, k, v = (published[f"layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    for name, weight in published.items():
        if "q_proj" in name:
            renamed["midlayer.self_attn.qkv_proj.weight"] = torch.cat([q, k, v])
        elif "k_proj" not in name and "v_proj" not in name:
            name = name.replace("layers.0.", "midlayer.").replace("fc.", "encoder.fc.")
            renamed[name.replace("hidden_norm.", "encoder.output_norm_enc.")] = weight
    other = write_config(tmp_path, config)
    save_file({f"model.{name}": weight for name, weight in renamed.items()}, other / "model.safetensors")
    target = make_target()
    loaded = load_weights(other, DrafterSpec.load(other, target), target, torch.float32, torch.device("cpu"))

    assert loaded.keys() == published.keys()
    assert all(torch.equal(loaded[name], published[name]) for name in published)


def test_a_target_of_other_dtype_and_a_bf16_drafter(tmp_path: Path) -> None:
    """The drafter keeps its own precision: tap rows and tables are cast where they enter."""
    target = make_target()
    assert target.head is not None
    target = replace(target, embedding=target.embedding.half(), head=target.head.half())
    path = make_drafter(tmp_path, config_of())
    proposer = DFlashProposer.load(path, target, context_bytes=1 << 20, page_size=16)
    proposer.open(Open(0, [1, 2, 3], 3, SamplingParams(max_tokens=9, temperature=0.0)))
    proposer.commit([Commit(0, 1, 0, 3, 0, [0])], torch.randn(3, 3, HIDDEN_SIZE).half())

    (draft,) = proposer.propose([Propose(0, [4], [1])], 7)

    assert proposer.network.k_pages(0).dtype == torch.bfloat16
    assert len(draft.token_ids) == 7


def test_memory_below_one_page_is_refused(tmp_path: Path) -> None:
    path = make_drafter(tmp_path, config_of())
    with pytest.raises(ModelError, match="give the drafter more memory"):
        DFlashProposer.load(path, make_target(), context_bytes=100, page_size=16)

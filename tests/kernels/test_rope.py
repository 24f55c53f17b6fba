"""The rotary table against transformers' frequencies, every kind, at a real model's size."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from paceline.cluster.config_json import ConfigJson
from paceline.cluster.errors import ModelError
from paceline.cluster.rope_spec import RopeSpec
from paceline.kernels.rope import cos_sin_table

HEAD_DIM = 128
MAX_LEN = 4096
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-attention-factor": YARN | {"attention_factor": 0.8},
    "yarn-mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 0.9},
    "yarn-not-truncated": YARN | {"truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
}


def spec_of(**values: Any) -> RopeSpec:
    return RopeSpec.of(ConfigJson(Path("config.json"), {"max_position_embeddings": 40960} | values))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_the_table_is_transformers(scaling: str, theta: float) -> None:
    parameters = SCALINGS[scaling] | {"rope_theta": theta}
    config = Qwen3Config(
        head_dim=HEAD_DIM,
        max_position_embeddings=40960,
        rope_parameters=dict(parameters),
        dtype=torch.float32,
    )
    cos, sin = Qwen3RotaryEmbedding(config)(torch.ones(1), torch.arange(MAX_LEN)[None])
    half = HEAD_DIM // 2
    expected = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)
    table = cos_sin_table(spec_of(rope_parameters=parameters), HEAD_DIM, MAX_LEN, torch.device("cpu"))

    assert table.dtype == torch.float32
    assert (table - expected).abs().max() < 1e-3  # an angle of 4095 is good to 2.4e-4 in float32


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported; supported are default"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; it must be an object"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"rope_theta": True}, "rope_theta is True"),
    ],
)
def test_what_cannot_be_computed_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_of(**values)


def test_a_rescaled_length_counts_once() -> None:
    linear = spec_of(rope_scaling={"rope_type": "linear", "factor": 2.0})

    assert linear.max_len(1000) == 2000
    assert spec_of(rope_scaling=YARN).max_len(32768) == 131072
    assert spec_of(rope_scaling=YARN).max_len(131072) == 131072
    assert spec_of(rope_scaling=LLAMA3).max_len(131072) == 131072

"""`paceline generate` on the real model: the JSON of each prompt, in order; what cannot run is refused."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate
from tiny import make_checkpoint

from paceline.cluster.errors import ConfigError
from paceline.deploy import cli
from paceline.deploy.generate import ChatMessage, Prompt, read_prompts

SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["text", "token_ids", "finish_reason", "usage", "timings", "speculation"],
    "properties": {
        "text": {"type": "string"},
        "token_ids": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "finish_reason": {"enum": ["stop", "length"]},
        "usage": {
            "type": "object",
            "additionalProperties": False,
            "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
            "properties": {
                name: {"type": "integer", "minimum": 1}
                for name in ("prompt_tokens", "completion_tokens", "total_tokens")
            },
        },
        "timings": {
            "type": "object",
            "additionalProperties": False,
            "required": ["prefill_s", "decode_s", "tokens_per_s"],
            "properties": {
                name: {"type": "number", "exclusiveMinimum": 0}
                for name in ("prefill_s", "decode_s", "tokens_per_s")
            },
        },
        "speculation": {
            "type": "object",
            "additionalProperties": False,
            "required": ["drafter", "mean_tokens_per_verify", "acceptance_per_slot"],
            "properties": {
                "drafter": {"type": "string"},
                "mean_tokens_per_verify": {"type": "number", "minimum": 0},
                "acceptance_per_slot": {
                    "type": "array",
                    "items": {"type": "number", "minimum": 0, "maximum": 1},
                },
            },
        },
    },
}

Generate = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str]) -> Generate:
    """Run `paceline generate ... --json` in this process."""

    def generate(*argv: object) -> list[dict[str, Any]]:
        arguments = ["generate", "--json", "--kv-cache-gib", "0.5", "--num-threads", "1", *map(str, argv)]
        code = cli.main(arguments)
        out, err = capsys.readouterr()
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines()]

    return generate


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    """A tiny model that speaks the real model's tokens."""
    path = make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", "llama", vocab_size=49152)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_model / name, path)
    return path


def test_real_model(generate: Generate, default_model: Path, tmp_path: Path) -> None:
    """All three ways to give prompts at once, answered sensibly, in order."""
    lines = [
        {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
        {"prompt": "The capital of France is"},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    chat = "What is the capital of France?"
    options = ["--prompts-file", file, "--dtype", "float32", "--max-tokens", 9]
    first, asked, from_file, last = generate(
        default_model, "--prompt", "one two three four", "--chat", chat, *options
    )
    for completion in (first, asked, from_file, last):
        validate(completion, SCHEMA)
        usage = completion["usage"]
        assert usage["completion_tokens"] == len(completion["token_ids"])
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert first["text"] == "-digit numbers are 12, "
    assert (first["finish_reason"], len(first["token_ids"])) == ("length", 9)
    assert asked["text"] == "The capital of France is Paris."
    assert (asked["finish_reason"], asked["token_ids"][-1]) == ("stop", 2)
    assert from_file["token_ids"] == asked["token_ids"]
    assert "Paris" in last["text"]


def test_drafts_buy_verifies_and_change_nothing(generate: Generate, default_model: Path) -> None:
    """Prompt lookup on a text that repeats itself, and no drafter at all."""
    prompt = "red, green, blue, red, green, blue, red, green, blue, red, green,"
    options = [default_model, "--prompt", prompt, "--dtype", "float32", "--max-tokens", 32]
    (plain,) = generate(*options, "--drafter", "none")
    (drafted,) = generate(*options, "--num-draft-tokens", 3)
    assert drafted["token_ids"] == plain["token_ids"]
    assert plain["speculation"] == {
        "drafter": "none",
        "mean_tokens_per_verify": 1.0,
        "acceptance_per_slot": [],
    }
    speculation = drafted["speculation"]
    assert speculation["drafter"] == "ngram"
    assert 2 < speculation["mean_tokens_per_verify"] <= 4
    assert len(speculation["acceptance_per_slot"]) == 3
    assert min(speculation["acceptance_per_slot"]) > 0.3


def test_one_token_is_the_prompt_s_and_no_verify(generate: Generate, tiny_model: Path) -> None:
    (completion,) = generate(tiny_model, "--prompt", "a", "--max-tokens", 1)
    assert completion["speculation"] == {
        "drafter": "ngram",
        "mean_tokens_per_verify": 0.0,
        "acceptance_per_slot": [],
    }


def test_seeds_decide_and_batches_do_not(generate: Generate, tiny_model: Path) -> None:
    options = ["--dtype", "float32", "--temperature", 1, "--top-p", 0.95, "--top-k", 50, "--max-tokens", 12]
    prompts = ["--prompt", "a", "--prompt", "b", "--prompt", "a"]
    together = generate(tiny_model, *prompts, *options, "--seed", 7)
    (alone,) = generate(tiny_model, "--prompt", "b", *options, "--seed", 7)
    (other,) = generate(tiny_model, "--prompt", "b", *options, "--seed", 8)
    assert together[0]["token_ids"] == together[2]["token_ids"]
    assert together[1]["token_ids"] == alone["token_ids"] != other["token_ids"]


def test_more_prompts_than_places_and_no_room_for_more_tokens(generate: Generate, tiny_model: Path) -> None:
    prompts = [part for index in range(7) for part in ("--prompt", f"{index} sheep")]
    limits = ["--max-num-seqs", 2, "--max-queued-requests", 1, "--max-model-len", 24, "--max-tokens", 100]
    completions = generate(tiny_model, *prompts, *limits)
    assert len(completions) == 7
    for completion in completions:
        assert completion["usage"]["total_tokens"] == 24 or completion["finish_reason"] == "stop"


def test_text_is_streamed_for_one_prompt_and_listed_for_several(
    capsys: pytest.CaptureFixture[str], generate: Generate, tiny_model: Path
) -> None:
    options = ["--dtype", "float32", "--max-tokens", "6", "--kv-cache-gib", "0.5"]
    texts = [c["text"] for c in generate(tiny_model, "--prompt", "a", "--prompt", "b", *options)]
    assert cli.main(["generate", str(tiny_model), "--prompt", "a", *options]) == 0
    assert capsys.readouterr().out == f"{texts[0]}\n"
    assert cli.main(["generate", str(tiny_model), "--prompt", "a", "--prompt", "b", *options]) == 0
    assert capsys.readouterr().out == f"{texts[0]}\n\n{texts[1]}\n\n"


def test_two_ranks_over_ray_give_the_same_tokens(generate: Generate, tiny_model: Path) -> None:
    """As a process of its own, which starts a Ray and leaves none."""
    options = [str(tiny_model), "--prompt", "The tide", "--dtype", "float32", "--max-tokens", "8"]
    (alone,) = generate(*options)
    command = [sys.executable, "-m", "paceline.deploy", "generate", *options, "--json"]
    done = subprocess.run(
        [*command, "--tensor-parallel-size", "2"], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == alone["token_ids"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--prompt", ""], "prompt 1 has no tokens"),
        (["--prompt", "a " * 30, "--max-model-len", "20"], "shorten it or raise --max-model-len"),
        (["--prompt", "a", "--max-model-len", "100000"], "max_model_len"),
        (["--prompt", "a", "--tensor-parallel-size", "3"], "choose one of 1, 2, 4"),
        (["--prompt", "a", "--kv-cache-gib", "0.0001"], "raise kv_cache_gib"),
        (["--prompt", "a", "--drafter", "/absent"], "give none, ngram, a directory, or an id"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, argv: list[str], says: str
) -> None:
    assert cli.main(["generate", str(tiny_model), *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.splitlines()[-1].startswith("paceline: ")


class TestPrompts:
    def test_are_joined_in_order(self, tmp_path: Path) -> None:
        file = tmp_path / "prompts.jsonl"
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        file.write_text(f'{{"prompt": "d", "id": 1}}\n\n{json.dumps({"messages": messages})}\n')
        assert read_prompts(["a", "b"], ["c"], file) == [
            Prompt(prompt="a"),
            Prompt(prompt="b"),
            Prompt(messages=[ChatMessage("user", "c")]),
            Prompt(prompt="d"),
            Prompt(messages=[ChatMessage("system", "s"), ChatMessage("user", "u")]),
        ]

    def test_bytes_that_are_not_text_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="is not UTF-8"):
            read_prompts([], ["caf\udce9"], None)

    @pytest.mark.parametrize(
        "line",
        [
            b"{",
            b"[]",
            b"{}",
            b'{"prompt": 1}',
            b'{"prompt": "a", "messages": []}',
            b'{"messages": [{"role": "user"}]}',
            b'{"prompt": "\xff"}',
        ],
    )
    def test_bad_line_is_named(self, tmp_path: Path, line: bytes) -> None:
        file = tmp_path / "prompts.jsonl"
        file.write_bytes(b'{"prompt": "fine"}\n' + line)
        with pytest.raises(ConfigError, match=r"prompts\.jsonl, line 2: "):
            read_prompts([], [], file)

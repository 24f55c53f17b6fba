"""The cross-check: what servers count is read alike, and rows compare with ours."""

import asyncio
from pathlib import Path

import pytest
from scripted_server import ScriptedServer

from paceline.cluster.errors import UserError
from paceline.deploy.bench.client import BenchError
from paceline.deploy.bench.crosscheck import (
    Answers,
    Check,
    Drafting,
    ask_server,
    check_of,
    parse_drafting,
    table_of,
)

OURS = """\
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{model_name="m"} 10.0
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{model_name="m"} 30.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 2.0
"""
THEIRS = """\
# HELP llamacpp:spec_decode_num_drafts_total Verification steps
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 10
# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total 30
# TYPE llamacpp:spec_decode_num_accepted_tokens_per_pos_total counter
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 6
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 2
"""


def check(prompts: list[list[int]]) -> Check:
    return Check(
        model_path=Path("m"),
        drafter_path=Path("d"),
        num_drafts=3,
        dtype="float32",
        prompts=prompts,
        max_tokens=5,
        num_streams=2,
    )


@pytest.mark.parametrize("text", [OURS, THEIRS])
def test_the_counters_of_every_engine_are_read(text: str) -> None:
    found = parse_drafting(text)

    assert found == Drafting(num_verifies=10, num_drafts=30, accepted_per_slot=[6, 2])
    assert found.tokens_per_verify == pytest.approx(1.8)
    assert found.per_slot == pytest.approx([0.6, 0.2])


def test_rows_compare_with_the_first() -> None:
    ours = Answers(engine="paceline", drafting=parse_drafting(OURS), texts=["a", "b"], num_tokens=18)
    theirs = Drafting(num_verifies=12, num_drafts=36, accepted_per_slot=[5, 1])

    lines = table_of(
        [ours, Answers(engine="x", drafting=theirs, texts=["a", "c"], num_tokens=18)]
    ).splitlines()

    assert lines[2] == "| paceline | 2 | 2 | 18 | 10 | 1.800 | 1.000 | 0.600 0.200 |"
    assert lines[3] == "| x | 2 | 1 | 18 | 12 | 1.500 | 0.833 | 0.417 0.083 |"


def test_a_server_that_cannot_be_compared_is_refused() -> None:
    async def run(server: ScriptedServer) -> None:
        async with server.listening() as url:
            await ask_server(url, "x", check([[1, 2]]))

    with pytest.raises(BenchError, match="answered 503"):
        asyncio.run(run(ScriptedServer(fails_at=1)))
    with pytest.raises(UserError, match="no prompt is left"):
        check_of(Path("m"), Path("d"), "float32", [], 5, 1)

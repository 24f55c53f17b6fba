"""The drafter behind a real (tiny) target: it reads in the tap scratch what the reference is given."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drive import make_config
from tiny import make_checkpoint
from tiny_drafter import MASK_TOKEN_ID, VOCAB_SIZE, config_of, load_reference, make_drafter
from transformers import AutoModelForCausalLM, DynamicCache

from paceline.cluster.messages import Admit, Chunk, Commit, Open, Propose, SamplingParams, ShardPlan, StepPlan
from paceline.drafter.dflash_proposer import DFlashProposer
from paceline.drafter.runner import ShardRunner
from paceline.drafter.target import Target
from paceline.workers.runner import Runner

PAGE_SIZE = 16
PROMPT_LEN = 40
GREEDY = SamplingParams(max_tokens=200, temperature=0.0)
ACCEPTED = [0, 3, 7, 1, 2, 7, 0, 5]
TAP_LAYER_IDS = [0, 1]


def num_pages(length: int) -> int:
    return -(-length // PAGE_SIZE)


@pytest.mark.parametrize("generation", [1, 2])
def test_drafts_equal_the_references_on_the_targets_own_states(tmp_path: Path, generation: int) -> None:
    """Chunked prefill, then blocks of which some drafts stand; rows of rejected ones never become context."""
    path = make_checkpoint(tmp_path / "target", "qwen3")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompt = torch.randint(3, MASK_TOKEN_ID, (1, PROMPT_LEN), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        tokens = model.generate(prompt, max_new_tokens=60, do_sample=False, eos_token_id=VOCAB_SIZE - 1)
        hidden = model(tokens, output_hidden_states=True).hidden_states
        features = torch.cat([hidden[layer_id + 1] for layer_id in TAP_LAYER_IDS], dim=-1)
    tokens = tokens[0].tolist()

    config = config_of(
        generation=generation,
        layer_types=("sliding_attention", "full_attention"),
        num_target_layers=3,
        options={"target_layer_ids": TAP_LAYER_IDS},
    )
    drafter = make_drafter(tmp_path / "drafter", config)
    reference, cache = load_reference(drafter), DynamicCache()
    target = Target.load(path, 256, torch.float32, torch.device("cpu"))
    assert target.head is not None
    head = target.head
    proposer = DFlashProposer.load(
        drafter, target, context_bytes=1 << 20, page_size=PAGE_SIZE, dtype=torch.float32
    )
    runner = Runner(path, make_config(page_size=PAGE_SIZE), tap_layer_ids=tuple(TAP_LAYER_IDS))
    shard = ShardRunner(0, proposer, runner.tap_buffer, check=True)

    runner.execute(StepPlan(step=1, admit=[Admit(1, tokens[:PROMPT_LEN], PROMPT_LEN, GREEDY)]))
    shard.execute(ShardPlan(number=1, open=[Open(1, tokens[:PROMPT_LEN], PROMPT_LEN, GREEDY)]))
    for step, (start, end) in enumerate([(0, 25), (25, PROMPT_LEN)], start=2):
        new_pages = list(range(num_pages(start), num_pages(end)))
        chunk = Chunk(1, start, end - start, [], new_pages, int(end == PROMPT_LEN))
        runner.execute(StepPlan(step=step, chunks=[chunk]))
        commit = Commit(1, step, 0, end - start, start, new_pages)
        shard.execute(ShardPlan(number=step, commits=[commit]))

    computed, shown, new_tokens, num_held = PROMPT_LEN, 0, 1, num_pages(PROMPT_LEN)
    commits: list[Commit] = []
    for step, accepted in enumerate(ACCEPTED, start=4):
        anchor = tokens[computed]
        proposal = Propose(1, tokens[computed + 1 - new_tokens : computed + 1], [30, 31])
        (draft,) = shard.execute(
            ShardPlan(number=step, num_drafts=7, commits=commits, propose=[proposal])
        ).drafts
        ids = torch.tensor([[anchor] + [MASK_TOKEN_ID] * 7])
        states = reference(
            target_hidden=features[:, shown:computed],
            noise_embedding=target.embedding[ids],
            position_ids=torch.arange(shown, computed + 8)[None],
            past_key_values=cache,
            use_cache=True,
        )[:, 1:]
        cache.crop(-8)
        shown = computed
        logits = reference.compute_logits(states, lambda x: x @ head.T)
        if generation == 1:
            expected = logits.argmax(-1)
        else:
            expected = reference.candidate_selector.select(states, logits, torch.tensor([anchor]), 0.0)[0]
        assert draft.token_ids == expected[0].tolist()

        block = tokens[computed : computed + accepted + 1] + [MASK_TOKEN_ID - 1] * (7 - accepted)
        end = computed + accepted + 1
        pages = list(range(num_held, num_pages(computed + 8)))
        num_held += len(pages)
        (decision,) = runner.execute(
            StepPlan(step=step, chunks=[Chunk(1, computed, 8, block, pages, 8)])
        ).decisions
        assert decision.token_ids[: accepted + 1] == tokens[computed + 1 : end + 1]
        new_pages = list(range(num_pages(computed), num_pages(end)))
        commits = [Commit(1, step, 0, accepted + 1, computed, new_pages)]
        computed, new_tokens = end, accepted + 1

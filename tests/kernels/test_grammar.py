"""Masks of a grammar: of rows along drafts, of shards, and as a function of the settled output alone."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from paceline.cluster.messages import Grammar
from paceline.kernels.grammar import GRAMMAR_ERRORS, Grammars, Matcher

VOCAB_SIZE = 49152
EOS = 2
DIGITS = Grammar("regex", "[0-9]{3}(, [0-9]{3})*")


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(default_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(default_model: Path) -> Grammars:
    return Grammars(default_model, VOCAB_SIZE, (EOS,))


def masked(matcher: Matcher, output: list[int], num_drafts: int, first_id: int = 0, size: int = VOCAB_SIZE):
    """Which tokens each row of a block leaves [R, size]."""
    logits = torch.zeros(num_drafts + 1, size)
    matcher.mask(logits, np.array(output, np.int32), first_id)
    return logits == 0


def test_a_row_is_masked_as_if_the_drafts_before_it_stood(grammars: Grammars, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("123, 456").ids
    along = masked(grammars.matcher(DIGITS), ids, len(ids) - 1)
    for row in range(len(ids)):
        assert torch.equal(along[row], masked(grammars.matcher(DIGITS), ids[: row + 1], 0)[0])
    assert not along[:-1, EOS][[0, 1]].any()
    assert along[-1, EOS]


def test_what_a_draft_was_leaves_no_trace(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Right drafts, wrong ones, an end too soon: the next block starts from what was settled."""
    ids = tokenizer.encode("123, 456").ids
    fresh, used = grammars.matcher(DIGITS), grammars.matcher(DIGITS)
    letter = tokenizer.encode("x").ids[0]
    for drafts in (ids[2:5], [letter, ids[2]], [EOS, ids[2]], []):
        masked(used, [*ids[:2], *drafts], len(drafts))
    assert torch.equal(masked(used, ids[:5], 0), masked(fresh, ids[:5], 0))
    assert used.look_ahead(np.array(ids[:5]), [*ids[5:], EOS, ids[0]]) == (len(ids) - 5 + 1, [])
    assert used.look_ahead(np.array(ids[:5]), [letter])[0] == 0


def test_what_must_follow_is_found(grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"city": {"const": "Paris"}}, "required": ["city"]}
    tag = {"type": "sequence", "elements": [{"type": "const_string", "value": "So: "}]}
    tag["elements"].append({"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1})
    matcher = grammars.matcher(
        Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))
    )
    _, forced = matcher.look_ahead(np.array([], np.int32), [])
    assert tokenizer.decode(forced).startswith("So:")


def test_shards_mask_their_part(grammars: Grammars, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("12").ids
    whole = masked(grammars.matcher(DIGITS), ids, 1)
    cut = 24_571  # no multiple of anything
    parts = [
        masked(grammars.matcher(DIGITS), ids, 1, first, size)
        for first, size in ((0, cut), (cut, VOCAB_SIZE - cut))
    ]
    assert torch.equal(torch.cat(parts, 1), whole)


def test_an_output_that_does_not_match_is_lost_and_so_is_no_grammar(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    for matcher in (grammars.matcher(DIGITS), grammars.matcher(Grammar("regex", "("))):
        assert masked(matcher, tokenizer.encode("hello").ids, 0).all()
        assert matcher.is_lost


def test_a_trial_tells_what_a_grammar_takes(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    trial = grammars.try_out(Grammar("json_schema", json.dumps(schema)))
    assert 0 < trial.num_bytes < 8 << 20
    assert 0 < trial.worst_mask_s < 1
    for grammar in (Grammar("regex", "("), Grammar("ebnf", "root ::= root")):
        with pytest.raises(GRAMMAR_ERRORS):
            grammars.try_out(grammar)

"""Grammars as masks over a vocabulary: which tokens may follow an output.

A matcher is a pure function of its grammar and the tokens of the output that are settled, so it is rebuilt
from those after a preemption or a lost epoch. Drafts are walked, masked behind, and taken back.
"""

import random
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..cluster.errors import ModelError
from ..cluster.messages import Grammar
from ..cluster.token_bytes import load_tokenizer, vocabulary

if TYPE_CHECKING:
    import xgrammar

MAX_WHITESPACE = 16  # between two tokens of JSON: small models would else write nothing but whitespace
_NUM_KEPT = 64  # compiled grammars, at most
_KEPT_BYTES = 256 << 20  # and what they may take together

_TRIAL_WALKS = 4
_TRIAL_LEN = 32
_NUM_FIRST_IDS = 512  # in byte-level vocabularies the bytes and the shortest tokens

GRAMMAR_ERRORS: tuple[type[Exception], ...] = (RuntimeError, ValueError, TypeError)  # what xgrammar raises


@dataclass(frozen=True, slots=True)
class Trial:
    """What a grammar takes."""

    num_bytes: int
    worst_mask_s: float  # of CPU time, to find what may follow an output


class Grammars:
    """Makes the matchers of one model, and keeps the grammars it compiled last.

    A grammar is compiled lazily: its parts become masks when an output first reaches them, so that one more
    grammar hardly holds up a step. `try_out` tells beforehand what it will cost.
    """

    def __init__(self, model_path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self._model_path = model_path
        self._eos_token_ids = list(eos_token_ids)
        self._compiled: OrderedDict[Grammar, xgrammar.CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self._is_loading = False
        self._unspelled: frozenset[int] = frozenset()  # tokens without text that are no end
        self._compiler: xgrammar.GrammarCompiler | None = None

    @property
    def is_loaded(self) -> bool:
        return self._compiler is not None

    def load_soon(self) -> None:
        """Read the vocabulary beside what this process does next: it takes a second or two."""
        if self._is_loading:
            return
        self._is_loading = True
        threading.Thread(target=self._load_if_possible, name="grammar vocabulary").start()

    def load(self) -> None:
        """Read the vocabulary unless that is done; ModelError if the model has none."""
        import xgrammar  # it imports transformers, which takes longer than all of a rank's other imports

        with self._lock:
            if self._compiler is None:
                vocab = vocabulary(load_tokenizer(self._model_path))[: self.vocab_size]
                unspelled = {token_id for token_id, spelled in enumerate(vocab) if not spelled}
                self._unspelled = frozenset(unspelled.difference(self._eos_token_ids))
                info = xgrammar.TokenizerInfo(
                    vocab, vocab_size=self.vocab_size, stop_token_ids=self._eos_token_ids
                )
                self._compiler = xgrammar.GrammarCompiler(
                    info, max_threads=1, cache_enabled=False, enable_dynamic_compilation=True
                )

    def try_out(self, grammar: Grammar) -> Trial:
        """Compile a grammar, write some outputs that match it, and keep nothing.

        Raises one of GRAMMAR_ERRORS for what is no grammar or matches nothing.
        """
        import xgrammar

        self.load()
        assert self._compiler is not None
        compiled = _compile(self._compiler, grammar)
        words = torch.empty((1, -(-self.vocab_size // 32)), dtype=torch.int32)
        numbers = random.Random(0)
        worst_s = 0.0
        for _ in range(_TRIAL_WALKS):
            matcher = xgrammar.GrammarMatcher(compiled)
            for _ in range(_TRIAL_LEN):
                began = time.process_time()
                words.fill_(-1)
                matcher.fill_next_token_bitmask(words)
                worst_s = max(worst_s, time.process_time() - began)
                allowed = np.flatnonzero(_bits(words[0]))
                if not len(allowed):
                    raise ValueError("it leads to where no token can follow")
                # Short tokens are mostly those that move it on; among all tokens text is the most likely.
                few = allowed[allowed < _NUM_FIRST_IDS]
                matcher.accept_token(int(numbers.choice(few if len(few) else allowed)))
                if matcher.is_terminated():
                    break
        return Trial(compiled.memory_size_bytes, worst_s)

    def matcher(self, grammar: Grammar) -> "Matcher":
        """A matcher at the beginning; one for a grammar that cannot be compiled is lost from the start."""
        import xgrammar

        try:
            compiled = self._compiled.pop(grammar, None)
            if compiled is None:
                self.load()
                assert self._compiler is not None
                compiled = _compile(self._compiler, grammar)
            self._compiled[grammar] = compiled
            self._evict()
            return Matcher(xgrammar.GrammarMatcher(compiled), self.vocab_size, self._unspelled)
        except (*GRAMMAR_ERRORS, ModelError):
            return Matcher(None, self.vocab_size, self._unspelled)

    def _evict(self) -> None:
        """Let go of what was used longest ago; a matcher keeps its own grammar alive."""
        while len(self._compiled) > 1 and (
            len(self._compiled) > _NUM_KEPT
            or sum(compiled.memory_size_bytes for compiled in self._compiled.values()) > _KEPT_BYTES
        ):
            self._compiled.popitem(last=False)

    def _load_if_possible(self) -> None:
        try:
            self.load()
        except ModelError:
            return  # no grammar will come: the server has no tokenizer either


class Matcher:
    """Where one output stands in its grammar."""

    def __init__(
        self, matcher: "xgrammar.GrammarMatcher | None", vocab_size: int, unspelled: frozenset[int]
    ) -> None:
        self._matcher = matcher
        self._unspelled = unspelled
        self._num_settled = 0  # tokens of the output it has accepted for good
        self._num_words = -(-vocab_size // 32)

    @property
    def is_lost(self) -> bool:
        """Whether the settled output does not match: then nothing can be said of what follows."""
        return self._matcher is None

    def mask(self, logits: Tensor, output: NDArray[np.integer], first_id: int = 0) -> None:
        """Set what may not follow to -inf, in place.

        logits float32 [R, V] are ids first_id .. first_id + V - 1 of R rows of one block. `output` ends with
        the block's drafts, R - 1 of them; what comes before is settled. Rows behind a draft that the grammar
        forbids are left as they are: they decide nothing that can stand.
        """
        num_drafts = len(logits) - 1
        self._settle(output[: len(output) - num_drafts])
        if self._matcher is None:
            return
        words = torch.full((len(logits), self._num_words), -1, dtype=torch.int32)
        num_walked = 0
        for row in range(len(logits)):
            if self._matcher.fill_next_token_bitmask(words, row):
                _apply(logits[row], words[row], first_id)
            if row < num_drafts and not self._walk(int(output[len(output) - num_drafts + row])):
                break
            num_walked += row < num_drafts
        self._matcher.rollback(num_walked)

    def look_ahead(self, output: NDArray[np.integer], drafts: list[int]) -> tuple[int, list[int]]:
        """How many drafts may stand behind a settled output, and the tokens that must follow those.

        An end counts as a draft; nothing follows it.
        """
        self._settle(output)
        if self._matcher is None:
            return 0, []
        num_walked = 0
        for token_id in drafts:
            if self._matcher.is_terminated() or not self._accepts(token_id):
                break
            num_walked += 1
        forced = [] if self._matcher.is_terminated() else self._matcher.find_jump_forward_tokens()
        self._matcher.rollback(num_walked)
        return num_walked, forced

    def _walk(self, draft: int) -> bool:
        """Go behind a draft; False, and no step, if nothing can follow it."""
        assert self._matcher is not None
        if not self._accepts(draft):
            return False
        if self._matcher.is_terminated():
            self._matcher.rollback(1)
            return False
        return True

    def _accepts(self, draft: int) -> bool:
        assert self._matcher is not None
        # of these the library would say in the log that it cannot accept them
        return draft not in self._unspelled and self._matcher.accept_token(draft)

    def _settle(self, output: NDArray[np.integer]) -> None:
        for token_id in output[self._num_settled :].tolist():
            if self._matcher is None or not self._matcher.accept_token(token_id):
                self._matcher = None
                return
        self._num_settled = len(output)


def _compile(compiler: "xgrammar.GrammarCompiler", grammar: Grammar) -> "xgrammar.CompiledGrammar":
    match grammar.kind:
        case "json_schema":
            return compiler.compile_json_schema(grammar.source, max_whitespace_cnt=MAX_WHITESPACE)
        case "regex":
            return compiler.compile_regex(grammar.source)
        case "ebnf":
            return compiler.compile_grammar(grammar.source)
        case "structural_tag":
            return compiler.compile_structural_tag(grammar.source)


def _apply(row: Tensor, words: Tensor, first_id: int) -> None:
    """Mask one row [V]; bit t of the words is token t."""
    last_id = first_id + len(row)
    is_masked = torch.from_numpy(_bits(words)[first_id:last_id] == 0)
    row.masked_fill_(is_masked.to(row.device), float("-inf"))


def _bits(words: Tensor) -> NDArray[np.uint8]:
    return np.unpackbits(words.numpy().view(np.uint8), bitorder="little")

"""What clients may see of the choices of a request: piece by piece as it is made, and gathered."""

from dataclasses import dataclass, field

from ...cluster.messages import TokenLogprobs
from .answer import CallDelta


@dataclass(slots=True)
class Piece:
    """What one step gave one choice, as its client may see it."""

    index: int
    text: str  # words
    num_tokens: int  # counted in usage
    tokens: list[tuple[int, TokenLogprobs]]  # only when log-probabilities were asked for
    num_reasoning: int = 0  # tokens of thoughts; also earlier ones that might have become words
    token_ids: list[int] = field(default_factory=list)  # all that count, only when asked for
    finish_reason: str | None = None
    num_cached_tokens: int = 0  # of the prompt; in the first piece only
    num_drafts: int = 0  # tokens drafted for this step
    num_accepted: int = 0  # of these, how many stood
    texts: list[str] | None = None  # `text` token by token, for a stream that tells its steps
    stop_string: str | None = None  # that ended the text
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of prompt tokens, when asked for
    first_scored: int = 0  # position of the first of them
    reasoning: str = ""  # thoughts
    calls: list[CallDelta] = field(default_factory=list)  # of tools


@dataclass(slots=True)
class Gathered:
    """All pieces of one choice."""

    text: str = ""
    tokens: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_string: str | None = None
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)  # each whole

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.reasoning += piece.reasoning
        for part in piece.calls:
            if part.name is not None:
                self.calls.append(CallDelta(part.index, part.arguments, part.call_id, part.name))
            else:
                self.calls[part.index].arguments += part.arguments
        self.tokens += piece.tokens
        self.token_ids += piece.token_ids
        self.finish_reason = piece.finish_reason
        self.stop_string = piece.stop_string
        self.prompt_logprobs |= dict(enumerate(piece.prompt_logprobs, piece.first_scored))

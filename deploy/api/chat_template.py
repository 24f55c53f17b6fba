"""A model's Jinja chat template, in a sandbox that can neither reach Python nor change its input.

What it may take is bounded: every turn of a loop looks at the clock, every piece of text counts.
"""

import difflib
import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from ...cluster.errors import ModelError, RequestError

RENDER_S = 2.0
MAX_RENDERED_CHARS = 16 << 20

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OURS = frozenset({*_NAMED_TOKENS, "messages", "tools", "add_generation_prompt", "_tick"})
_UNDERSTOOD = frozenset(
    {"enable_thinking", "thinking", "reasoning_effort"}
)  # ignored where they do not apply
_TICK = "_tick"


class ChatTemplate:
    """Immutable; safe to use from several threads."""

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        try:
            tree = environment.parse(source)
            variables = jinja2.meta.find_undeclared_variables(tree)
            for node in tree.find_all((jinja2.nodes.For, jinja2.nodes.Macro)):
                node.body.insert(0, _tick_node(node.lineno))
            self._template = environment.from_string(tree)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template is not valid Jinja: {error}") from None
        self.source = source
        self.has_tools = "tools" in variables
        self._own_variables = frozenset(variables - _OURS - {"raise_exception", "strftime_now"})
        self._named_tokens = dict(named_tokens)

    @classmethod
    def load(cls, path: Path) -> "ChatTemplate | None":
        """The template in `chat_template.jinja`, else in `tokenizer_config.json`; None without either."""
        config: dict[str, Any] = {}
        if (file := path / "tokenizer_config.json").is_file():
            config = json.loads(file.read_text(encoding="utf-8"))
        if (file := path / "chat_template.jinja").is_file():
            source = file.read_text(encoding="utf-8")
        else:
            source = config.get("chat_template")
        if isinstance(source, list):  # several by name
            source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
        if source is None:
            return None
        named = {name: config[name] for name in _NAMED_TOKENS if config.get(name)}
        return cls(source, {k: v if isinstance(v, str) else v["content"] for k, v in named.items()})

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise RequestError unless these are variables that the template reads and no one else sets."""
        known = self._own_variables | _UNDERSTOOD
        for name, value in options.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise RequestError(
                    f"'chat_template_kwargs' has {name[:100]!r}, which this model's template does not read; "
                    + (f"did you mean {near[0]!r}?" if near else f"it reads {', '.join(sorted(known))}"),
                    code="unsupported_parameter",
                    param="chat_template_kwargs",
                )
            if not (value is None or isinstance(value, bool | int | float | str)) or len(str(value)) > 256:
                raise RequestError(
                    f"'chat_template_kwargs.{name}' must be a boolean, a number or a short string",
                    code="invalid_type",
                    param="chat_template_kwargs",
                )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        opens_turn: bool = True,
    ) -> str:
        """The conversation, and where `opens_turn` the beginning of the assistant's next turn.

        Raises RequestError where the template refuses it.
        """
        clock = _Clock(time.monotonic() + RENDER_S)
        variables = {**self._named_tokens, **(options or {}), "messages": messages, _TICK: clock.tick}
        if tools:
            variables["tools"] = tools
        try:
            pieces: list[str] = []
            for piece in self._template.generate(add_generation_prompt=opens_turn, **variables):
                clock.count(piece)
                pieces.append(piece)
            return "".join(pieces)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(
                f"the model's chat template refuses these messages: {error}",
                code="invalid_messages",
                param="messages",
            ) from None


class _Clock:
    """Ends a rendering that takes too long or writes too much."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._num_chars = 0

    def tick(self) -> str:
        if time.monotonic() > self._deadline:
            raise _too_much(f"longer than {RENDER_S:.0f} s")
        return ""

    def count(self, piece: str) -> None:
        self.tick()
        self._num_chars += len(piece)
        if self._num_chars > MAX_RENDERED_CHARS:
            raise _too_much(f"more than {MAX_RENDERED_CHARS} characters")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; for serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tick_node(line: int) -> jinja2.nodes.Node:
    """A statement that looks at the clock."""
    call = jinja2.nodes.Call(jinja2.nodes.Name(_TICK, "load"), [], [], None, None)
    return jinja2.nodes.ExprStmt(call).set_lineno(line, override=True)


def _too_much(what: str) -> RequestError:
    return RequestError(
        f"rendering these messages takes {what}; send fewer or shorter ones",
        code="messages_too_large",
        param="messages",
    )


def _to_json(value: Any, indent: int | None = None, separators: Any = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)  # Jinja's escapes HTML


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)

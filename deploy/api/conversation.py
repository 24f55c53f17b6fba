"""A chat request as the model sees it: a prompt, a grammar where the answer's form is fixed, a reader."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...cluster.config import ModelConfig
from ...cluster.errors import RequestError
from ...cluster.messages import Grammar
from .answer import MakeReader, ThoughtReader
from .openai_protocol import ChatMessage, ChatRequest
from .structured import tag_grammar
from .text import Tokenizer
from .tool_formats import Form, ToolFormat, choose_tool_format, schema_form, tool_prompt
from .tools import Tool


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model writes what is not words."""

    tools: ToolFormat | None = None
    has_thoughts: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: ModelConfig) -> "ChatFormat":
        """As configured, or as the chat template lets one see."""
        template = tokenizer.chat_template.source if tokenizer.has_chat_template else ""
        has_thoughts = config.reasoning_parser == "think" or (
            config.reasoning_parser == "auto" and ThoughtReader.CLOSING in template
        )
        return cls(choose_tool_format(config.tool_call_parser, template), has_thoughts)


ONLY_WORDS = ChatFormat()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a request's messages, tools and wishes for the answer's form come to."""

    prompt_ids: list[int]
    grammar: Grammar | None  # with what the request says of the form itself
    make_reader: MakeReader | None  # None: the answer is all words


def prepare_conversation(
    request: ChatRequest, tokenizer: Tokenizer, form: ChatFormat, grammar: Grammar | None
) -> Conversation:
    """Render and combine; `grammar` is what the words must match. Raises RequestError."""
    template = tokenizer.chat_template
    given = request.chat_template_kwargs or {}
    template.check_options(given)
    options = {**_effort(request.reasoning_effort), **given}
    choice = request.tool_choice
    mode = "auto" if choice is None else choice.mode
    tools = request.tools if request.tools and mode != "none" else None
    if tools and form.tools is None:
        raise RequestError(
            "this server does not read calls of tools; it was started with --tool-call-parser none",
            code="unsupported_parameter",
            param="tools",
        )
    messages = _messages(request.messages, tools, has_tools=template.has_tools)
    shown = [tool.as_template() for tool in tools] if tools and template.has_tools else None
    rendered = tokenizer.render(
        messages,
        tools=shown,
        options=options,
        opens_turn=request.add_generation_prompt is not False,
        continues=bool(request.continue_final_message),
    )
    is_thinking = form.has_thoughts and _is_open(rendered.tail)
    may_think = form.has_thoughts and (is_thinking or ThoughtReader.CLOSING not in rendered.tail)
    callable_tools = [
        tool.function
        for tool in tools or []
        if choice is None or choice.names is None or tool.function.name in choice.names
    ]
    answer = None if grammar is None else _form_of(grammar)
    if callable_tools:
        assert form.tools is not None
        is_many = request.parallel_tool_calls is not False and not (
            choice is not None and mode == "required" and choice.names is not None and len(choice.names) == 1
        )
        calls = form.tools.enforce(callable_tools, is_many)
        if mode == "required":
            answer = calls
        elif answer is not None:
            answer = {"type": "or", "elements": [calls, answer]}
        elif form.tools.trigger and "tags" in calls and any(tool.strict for tool in callable_tools):
            answer = _among_words(calls, form.tools.trigger)
    if answer is not None and may_think:
        answer = _behind_thoughts(answer, is_open=is_thinking)
    is_plain = grammar is not None and not callable_tools and not may_think
    return Conversation(
        prompt_ids=rendered.token_ids,
        grammar=grammar if is_plain else None if answer is None else tag_grammar(answer),
        make_reader=_make_reader(form, [tool.name for tool in callable_tools], may_think, is_thinking),
    )


def _effort(effort: str | None) -> dict[str, Any]:
    """How much to think, in the words of templates: some know an effort, some a switch."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def _make_reader(form: ChatFormat, names: list[str], may_think: bool, is_thinking: bool) -> MakeReader | None:
    tools = form.tools if names else None
    if tools is None and not may_think:
        return None

    def make() -> Any:
        rest = None if tools is None else tools.read(frozenset(names), tools.make_id)
        return ThoughtReader(rest, is_open=is_thinking) if may_think else rest

    return make


def _is_open(tail: str) -> bool:
    """Whether the prompt ends inside a thought."""
    return tail.rfind(ThoughtReader.OPENING) > tail.rfind(ThoughtReader.CLOSING)


def _form_of(grammar: Grammar) -> Form:
    match grammar.kind:
        case "json_schema":
            return schema_form(json.loads(grammar.source))
        case "regex":
            return {"type": "regex", "pattern": grammar.source}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.source}
        case "structural_tag":
            return json.loads(grammar.source)["format"]


def _among_words(calls: Form, trigger: str) -> Form:
    """Free text in which calls are held to their schemas."""
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": calls["tags"],
        "stop_after_first": calls["stop_after_first"],
    }


def _behind_thoughts(answer: Form, *, is_open: bool) -> Form:
    thought: Form = {
        "type": "tag",
        "begin": "" if is_open else ThoughtReader.OPENING,
        "content": {"type": "any_text"},
        "end": ThoughtReader.CLOSING,
    }
    blank = {"type": "regex", "pattern": "[\\n ]{0,4}"}
    thinking: Form = {"type": "sequence", "elements": [thought, blank, answer]}
    return thinking if is_open else {"type": "or", "elements": [thinking, answer]}


def _messages(
    messages: Sequence[ChatMessage], tools: list[Tool] | None, *, has_tools: bool
) -> list[dict[str, Any]]:
    """As templates take them; where a template knows nothing of tools, as words."""
    shown = [message.as_template() for message in messages]
    names = {call.id: call.function.name for message in messages for call in message.tool_calls or []}
    for message in shown:
        if message["role"] == "tool":
            message["name"] = names.get(message["tool_call_id"], "")
    if has_tools:
        return shown
    in_words = [_in_words(message) for message in shown]
    if tools:
        prompt = tool_prompt([tool.function for tool in tools])
        if in_words[0]["role"] == "system":
            in_words[0] = {**in_words[0], "content": f"{in_words[0]['content']}\n\n{prompt}"}
        else:
            in_words.insert(0, {"role": "system", "content": prompt})
    return in_words


def _in_words(message: dict[str, Any]) -> dict[str, Any]:
    """Calls and their results in Hermes's form."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.pop("tool_calls", [])
    written = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls
    ]
    return {
        **message,
        "content": "\n".join([*([message["content"]] if message["content"] else []), *written]),
    }

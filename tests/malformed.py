"""What a server may be sent and must survive: 77 kinds of malformed requests, each with what it is answered.

Rows 71 to 75 are not malformed, but as plainly refused. Some rows need more than a body or some bytes: their
`deed` is the name of a function in `deploy/test_malformed.py`.
"""

import json
from dataclasses import dataclass, field
from typing import Any

MODEL = "org/tiny"
MAX_MODEL_LEN = 500
MAX_BODY_BYTES = 1 << 20
KEY = "sk-everyones-key"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = {"role": "user", "content": "hi"}
OMIT = object()
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Sent:
    """One request and its answer; a good one with `changes`, unless it has a `body`."""

    code: str | None  # None: it is not refused
    param: str | None = None
    status: int = 400
    path: str = CHAT
    changes: dict[str, Any] = field(default_factory=dict)
    body: bytes | None = None
    headers: list[tuple[str, str]] = field(default_factory=lambda: [*JSON.items()])
    key: bool = True  # whether ours is sent
    method: str = "POST"


@dataclass(frozen=True)
class Wire:
    """Bytes for a socket, and what the answer's status may be; 0 stands for none before it is closed."""

    sent: bytes
    statuses: tuple[int, ...] = (400,)


@dataclass(frozen=True)
class Row:
    number: int
    what: str
    tries: tuple[Sent | Wire, ...] = ()
    deed: str | None = None


def row(number: int, what: str, *tries: Sent | Wire, deed: str | None = None) -> Row:
    return Row(number, what, tries, deed)


def chat(code: str | None, param: str | None = None, /, **changes: Any) -> Sent:
    return Sent(code, param, 200 if code is None else 400, CHAT, changes)


def text(code: str | None, param: str | None = None, /, **changes: Any) -> Sent:
    return Sent(code, param, 200 if code is None else 400, TEXT, changes)


def said(code: str, content: Any, param: str = "messages[0].content") -> Sent:
    return chat(code, param, messages=[{"role": "user", "content": content}])


def raw(code: str, *bodies: bytes) -> list[Sent]:
    return [Sent(code, path=path, body=body) for body in bodies for path in (CHAT, TEXT)]


def unauthorized(code: str, *headers: tuple[str, str]) -> Sent:
    return Sent(code, status=401, headers=[*JSON.items(), *headers], key=False)


def typed(status: int, code: str, *headers: tuple[str, str]) -> Sent:
    return Sent(code, status=status, body=GOOD, headers=list(headers))


def get(path: str, status: int, code: str) -> Sent:
    return Sent(code, status=status, path=path, method="GET", headers=[], body=b"")


def each(code: str, param: str, *values: Any, path: str = CHAT) -> list[Sent]:
    """One request per value of one field."""
    return [Sent(code, param, path=path, changes={param.partition("[")[0]: value}) for value in values]


def schema(code: str, schema: Any, param: str = "response_format.json_schema.schema", **more: Any) -> Sent:
    wrapper = {"name": "it", "schema": schema, **more}
    return chat(code, param, response_format={"type": "json_schema", "json_schema": wrapper})


def structured(code: str, param: str, **asked: Any) -> Sent:
    return text(code, param, structured_outputs=asked)


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth else {}


def wire(*lines: str, body: bytes = b"", statuses: tuple[int, ...] = (400,), key: bool = True) -> Wire:
    head = [*lines, "Host: x", *([f"Authorization: Bearer {KEY}"] if key else [])]
    return Wire("\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body, statuses)


def posted(*lines: str, body: bytes | None = None, statuses: tuple[int, ...] = (400,)) -> Wire:
    return wire(f"POST {CHAT} HTTP/1.1", "Content-Type: application/json", *lines,
                body=GOOD if body is None else body, statuses=statuses)  # fmt: skip


GOOD = json.dumps({"model": MODEL, "messages": [USER], "max_tokens": 1}).encode()
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
WIDE = {"properties": {f"p{i}": {} for i in range(6000)}}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


ROWS: list[Row] = [
    # transport and keys
    row(1, "no key", unauthorized("missing_api_key")),
    row(2, "a wrong key", unauthorized("invalid_api_key", ("authorization", "Bearer sk-nobodys-key"))),
    row(3, "another scheme, an empty key, two keys",
        unauthorized("invalid_api_key", ("authorization", f"Basic {KEY}")),
        unauthorized("invalid_api_key", ("authorization", "Bearer")),
        unauthorized("invalid_api_key", *[("authorization", f"Bearer {KEY}")] * 2)),
    row(4, "paths and hosts that mean to lead past the gate",
        *(wire(f"GET {path} HTTP/1.1", "Connection: close", key=False, statuses=(400, 401, 404))
          for path in ("//v1/models", "/v1/%2e%2e/v1/models", "/health/../v1/models", "http://x/v1/models")),
        wire("GET /v1/models HTTP/1.1", "Host: x/health?", "Connection: close", key=False,
             statuses=(400, 401))),
    row(5, "a path that is not there", get("/v1/foo", 404, "unknown_url")),
    row(6, "a method that a path does not have", get(CHAT, 405, "method_not_allowed")),
    row(7, "another content type",
        typed(415, "unsupported_media_type", ("content-type", "text/plain")),
        typed(415, "unsupported_media_type", ("content-type", "application/x-www-form-urlencoded")),
        typed(415, "unsupported_media_type")),
    row(8, "a body that is not JSON, or not all of it, or more",
        *raw("invalid_json", b"{", GOOD[:-3], b'{"model": "m"} x', b"1" * 10000)),
    row(9, "no body", *raw("invalid_json", b"")),
    row(10, "JSON that is no object", *raw("invalid_type", b"[]", b'"hi"', b"null")),
    row(11, "text that is not UTF-8, or half a character; NUL is text",
        *raw("invalid_encoding", b'{"model": "\xff"}', b'{"prompt": "\xed\xa0\x80"}', b'{"user": "\\ud800"}'),
        chat(None, messages=[{"role": "user", "content": "a\0b"}])),
    row(12, "numbers that are none",
        *raw("invalid_json", *(b'{"temperature": %b}' % n for n in (b"NaN", b"Infinity", b"1e400")))),
    row(13, "a key twice", *raw("duplicate_key", b'{"n": 1, "n": 2}')),
    row(14, "deep nesting",
        *raw("json_too_deep", b"[" * 10000 + b"]" * 10000, b'{"a":' * 100000 + b"1" + b"}" * 100000)),
    row(15, "bodies too large, with and without a length, and a length that lies",
        Sent("request_too_large", status=413, changes={"user": "x" * MAX_BODY_BYTES}),
        deed="bodies_without_end"),
    row(16, "headers too long, or too many",
        wire("GET /v1/models HTTP/1.1", "X-Long: " + "x" * 20_000, "Connection: close", statuses=(400, 431)),
        wire("GET /v1/models HTTP/1.1", "X-Long: " + "x" * 200_000, statuses=(400, 431)),
        wire("GET /v1/models HTTP/1.1", *(f"X-{i}: y" for i in range(1000)), "Connection: close",
             statuses=(400, 431))),
    row(17, "a compressed body",
        typed(415, "unsupported_media_type", *JSON.items(), ("content-encoding", "gzip"))),
    row(18, "bytes that are no HTTP, or two readings of one request",
        posted("Content-Length: 5", "Transfer-Encoding: chunked", body=b"0\r\n\r\nGET / HTTP/1.1\r\n\r\n"),
        posted("Content-Length: 1", "Content-Length: 2", body=b"ab"),
        posted("Content-Length: -5"), posted("Content-Length: +5"), posted("Content-Length: 5, 6"),
        posted("Transfer-Encoding: chunked", body=b"zz\r\n", statuses=(400, 0)),
        posted(f"Content-Length: {len(GOOD) - 5}", "Connection: close"),
        Wire(b"GET /health\r\n\r\n", (400, 0)),
        Wire(b"\x16\x03\x01\x02\x00\x01\x00\x01"),
        wire("GET /heal\x00th HTTP/1.1"), wire("GET /health HTTP/1.1", "Bad Header : 1"),
        deed="asking_to_go_on"),
    # model and messages
    row(19, "no model",
        chat("missing_required_parameter", "model", model=OMIT), chat("invalid_type", "model", model=None)),
    row(20, "a model that is not here", Sent("model_not_found", "model", 404, changes={"model": "gpt-4"})),
    row(21, "a model that is no name",
        *each("invalid_type", "model", 5, ["a"], {}),
        Sent("model_not_found", "model", 404, changes={"model": "../../etc"}),
        chat("string_above_max_length", "model", model="m" * 2000)),
    row(22, "no messages", chat("missing_required_parameter", "messages", messages=OMIT)),
    row(23, "an empty list of messages", chat("empty_array", "messages", messages=[])),
    row(24, "messages that are no list",
        *each("invalid_type", "messages", "hi", {"role": "user"}),
        chat("invalid_type", "messages[0]", messages=["hi"])),
    row(25, "no role, or one that is none",
        chat("missing_required_parameter", "messages[0].role", messages=[{"content": "hi"}]),
        chat("invalid_value", "messages[0].role", messages=[{"role": "king", "content": "hi"}])),
    row(26, "content that is no text", *(said("invalid_type", content) for content in (None, 5, {})),
        chat("missing_required_parameter", "messages[0].content", messages=[{"role": "user"}])),
    row(27, "parts that are no text",
        *(said("unsupported_content_type", [{"type": kind, kind: {"url": "http://127.0.0.1"}}])
          for kind in ("image_url", "input_audio", "file", "hologram"))),
    row(28, "parts without text, or no parts",
        said("invalid_type", [{"type": "text"}]), said("invalid_type", ["hi"]), said("empty_array", [])),
    row(29, "calls of tools without results, and results without calls",
        chat("conflicting_parameters", "messages[1]", messages=[USER, {"role": "tool", "content": "x"}]),
        chat("conflicting_parameters", "messages",
             messages=[USER, {"role": "tool", "content": "x", "tool_call_id": "lost"}]),
        chat("conflicting_parameters", "messages",
             messages=[USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, USER]),
        chat("conflicting_parameters", "messages",
             messages=[USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]),
        chat("conflicting_parameters", "messages[0]", messages=[{**USER, "tool_calls": [CALL]}]),
        chat("missing_required_parameter", "messages[0].tool_calls[0].id",
             messages=[{**USER, "tool_calls": [{}]}])),
    row(30, "an order of roles that the template refuses",
        chat("invalid_messages", "messages", messages=[USER, {"role": "system", "content": "late"}])),
    row(31, "too many messages", chat("array_above_max_length", "messages", messages=[USER] * 2049)),
    row(32, "the text of special tokens: it is text", deed="special_tokens_as_text"),
    row(33, "no prompt, in all ways",
        *each("missing_required_parameter", "prompt", OMIT, None, path=TEXT),
        *each("empty_array", "prompt", "", [], [[]], path=TEXT),
        *each("invalid_type", "prompt", 5, {}, ["a", 1], path=TEXT)),
    row(34, "token ids that are none",
        *each("invalid_token_id", "prompt", [-1], [1, 10**9], [1, 2**70], [1.5], [True], path=TEXT)),
    row(35, "too many prompts", text("array_above_max_length", "prompt", prompt=["a"] * 65)),
    # lengths
    row(36, "a prompt longer than the context",
        text("context_length_exceeded", "prompt", prompt=[3] * MAX_MODEL_LEN),
        said("context_length_exceeded", "the quick fox " * 5000, "messages")),
    row(37, "a prompt and max_tokens longer than the context",
        text("context_length_exceeded", "prompt", prompt=[3] * 10, max_tokens=MAX_MODEL_LEN - 9)),
    row(38, "max_tokens that is no count",
        *each("integer_below_min_value", "max_tokens", 0, -1),
        *each("integer_below_min_value", "max_completion_tokens", 0),
        *each("invalid_type", "max_tokens", 1.5, "10", True),
        chat("context_length_exceeded", "messages", max_tokens=2**63)),
    row(39, "both names of one limit",
        chat("conflicting_parameters", "max_completion_tokens", max_tokens=1, max_completion_tokens=1)),
    row(40, "more than the pages hold, which is more than the context: a server with fewer does not start",
        text("context_length_exceeded", "prompt", prompt=[3] * 300, max_tokens=MAX_MODEL_LEN - 299)),
    row(41, "min_tokens below 0, or above max_tokens",
        *each("integer_below_min_value", "min_tokens", -1),
        chat("integer_above_max_value", "min_tokens", min_tokens=5, max_tokens=4)),
    # sampling
    row(42, "temperature",
        *each("decimal_below_min_value", "temperature", -0.1),
        *each("decimal_above_max_value", "temperature", 2.1),
        *each("invalid_type", "temperature", "hot"), chat(None, temperature=None)),
    row(43, "top_p", *each("decimal_below_min_value", "top_p", 0, -1),
        *each("decimal_above_max_value", "top_p", 1.01)),
    row(44, "top_k and min_p",
        *each("integer_below_min_value", "top_k", -2), *each("invalid_type", "top_k", 1.5),
        *each("decimal_above_max_value", "min_p", 1.1)),
    row(45, "presence and frequency",
        *each("decimal_above_max_value", "presence_penalty", 2.1),
        *each("decimal_below_min_value", "frequency_penalty", -2.1)),
    row(46, "repetition",
        *each("decimal_below_min_value", "repetition_penalty", 0, -1),
        *raw("invalid_json", b'{"repetition_penalty": Infinity}')),
    row(47, "n", *each("integer_below_min_value", "n", 0, -1),
        *each("integer_above_max_value", "n", 9, 129, 10**9),
        *each("invalid_type", "n", "2")),
    row(48, "several greedy choices: they are the same", deed="greedy_choices_are_copies"),
    row(49, "best_of",
        text("unsupported_parameter", "best_of", best_of=1, n=2),
        text("unsupported_parameter", "best_of", best_of=2),
        text("unsupported_parameter", "best_of", best_of=2, stream=True)),
    row(50, "seed", *each("invalid_type", "seed", "x", 1.5), *each("integer_above_max_value", "seed", 2**63),
        *each("integer_below_min_value", "seed", -(2**63) - 1)),
    row(51, "stop",
        *each("array_above_max_length", "stop", list("abcde")), *each("empty_string", "stop", ""),
        *each("string_above_max_length", "stop", "x" * 10_000),
        *each("invalid_type", "stop[0]", [1], [["a"]])),
    row(52, "stop_token_ids",
        *each("invalid_token_id", "stop_token_ids", [-1], [10**7]),
        *each("invalid_type", "stop_token_ids[0]", ["1"])),
    row(53, "logit_bias",
        *each("invalid_token_id", "logit_bias", {"abc": 1}, {"-1": 1}, {"99999999": 1}),
        chat("decimal_above_max_value", "logit_bias.5", logit_bias={"5": 101}),
        chat("decimal_below_min_value", "logit_bias.5", logit_bias={"5": -101}),
        chat("invalid_type", "logit_bias.5", logit_bias={"5": "1"}),
        *each("array_above_max_length", "logit_bias", {str(i): 1 for i in range(10_000)}),
        *each("invalid_type", "logit_bias", [1])),
    row(54, "top_logprobs",
        chat("integer_above_max_value", "top_logprobs", logprobs=True, top_logprobs=21),
        chat("integer_below_min_value", "top_logprobs", logprobs=True, top_logprobs=-1),
        *each("conflicting_parameters", "top_logprobs", 1)),
    row(55, "logprobs",
        *each("integer_above_max_value", "logprobs", 6, path=TEXT),
        *each("invalid_type", "logprobs", True, "yes", path=TEXT),
        *each("invalid_type", "logprobs", 1, "yes")),
    row(56, "prompt_logprobs",
        text("conflicting_parameters", "prompt_logprobs", prompt_logprobs=1, stream=True),
        text("conflicting_parameters", "echo", echo=True, logprobs=1, stream=True),
        *each("integer_below_min_value", "prompt_logprobs", -1),
        *each("integer_above_max_value", "prompt_logprobs", 21),
        *each("invalid_type", "prompt_logprobs", True)),
    # streams and forms
    row(57, "stream", *each("invalid_type", "stream", "true", 1)),
    row(58, "stream_options without a stream",
        *each("conflicting_parameters", "stream_options", {"include_usage": True})),
    row(59, "stream_options that are none",
        chat("invalid_type", "stream_options", stream=True, stream_options=5),
        chat("invalid_type", "stream_options.include_usage", stream=True,
             stream_options={"include_usage": 1}),
        chat("unknown_parameter", "stream_options.usage", stream=True, stream_options={"usage": True})),
    row(60, "response_format",
        *each("invalid_type", "response_format", 5),
        chat("invalid_value", "response_format.type", response_format={"type": "xml"}),
        *each("invalid_value", "response_format", {"type": "json_schema"})),
    row(61, "schemas that are none, or too much",
        schema("invalid_json_schema", 5), schema("invalid_json_schema", {"type": "text"}, "response_format"),
        schema("invalid_json_schema", {"$ref": "#"}, "response_format"),
        schema("invalid_json_schema", {"$ref": "http://x/y"}),
        schema("invalid_json_schema", {"type": "string", "pattern": "("}, "response_format"),
        schema("grammar_too_complex", nested(70)), schema("grammar_too_complex", WIDE),
        schema("invalid_value", {"not": {}}, strict=True)),
    row(62, "expressions that explode; where backtracking would, an automaton does not",
        structured("grammar_too_complex", "structured_outputs", regex="(([a-z]{1,999}x?){1,999}y?){1,999}"),
        text(None, structured_outputs={"regex": "(a+)+$"}),
        structured("grammar_too_complex", "structured_outputs.regex", regex="a" * 5000)),
    row(63, "two forms at once, and empty ones",
        structured("invalid_value", "structured_outputs", regex="a", choice=["b"]),
        structured("invalid_value", "structured_outputs"),
        structured("invalid_value", "structured_outputs", json_object=False),
        structured("invalid_json_schema", "structured_outputs.json", json=""),
        structured("invalid_value", "structured_outputs.choice", choice=[]),
        text("conflicting_parameters", "structured_outputs",
             structured_outputs={"regex": "a"}, response_format={"type": "json_object"}),
        text("conflicting_parameters", "min_tokens", structured_outputs={"regex": "a"}, min_tokens=2)),
    row(64, "tools",
        *each("invalid_type", "tools", {}),
        chat("missing_required_parameter", "tools[0].function.name", tools=[tool()]),
        chat("invalid_value", "tools[0].function.name", tools=[tool(name="a b")]),
        *each("conflicting_parameters", "tools", [TOOL, TOOL]),
        *each("array_above_max_length", "tools", [TOOL] * 129),
        *each("unsupported_parameter", "tools", [{"type": "custom", "custom": {"name": "f"}}]),
        chat("grammar_too_complex", "tools[0].function.parameters",
             tools=[tool(name="f", parameters={"description": "x" * 500_000})])),
    row(65, "tool_choice",
        *each("conflicting_parameters", "tool_choice", "required"),
        *each("invalid_value", "tool_choice", "always"),
        chat("conflicting_parameters", "tool_choice", tools=[TOOL], tool_choice=tool(name="g"))),
    row(66, "templates of a client's own",
        *each("unsupported_parameter", "chat_template", "{{ 1 }}"),
        *each("unsupported_parameter", "chat_template_kwargs", {"tokenize": False}, {"chat_template": "x"},
              {"tools": "x"})),
    row(67, "fields that nobody knows: they are ignored, but not where they are ours",
        chat(None, foo={"bar": 1}),
        chat("unknown_parameter", "speculation.enable", speculation={"enable": False})),
    row(68, "fields that are known, and not supported",
        *each("unsupported_parameter", "modalities", ["audio"]), *each("unsupported_parameter", "audio", {}),
        *each("unsupported_parameter", "store", True), *each("unsupported_parameter", "service_tier", "flex"),
        *each("unsupported_parameter", "prediction", {"type": "content", "content": "x"}),
        *each("unsupported_parameter", "suffix", "end", path=TEXT),
        *each("unsupported_parameter", "prompt_embeds", "AAAA", path=TEXT),
        *each("unsupported_parameter", "kv_transfer_params", {"remote": 1}, path=TEXT),
        chat(None, user="me", metadata={"a": "b"}, store=False, service_tier="auto")),
    row(69, "cache_salt",
        *each("invalid_value", "cache_salt", "", "a b", "salt\n", "\u00e9", "s" * 65, "s" * 500_000, "../"),
        *each("invalid_type", "cache_salt", 5)),
    row(70, "request ids too long, with line breaks, or twice at once", deed="request_ids"),
    # capacity and life
    row(71, "too many requests", deed="limits"),
    row(72, "an engine that is being rebuilt", deed="engine_away"),
    row(73, "a server that drains", deed="draining"),
    row(74, "a deadline that passes", deed="deadlines"),
    row(75, "a failure after the first words", deed="failure_in_a_stream"),
    # other doors
    row(76, "files of requests", deed="batch_lines"),
    row(77, "gRPC", deed="grpc_calls"),
]  # fmt: skip

# What only we, or vLLM, have.
OURS: list[Row] = [
    row(0, "how to draft",
        *each("invalid_type", "speculation", True, []),
        chat("invalid_type", "speculation.enabled", speculation={"enabled": "no"}),
        chat("integer_below_min_value", "speculation.max_draft_tokens", speculation={"max_draft_tokens": -1}),
        text("invalid_type", "speculation.max_draft_tokens", speculation={"max_draft_tokens": "4"}),
        text("integer_above_max_value", "speculation.max_draft_tokens",
             speculation={"max_draft_tokens": 2**63}),
        text("invalid_type", "speculation.report", speculation={"report": 1}),
        text("conflicting_parameters", "speculation.report", speculation={"report": True}, n=2),
        text("conflicting_parameters", "speculation.report", speculation={"report": True}, prompt=["a", "b"]),
        text("conflicting_parameters", "speculation.steps", speculation={"steps": True})),
    row(0, "what may be said",
        *each("empty_array", "allowed_token_ids", []),
        *each("invalid_token_id", "allowed_token_ids", [10**7]),
        *each("invalid_type", "bad_words", "x"), *each("invalid_type", "echo", "yes", path=TEXT)),
    row(0, "who asks, and how urgently",
        *each("invalid_type", "priority", "high"), *each("invalid_type", "user", 5),
        chat("invalid_type", "metadata.a", metadata={"a": 1})),
    row(0, "cutting prompts",
        *each("integer_below_min_value", "truncate_prompt_tokens", 0, -2),
        *each("integer_above_max_value", "truncate_prompt_tokens", MAX_MODEL_LEN + 1),
        *each("invalid_value", "truncation_side", "middle"),
        text("context_length_exceeded", "prompt", prompt=[3] * 9, truncate_prompt_tokens=-1,
             max_tokens=MAX_MODEL_LEN)),
    row(0, "deadlines and token ids",
        *each("decimal_below_min_value", "timeout", 0, -1), *each("decimal_above_max_value", "timeout", 1e9),
        *each("invalid_type", "timeout", "5"), *each("invalid_type", "return_token_ids", 1),
        Sent("unsupported_parameter", "return_token_ids", path="/v1/responses",
             body=json.dumps({"model": MODEL, "input": "hi", "return_token_ids": True}).encode()),
        *each("invalid_value", "reasoning_effort", "enormous")),
]  # fmt: skip

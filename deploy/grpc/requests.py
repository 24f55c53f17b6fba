"""From gRPC messages to the bodies the validator reads: one set of bounds and errors for every door."""

import json
from dataclasses import replace
from typing import Any

from ...cluster.errors import RequestError
from ..api.validate import Job, ServedModel, prepare_chat, prepare_completion
from . import paceline_pb2 as pb

_INPUTS = ("prompt", "prompt_ids", "chat")
_OURS = ("request_id", "extra_json")  # of the call, not of the body
_REPEATED = ("stop", "stop_token_ids")


def prepare(request: pb.GenerateRequest, served: ServedModel, *, is_stream: bool) -> Job:
    """The choices of a Generate call. Raises RequestError, with the field's name as its `param`."""
    body = _fields(request)
    extra = _extra(request.extra_json)
    for name in extra:
        if name in body or name in ("messages", "prompt", "stream", "stream_options"):
            raise RequestError(
                f"'{name}' has a field of its own and cannot be in 'extra_json'",
                code="duplicate_key",
                param="extra_json",
            )
    body |= extra
    if is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    match request.WhichOneof("input"):
        case "chat":
            body["messages"] = [{"role": m.role, "content": m.content} for m in request.chat.messages]
            if "logprobs" in body:
                body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
            job = _told(prepare_chat(_encoded(body), served))
            # A chunk has one field for text: thoughts and calls are in it as the model wrote them.
            return replace(job, choices=[replace(choice, make_reader=None) for choice in job.choices])
        case "prompt_ids":
            body["prompt"] = list(request.prompt_ids.token_ids)
        case "prompt":
            body["prompt"] = request.prompt
        case _:
            raise RequestError(
                f"the request has no input; set one of {', '.join(_INPUTS)}",
                code="missing_required_parameter",
                param="input",
            )
    return _told(prepare_completion(_encoded(body), served))


def _told(job: Job) -> Job:
    """A job whose answer there are fields for."""
    if job.choices[0].has_steps:
        raise RequestError(
            "'speculation.steps' is not supported over gRPC: a chunk has no place for what it tells",
            code="unsupported_parameter",
            param="speculation.steps",
        )
    return job


def prepare_tokens(request: pb.TokenizeRequest, served: ServedModel) -> list[int]:
    """The tokens a Generate call with this input would begin with. Raises RequestError."""
    generate = pb.GenerateRequest(model=request.model)
    match request.WhichOneof("input"):
        case "chat":
            generate.chat.CopyFrom(request.chat)
        case "prompt":
            generate.prompt = request.prompt
    return prepare(generate, served, is_stream=False).choices[0].prompt_ids


def _fields(request: pb.GenerateRequest) -> dict[str, Any]:
    """What was set, under the names of the HTTP API. Not MessageToDict: that makes strings of 64-bit ints."""
    body: dict[str, Any] = {}
    for field, value in request.ListFields():
        if field.name in _INPUTS or field.name in _OURS:
            continue
        if field.name == "logit_bias":
            value = {str(token_id): bias for token_id, bias in value.items()}
        elif field.name in _REPEATED:
            value = list(value)
        body[field.name] = value
    return body


def _extra(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        extra = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError("'extra_json' is not JSON", code="invalid_json", param="extra_json") from None
    if not isinstance(extra, dict):
        raise RequestError("'extra_json' must be a JSON object", code="invalid_type", param="extra_json")
    return extra


def _encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()

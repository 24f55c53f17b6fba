"""The OpenAPI document at /openapi.json, made from the models that validate the requests."""

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .batch_routes import BatchRequest
from .messages_request import CountRequest, MessagesRequest
from .openai_protocol import ChatRequest, CompletionRequest
from .responses_request import ResponsesRequest
from .tokens import DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[BaseModel]] = {
    "/v1/batches": BatchRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_FILE_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch", "user_data"]},
    },
}
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_REF = "#/components/schemas/{model}"


def add_openapi(app: FastAPI) -> None:
    """Give an application its document; it knows the routes added before."""
    document: dict[str, Any] | None = None

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> dict[str, Any]:
        nonlocal document
        document = document or _document(app)
        return document


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title="Paceline", version=version("paceline"), routes=app.routes, separate_input_output_schemas=False
    )
    _, definitions = models_json_schema([(kind, "validation") for kind in BODIES.values()], ref_template=_REF)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if method == "post" and path in BODIES:
                operation["requestBody"] = _body("application/json", _reference(BODIES[path].__name__))
            elif method == "post" and path == "/v1/files":
                operation["requestBody"] = _body("multipart/form-data", _FILE_FORM)
            operation["responses"] = _responses(path)
    document["components"] = {
        "schemas": {**definitions["$defs"], "Error": _ERROR},
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    }
    document["security"] = [{"key": []}, {}]
    return document


def _body(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {media_type: {"schema": schema}}}


def _responses(path: str) -> dict[str, Any]:
    if path == "/metrics":
        kinds = ["text/plain"]
    elif path.endswith("/content"):
        kinds = ["application/octet-stream"]
    else:
        kinds = ["application/json", "text/event-stream"] if path in _STREAMED else ["application/json"]
    error = {
        "description": "What is wrong.",
        "content": {"application/json": {"schema": _reference("Error")}},
    }
    return {
        "200": {"description": "The answer.", "content": {kind: {} for kind in kinds}},
        "4XX": error,
        "5XX": error,
    }


def _reference(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(model=name)}

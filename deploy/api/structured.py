"""What a request may ask its output to be: `response_format` and `structured_outputs`, as one grammar.

Nothing is compiled here. What is refused here is what no compiler should see: too much, too deep, remote.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ...cluster.errors import RequestError
from ...cluster.messages import Grammar

MAX_SCHEMA_BYTES = 128 << 10
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_KEYS = 5000
MAX_PATTERN_CHARS = 4096
MAX_CHOICES = 1000

ANY_OBJECT: dict[str, Any] = {"type": "object"}

# What masks cannot hold an output to. A strict schema must not have them; otherwise they are the client's.
_UNENFORCED = frozenset(
    {"not", "if", "then", "else", "contains", "uniqueItems", "dependentRequired", "dependentSchemas"}
)
_HOLDS_NAMES = frozenset({"properties", "$defs", "definitions", "patternProperties"})  # whose keys are names
_STRUCTURED_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


def response_grammar(
    response_format: Mapping[str, Any] | None, param: str = "response_format"
) -> Grammar | None:
    """The grammar of OpenAI's `response_format`; None for plain text. Raises RequestError."""
    if response_format is None:
        return None
    kind = response_format.get("type")
    match kind:
        case "text":
            return None
        case "json_object":
            return schema_grammar(ANY_OBJECT, param)
        case "json_schema":
            wrapper = response_format.get("json_schema")
            if not isinstance(wrapper, dict) or not isinstance(wrapper.get("name"), str):
                raise refused(param, "'json_schema' must be an object with a 'name' and a 'schema'")
            schema = wrapper.get("schema", ANY_OBJECT)
            return schema_grammar(
                schema, f"{param}.json_schema.schema", is_strict=wrapper.get("strict") is True
            )
        case "structural_tag":
            return _structural_tag(response_format, param)
        case _:
            raise RequestError(
                f"Invalid '{param}.type': it must be 'text', 'json_object' or 'json_schema'.",
                code="invalid_value",
                param=f"{param}.type",
            )


def structured_grammar(asked: Mapping[str, Any] | None) -> Grammar | None:
    """The grammar of vLLM's `structured_outputs`, which holds exactly one kind. Raises RequestError."""
    param = "structured_outputs"
    if asked is None:
        return None
    given = [name for name, value in asked.items() if value is not None]
    kinds = [name for name in given if name in _STRUCTURED_KINDS]
    if len(kinds) != 1 or given != kinds:
        raise refused(param, f"it must have exactly one of {', '.join(_STRUCTURED_KINDS)}")
    value = asked[kinds[0]]
    match kinds[0]:
        case "json":
            return schema_grammar(_parsed(value, f"{param}.json"), f"{param}.json")
        case "json_object":
            if value is not True:
                raise refused(param, "'json_object' must be true")
            return schema_grammar(ANY_OBJECT, param)
        case "regex":
            return Grammar("regex", _text(value, f"{param}.regex"))
        case "choice":
            return _choice(value, f"{param}.choice")
        case "grammar":
            return Grammar("ebnf", _text(value, f"{param}.grammar", MAX_SCHEMA_BYTES))
        case _:
            return _structural_tag(_parsed(value, f"{param}.structural_tag"), f"{param}.structural_tag")


def schema_grammar(schema: Any, param: str, *, is_strict: bool = False) -> Grammar:
    """JSON that matches a schema. Raises RequestError for a schema that is not fit to be compiled."""
    check_schema(schema, param, is_strict=is_strict)
    return Grammar("json_schema", _source(schema))


def tag_grammar(form: Mapping[str, Any]) -> Grammar:
    """A composition of fixed text, free text and schemas, in xgrammar's structural tags."""
    return Grammar("structural_tag", _source({"type": "structural_tag", "format": form}))


def check_schema(schema: Any, param: str, *, is_strict: bool = False) -> None:
    """Raise RequestError for a schema that is too much, too deep, or refers to what is not in it."""
    if not isinstance(schema, dict):
        raise refused(param, "a JSON schema must be an object", "invalid_json_schema")
    if len(_source(schema)) > MAX_SCHEMA_BYTES:
        raise refused(param, f"it is larger than {MAX_SCHEMA_BYTES} bytes", "grammar_too_complex")
    num_keys = 0
    for depth, node, holds_names in _nodes(schema):
        if depth > MAX_SCHEMA_DEPTH:
            raise refused(param, f"it is nested deeper than {MAX_SCHEMA_DEPTH} levels", "grammar_too_complex")
        num_keys += len(node)
        if num_keys > MAX_SCHEMA_KEYS:
            raise refused(param, f"it has more than {MAX_SCHEMA_KEYS} keys", "grammar_too_complex")
        if holds_names:
            continue
        reference = node.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            raise refused(param, f"'$ref' {reference[:100]!r} is not in the schema", "invalid_json_schema")
        if is_strict and (unenforced := _UNENFORCED & set(node)):
            raise refused(param, f"{min(unenforced)!r} cannot be enforced, so 'strict' must not be true")


def refused(param: str, problem: str, code: str = "invalid_value") -> RequestError:
    return RequestError(f"Invalid '{param}': {problem}.", code=code, param=param)


def _nodes(schema: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any], bool]]:
    """(depth, object, whether its keys are a client's names) of all objects that are no literal values."""
    open_nodes: list[tuple[int, Any, bool]] = [(1, schema, False)]
    while open_nodes:
        depth, node, holds_names = open_nodes.pop()
        if isinstance(node, list):
            open_nodes += [(depth + 1, item, False) for item in node]
        elif isinstance(node, dict):
            yield depth, node, holds_names
            open_nodes += [
                (depth + 1, value, key in _HOLDS_NAMES and not holds_names)
                for key, value in node.items()
                if holds_names or key not in ("const", "enum", "default", "examples")
            ]


def _choice(value: Any, param: str) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise refused(param, "it must be a list of strings, none of them empty")
    if len(value) > MAX_CHOICES:
        raise refused(param, f"it has more than {MAX_CHOICES} entries", "grammar_too_complex")
    # A quoted string of EBNF is one of JSON.
    grammar = Grammar(
        "ebnf", "root ::= " + " | ".join(json.dumps(item, ensure_ascii=False) for item in value)
    )
    if len(grammar.source) > MAX_SCHEMA_BYTES:
        raise refused(param, f"it is larger than {MAX_SCHEMA_BYTES} bytes", "grammar_too_complex")
    return grammar


def _structural_tag(value: Any, param: str) -> Grammar:
    if not isinstance(value, dict) or "format" not in value:
        raise refused(param, "it must be an object with a 'format'")
    check_schema(value["format"], param)
    return tag_grammar(value["format"])


def _parsed(value: Any, param: str) -> Any:
    """Clients may write a schema as an object or as its JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise refused(param, "it is neither an object nor JSON", "invalid_json_schema") from None


def _text(value: Any, param: str, max_len: int = MAX_PATTERN_CHARS) -> str:
    if not isinstance(value, str) or not value:
        raise refused(param, "it must be a string that is not empty")
    if len(value) > max_len:
        raise refused(param, f"it is longer than {max_len} characters", "grammar_too_complex")
    return value


def _source(document: Any) -> str:
    return msgspec.json.encode(document).decode()

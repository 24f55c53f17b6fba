"""The process that compiles grammars: what it refuses, what kills it, and that it comes back."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.errors import RequestError
from paceline.cluster.messages import Grammar
from paceline.deploy.grammars import GrammarCompiler

pytestmark = pytest.mark.timeout(180)


def schema(**keys: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(keys))


def test_limits_and_recovery(default_model: Path) -> None:
    bomb = schema(type="object", properties={f"p{i}": {"type": "string"} for i in range(4000)})

    async def code_of(compiler: GrammarCompiler, grammar: Grammar) -> str | None:
        try:
            await compiler.check(grammar)
        except RequestError as error:
            return None if "\n" in error.message else error.code
        return None

    async def main() -> None:
        compiler = GrammarCompiler(default_model, 49152, (2,))
        same = await asyncio.gather(*(code_of(compiler, schema(type="object")) for _ in range(3)))
        assert same == [None] * 3
        assert await code_of(compiler, Grammar("regex", "[a-z")) == "invalid_grammar"
        assert await code_of(compiler, schema(type="string", pattern="(")) == "invalid_json_schema"
        worker = compiler._worker._process
        assert worker is not None
        assert await code_of(compiler, bomb) == "grammar_too_complex"
        assert worker.poll() is not None, "the process lives although its time was over"
        assert await code_of(compiler, Grammar("regex", "[a-z]+")) is None
        assert await code_of(compiler, bomb) == "grammar_too_complex"  # remembered

    asyncio.run(main())


def test_without_an_end_token_there_is_no_grammar(default_model: Path) -> None:
    with pytest.raises(RequestError, match="no end-of-sequence token"):
        asyncio.run(GrammarCompiler(default_model, 49152, ()).check(schema(type="object")))

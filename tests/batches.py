"""Batches for tests: files of requests, the command that answers them, and what it wrote."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def requests(path: Path, num_lines: int, model: str, max_tokens: int = 4) -> Path:
    with path.open("w") as file:
        for i in range(num_lines):
            body: dict[str, Any] = {"model": model, "max_tokens": max_tokens}
            if i % 2:
                url, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": f"the fox {i}"}]
            else:
                url, body["prompt"] = "/v1/completions", f"the fox {i}"
            line = {"custom_id": f"id-{i}", "method": "POST", "url": url, "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def command(source: Path, output: Path, *options: object) -> list[str]:
    return [sys.executable, "-m", "paceline.deploy.batch", str(source), str(output), *map(str, options)]


def answers(output: Path) -> dict[str, str]:
    """Text by custom_id; each id stands in the file once."""
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert max(Counter(line["custom_id"] for line in lines).values()) == 1
    choices = [line["response"]["body"]["choices"][0] for line in lines]
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
    return {line["custom_id"]: text for line, text in zip(lines, texts, strict=True)}

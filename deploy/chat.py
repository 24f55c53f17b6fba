"""`paceline chat`: a conversation with a server in the terminal, streamed.

Anything that speaks OpenAI's chat API can be talked to. A turn that fails or is interrupted leaves the
conversation as it was before the turn.
"""

import json
import sys
import unicodedata
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape

from ..cluster.errors import ConfigError, PacelineError

_TIMEOUT = httpx.Timeout(10.0, read=300.0)  # a long prompt on a busy server takes a while to its first token
_COMMANDS = "/clear forgets the conversation, /exit leaves, Ctrl-C stops an answer"


class ChatFailed(PacelineError):
    """The server refused a turn or broke off; the conversation can go on."""


@dataclass
class Conversation:
    """What has been said, and how to ask for the next answer."""

    client: httpx.Client
    model: str
    system: str | None
    options: dict[str, Any]  # max_tokens, temperature: what was given
    turns: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> Generator[str, None, None]:
        """Yield the answer piece by piece; only a whole one is remembered. Raises ChatFailed."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        turns = [*self.turns, {"role": "user", "content": text}]
        body = {"model": self.model, "messages": [*system, *turns], "stream": True, **self.options}
        answer: list[str] = []
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise ChatFailed(_error_text(response))
                for piece in _pieces(response.iter_lines()):
                    answer.append(piece)
                    yield piece
        except httpx.HTTPError as error:
            raise ChatFailed(f"the server broke off ({error or type(error).__name__})") from None
        self.turns = [*turns, {"role": "assistant", "content": "".join(answer)}]


def run_chat(
    url: str,
    *,
    model: str | None = None,
    system: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
) -> None:
    """Read turns from stdin until its end or /exit. Raises ConfigError for a server or model that is not."""
    console = Console(highlight=False)
    given = {"max_tokens": max_tokens, "temperature": temperature}
    options = {name: value for name, value in given.items() if value is not None}
    with httpx.Client(base_url=_base_url(url), timeout=_TIMEOUT) as client:
        conversation = Conversation(client, _choose_model(client, url, model), system, options)
        console.print(f"[bold]{escape(conversation.model)}[/] at {url}; [dim]{_COMMANDS}[/]", soft_wrap=True)
        while True:
            try:
                text = console.input("[bold cyan]> [/]").strip()
            except (EOFError, KeyboardInterrupt):
                console.print()
                return
            match text:
                case "":
                    continue
                case "/exit" | "/quit":
                    return
                case "/clear":
                    conversation.turns = []
                    console.print("[dim]forgotten[/]")
                case _ if text.startswith("/"):
                    console.print(f"[dim]{_COMMANDS}[/]", soft_wrap=True)
                case _:
                    _answer(console, conversation, text)


def _answer(console: Console, conversation: Conversation, text: str) -> None:
    answer = conversation.ask(text)
    try:
        for piece in answer:
            sys.stdout.write(_printable(piece))
            sys.stdout.flush()
        console.print()
    except KeyboardInterrupt:
        answer.close()  # hangs up, which cancels the request
        console.print("\n[dim]stopped; this turn is forgotten[/]")
    except ChatFailed as error:
        console.print(f"\n[red]{escape(str(error))}[/]; [dim]this turn is forgotten[/]", soft_wrap=True)


def _choose_model(client: httpx.Client, url: str, wanted: str | None) -> str:
    try:
        response = client.get("/v1/models")
        response.raise_for_status()
        models = [model["id"] for model in response.json()["data"]]
    except httpx.ConnectError:
        raise ConfigError(
            f"no server answers at {url}; start one with `paceline serve`, or give --url"
        ) from None
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{url} does not answer like an OpenAI server ({error}); check --url") from None
    if not models:
        raise ConfigError(f"the server at {url} has no models; check --url")
    if wanted is not None and wanted not in models:
        raise ConfigError(f"the server has no model {wanted!r}; it has {', '.join(models)}")
    return wanted or models[0]


def _base_url(url: str) -> str:
    """Accept what people paste: with or without the scheme and the /v1 at the end."""
    if "://" not in url:
        url = f"http://{url}"
    try:
        parsed = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {url!r} is not a URL ({error})") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"--url {url!r} is not the URL of a server; write http://HOST:PORT")
    return str(parsed)


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """The text of a chat completion's server-sent events."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        payload = line.removeprefix("data:").strip()
        if payload == "[DONE]":
            return
        try:
            event = json.loads(payload)
            if "error" in event:
                raise ChatFailed(event["error"]["message"])
            pieces = [choice["delta"].get("content") for choice in event["choices"]]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ChatFailed("the server sent an event that is not a chat completion") from None
        yield from (piece for piece in pieces if piece)
    raise ChatFailed("the server ended the stream before the answer was whole")


def _error_text(response: httpx.Response) -> str:
    try:
        return f"{response.json()['error']['message']} (status {response.status_code})"
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {response.status_code}"


def _printable(text: str) -> str:
    """Without control characters: a model must not be able to drive the terminal."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")

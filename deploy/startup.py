"""What a user sees while an engine starts: the phase that runs, how far it is, how long each took."""

import json
import shlex
import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class StartupView:
    """Start-up progress on a console: a live line in a terminal, one line per finished phase anywhere else.

    A context manager; leaving it, by `done()` or by an exception, takes the live line away. `phase` has the
    form of `model_source.Progress`, so it can be handed to `resolve_model`.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._live = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._name: str | None = None
        self._began = 0.0
        self._started = time.monotonic()

    def __enter__(self) -> "StartupView":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def phase(self, name: str, share: float | None = None) -> None:
        """Say that `name` is going on, `share` (0..1) of it done. A new name finishes the phase before it."""
        if name != self._name:
            self._finish()
            self._name, self._began = name, time.monotonic()
            self._live.start()
            self._task = self._live.add_task(escape(name), total=None)
        if share is not None and self._task is not None:
            self._live.update(self._task, total=1.0, completed=share)

    def done(self, url: str, model: str) -> None:
        """Finish the last phase and print where the server is and how to ask it something."""
        self._finish()
        body = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        seconds = time.monotonic() - self._started
        self._print(f"[bold green]ready[/] in {seconds:.1f} s: [bold]{escape(model)}[/] at [bold]{url}[/]")
        self._print(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\")
        self._print(escape(f"    -d {shlex.quote(json.dumps(body))}"))
        self._print(f"  paceline chat --url {url}")
        self._print("Ctrl-C stops it.")

    def close(self) -> None:
        """Take the live line away without finishing the phase; for a start that failed."""
        self._live.stop()
        self._name = None

    def _finish(self) -> None:
        self._live.stop()
        if self._task is not None:
            self._live.remove_task(self._task)
            self._task = None
        if self._name is not None:
            self._print(f"  {time.monotonic() - self._began:6.1f} s  {escape(self._name)}")
            self._name = None

    def _print(self, text: str) -> None:
        # soft_wrap: a command that is to be copied must stay on one line
        self._console.print(text, soft_wrap=True)

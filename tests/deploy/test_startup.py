"""Start-up progress: a line per finished phase, then the URL and a command to paste into a shell."""

import io
import json
import shlex

import pytest
from rich.console import Console

from paceline.deploy.startup import StartupView


@pytest.mark.parametrize("is_terminal", [True, False])
def test_phases_then_url_and_curl(is_terminal: bool) -> None:
    output = io.StringIO()
    with StartupView(Console(file=output, force_terminal=is_terminal, width=60, color_system=None)) as view:
        view.phase("downloading [the] model", 0.0)
        view.phase("downloading [the] model", 1.0)
        view.phase("loading")
        view.done("http://127.0.0.1:8000", "owner/[name]")
    lines = output.getvalue().replace("\r", "\n").splitlines()
    assert sum("s  downloading [the] model" in line for line in lines) == 1
    assert sum("s  loading" in line for line in lines) == 1
    assert any("owner/[name] at http://127.0.0.1:8000" in line for line in lines)
    start = next(index for index, line in enumerate(lines) if line.strip().startswith("curl "))
    words = shlex.split(lines[start].strip().removesuffix("\\") + lines[start + 1])
    assert words[1] == "http://127.0.0.1:8000/v1/chat/completions"
    assert json.loads(words[words.index("-d") + 1])["model"] == "owner/[name]"


def test_failed_start_leaves_no_line_of_the_phase() -> None:
    output = io.StringIO()

    def fail() -> None:
        with StartupView(Console(file=output)) as view:
            view.phase("loading")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert output.getvalue() == ""

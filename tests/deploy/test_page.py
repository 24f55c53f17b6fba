"""The page at `/` in a real Chromium, over a scripted engine: three tokens a step, two of them drafted."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from browser import Tab, chromium
from front import ScriptedEngine, listening, scripted_front

HOSTILE = (
    "# The fox\n\n<img src=x onerror=boom()> **goes** on, *and* [here](https://fox.example/) but not "
    "[there](javascript:boom()):\n\n- `the quick`\n- brown fox\n\n```html\n<script>boom()</script>\n```\n\n"
    "and so on"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ScriptedEngine]]:
    front, engine = scripted_front(tmp_path_factory.mktemp("model"))
    with listening(front) as url:
        yield url, engine


@pytest.fixture
def url(server: tuple[str, ScriptedEngine]) -> str:
    return server[0]


@pytest.fixture
def engine(server: tuple[str, ScriptedEngine]) -> ScriptedEngine:
    engine = server[1]
    engine.script, engine.tokens_per_step, engine.step_s = HOSTILE, 3, 0.0
    return engine


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def tab(browser: Tab, url: str) -> Iterator[Tab]:
    """The page, freshly opened at desktop size; whatever it is asked to do, nothing may go wrong in it."""
    browser.errors.clear()
    browser.look(width=1280, height=800)
    browser.open(f"{url}/")
    browser.eval("localStorage.clear(), sessionStorage.clear()")
    browser.open(f"{url}/?fresh")
    browser.wait("document.querySelector('#model').textContent === 'org/scripted'")
    yield browser
    assert browser.errors == []


def say(tab: Tab, prompt: str) -> None:
    tab.eval("document.querySelector('#prompt').focus()")
    tab.type(prompt)
    tab.press("Enter", 13, "\r")


def answered(tab: Tab, prompt: str) -> None:
    say(tab, prompt)
    tab.wait("document.querySelector('.answer:last-child .foot button')")


def test_its_files_are_served_with_a_strict_policy(url: str) -> None:
    with httpx.Client(base_url=url, trust_env=False) as http:
        page = http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        names = set(re.findall(r'"(page/[^"]+)"', page.text))
        assert {"page/main.js", "page/style.css", "page/icon.svg"} == names
        for name in ("", *names, "page/markdown.js"):
            reply = http.get(f"/{name}")
            assert reply.status_code == 200
            assert "default-src 'none'" in reply.headers["content-security-policy"]
            assert "unsafe" not in reply.headers["content-security-policy"]
            etag = {"if-none-match": reply.headers["etag"]}
            assert http.get(f"/{name}", headers=etag).status_code == 304
        for missing in ("page/", "page/none.js", "page/..%2fapp.py", "page/%2e%2e/app.py"):
            assert http.get(f"/{missing}").status_code == 404


def test_an_answer_streams_with_tints(tab: Tab, engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.script = "the quick brown fox goes on and on"
    answered(tab, "What does the fox do?")
    assert tab.eval("document.querySelector('.user').textContent") == "What does the fox do?"
    assert tab.eval("document.querySelector('.text').textContent") == engine.script
    slots = tab.eval("[...document.querySelectorAll('.answer [data-slot]')].map(e => e.dataset.slot)")
    assert set(slots) == {"1", "2"}
    tinted = tab.eval(
        "[...document.querySelectorAll('.answer [data-slot]')].map(e => e.textContent).join('')"
    )
    assert 0.4 * len(engine.script) < len(tinted) < 0.8 * len(engine.script)  # two of every three tokens
    assert tab.eval("document.querySelector('#k').textContent") == "2"
    assert "100%" in tab.eval("document.querySelector('#slots').textContent")
    assert "100% of" in tab.eval("document.querySelector('.foot').textContent")
    assert tab.eval("document.querySelector('#context').textContent").endswith(" of 256")
    tab.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000  # a blank page is a tenth of it


@pytest.mark.usefixtures("engine")
def test_what_a_model_says_is_never_markup(tab: Tab) -> None:
    tab.eval("document.querySelector('[name=max_tokens]').value = '200'")
    answered(tab, "<b>bold?</b>")
    assert tab.eval("document.querySelector('.user').children.length") == 0
    kinds = tab.eval("[...document.querySelectorAll('.answer .text *')].map(e => e.localName).join(' ')")
    assert set(kinds.split()) == {"h3", "p", "strong", "em", "a", "ul", "li", "code", "pre", "span"}
    assert tab.eval("[...document.querySelectorAll('.text a')].map(a => a.href)") == ["https://fox.example/"]
    text = tab.eval("document.querySelector('.text').textContent")
    assert "<img src=x onerror=boom()>" in text
    assert "[there](javascript:boom())" in text
    assert tab.eval("document.querySelector('pre').textContent") == "<script>boom()</script>"


def test_stop_ends_the_request(tab: Tab, engine: ScriptedEngine) -> None:
    engine.step_s = 0.05
    say(tab, "Go on")
    tab.wait("document.querySelector('.answer .text').textContent.length > 20")
    assert tab.eval("document.activeElement.id") == "prompt"
    tab.eval("document.querySelector('#stop').click()")
    tab.wait("document.querySelector('.foot .fault')?.textContent === 'stopped'")
    tab.wait("!document.querySelector('#send').hidden")
    engine.step_s = 0.0
    assert len(engine.cancelled) == 1
    answered(tab, "Again")  # the conversation goes on
    assert tab.eval("document.querySelectorAll('.answer').length") == 2
    tab.eval("document.querySelector('#new').click()")
    assert tab.eval("document.querySelector('#log').children.length") == 0


def test_parameters_reach_the_engine(tab: Tab, engine: ScriptedEngine) -> None:
    values = {"temperature": "0.25", "max_tokens": "9", "seed": "7", "max_draft_tokens": "3"}
    for name, value in values.items():
        tab.eval(f"document.querySelector('[name={name}]').value = {value!r}")
    answered(tab, "x")
    params = engine.params[-1]
    assert (params.temperature, params.max_tokens, params.seed) == (0.25, 9, 7)
    assert engine.draft_limits[-1] == 3
    assert tab.eval("document.querySelector('.foot .fault').textContent") == "cut off at the most tokens"
    tab.eval("document.querySelector('[name=speculation]').click()")
    answered(tab, "y")
    assert engine.draft_limits[-1] == 0


def test_a_refusal_is_shown(tab: Tab) -> None:
    tab.eval("document.querySelector('[name=max_tokens]').value = '100000'")
    say(tab, "x")
    tab.wait("document.querySelector('#notice').textContent.includes('maximum context length')")
    assert tab.errors.pop().endswith("400 (Bad Request)")  # Chromium's own note


def test_the_key_goes_with_every_request_and_no_further_than_the_tab(tab: Tab) -> None:
    tab.eval(
        "window.sent = {}; const real = fetch;"
        "window.fetch = (path, told) => (sent[path] = told?.headers?.authorization, real(path, told)); 0"
    )
    tab.eval("document.querySelector('#key').value = 'abc', 0")
    tab.eval("document.querySelector('#key').dispatchEvent(new Event('change'))")
    answered(tab, "x")
    sent = tab.eval("sent")
    assert sent == dict.fromkeys(("v1/models", "metrics", "v1/chat/completions"), "Bearer abc")
    assert tab.eval("Object.values(sessionStorage)") == ["abc"]
    assert tab.eval("Object.values(localStorage)") == []


def test_light_and_dark(tab: Tab) -> None:
    def is_dark() -> bool:
        ground = tab.eval("getComputedStyle(document.body).backgroundColor")
        return max(int(level) for level in re.findall(r"\d+", ground)[:3]) < 60

    assert not is_dark()
    tab.look(width=1280, height=800, scheme="dark")
    tab.wait("document.documentElement.dataset.theme === 'dark'")
    assert is_dark()
    tab.eval("document.querySelector('#theme').click()")
    assert not is_dark()
    assert tab.eval("localStorage['paceline-theme']") == "light"


def test_a_phone_has_its_panel_in_a_drawer(tab: Tab) -> None:
    tab.look(width=390, height=800)
    shown = "getComputedStyle(document.querySelector('#panel')).visibility === 'visible'"
    tab.wait(f"!({shown})")
    assert tab.eval("document.documentElement.scrollWidth <= innerWidth")
    tab.eval("document.querySelector('#panel-toggle').click()")
    tab.wait(shown)
    tab.press("Escape", 27)
    tab.wait(f"!({shown})")

"""Thoughts, words and calls in streamed text: no chunking changes them, and nothing a model wrote is lost."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.deploy.api.answer import AnswerReader, Said, ThoughtReader, read_whole
from paceline.deploy.api.tool_formats import choose_tool_format

NAMES = frozenset({"weather", "time"})
WEATHER = '{"name": "weather", "arguments": {"city": "Paris", "days": [1, {"a": "}\\""}]}}'
ARGUMENTS = '{"city": "Paris", "days": [1, {"a": "}\\""}]}'


def reader(parser: str) -> AnswerReader:
    form = choose_tool_format(parser, "")  # pyright: ignore[reportArgumentType]
    assert form is not None
    return form.read(NAMES, lambda: "id")


def told(said: Said) -> tuple[str, str, list[tuple[str | None, str]]]:
    assert [call.index for call in said.calls] == list(range(len(said.calls)))
    return said.reasoning, said.content, [(call.name, call.arguments) for call in said.calls]


CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "no call at all <tool", "no call at all <tool", []),
    ("hermes", f"Let me see.\n<tool_call>\n{WEATHER}\n</tool_call>", "Let me see.", [("weather", ARGUMENTS)]),
    (
        "hermes",
        f"<tool_call>{WEATHER}</tool_call>\n<tool_call>\n"
        '{"arguments": {"x": 1}, "name": "time"}\n</tool_call>\n',
        "",
        [("weather", ARGUMENTS), ("time", '{"x": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "time"}</tool_call>', "", [("time", "{}")]),
    ("hermes", '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}', "", [("time", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "time", "arguments": null }', "", [("time", "{}")]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": "cut', "", [("time", '{"a": "cut')]),
    ("hermes", '<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),
    ("hermes", "<tool_call>[1, 2]</tool_call>", "<tool_call>[1, 2]</tool_call>", []),
    (
        "hermes",
        f"<tool_call>oh <tool_call>{WEATHER}</tool_call> done",
        "<tool_call>oh done",
        [("weather", ARGUMENTS)],
    ),
    ("llama3_json", WEATHER.replace("arguments", "parameters"), "", [("weather", ARGUMENTS)]),
    ("llama3_json", f"<|python_tag|>{WEATHER}; {WEATHER}", "", [("weather", ARGUMENTS)] * 2),
    ("llama3_json", '{"a": 1}', '{"a": 1}', []),
    ("llama3_json", f"So: {WEATHER}", f"So: {WEATHER}", []),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}, {WEATHER}]", "", [("weather", ARGUMENTS)] * 2),
    ("mistral", f"Well.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", "Well.", [("weather", ARGUMENTS)]),
    ("mistral", '[TOOL_CALLS]time{}[TOOL_CALLS]time{"a":1}', "", [("time", "{}"), ("time", '{"a":1}')]),
    ("mistral", "[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]rm[ARGS]{}", []),
    (
        "pythonic",
        '[weather(city="Pa)ris", days=[1, -2], ok=True), time()]\n',
        "",
        [("weather", '{"city": "Pa)ris", "days": [1, -2], "ok": true}'), ("time", "{}")],
    ),
    ("pythonic", "[weather(x=null)] and so", " and so", [("weather", '{"x": null}')]),
    ("pythonic", "[1] is a list", "[1] is a list", []),
    ("pythonic", "[time(), rm()]", ", rm()]", [("time", "{}")]),
    ("pythonic", "[time(__import__('os'))]", "[time(__import__('os'))]", []),
]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES)
def test_what_is_words_and_what_is_a_call(
    parser: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert told(read_whole(reader(parser), [text])) == ("", content, calls)
    assert told(read_whole(reader(parser), list(text))) == ("", content, calls)


def test_arguments_leave_as_they_come() -> None:
    it = reader("hermes")
    begun = it.push('<tool_call>{"name": "weather", "arguments": {"ci')
    assert [(call.call_id, call.name) for call in begun.calls][:1] == [("id", "weather")]
    assert "".join(call.arguments for call in begun.calls) == '{"ci'
    assert "".join(call.arguments for call in it.push('ty": "Paris"}').calls) == 'ty": "Paris"}'


FRAGMENTS = st.one_of(
    st.sampled_from(["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>"]),
    st.sampled_from([WEATHER, '{"name": "time", "arguments": {', '"name": "rm"', "[weather(x=1)", "time()"]),
    st.sampled_from(["weather(a='", "[ARGS]", "time", "}}", *'{}[]()"\\,;< \nx']),
)


def readers() -> list[Callable[[], AnswerReader]]:
    makers: list[Callable[[], AnswerReader]] = []
    for parser in ("hermes", "llama3_json", "mistral", "pythonic"):
        makers.append(lambda parser=parser: reader(parser))
        makers.append(lambda parser=parser: ThoughtReader(reader(parser), is_open=False))
    makers.append(lambda: ThoughtReader(None, is_open=True))
    return makers


@pytest.mark.parametrize("make", readers())
@settings(max_examples=60, deadline=None)
@given(st.lists(FRAGMENTS, max_size=14), st.data())
def test_no_chunking_changes_anything(
    make: Callable[[], AnswerReader], fragments: list[str], data: st.DataObject
) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = told(read_whole(make(), [text]))
    assert told(read_whole(make(), chunks)) == whole
    assert told(read_whole(make(), list(text))) == whole
    if not whole[2] and not whole[0]:
        # tags of a thought and blank space around it are all that may be missing
        kept = text.replace("<think>", "").replace("</think>", "")
        assert "".join(whole[1].replace("<think>", "").replace("</think>", "").split()) == "".join(
            kept.split()
        )


def test_thoughts() -> None:
    for text, is_open, expected in [
        ("<think>\nhm\n</think>\n\nParis", False, ("hm", "Paris", [])),
        ("hm</think>Paris", True, ("hm", "Paris", [])),
        ("Paris <think>", False, ("", "Paris <think>", [])),
        ("<think>\nnever ends \n", False, ("never ends", "", [])),
    ]:
        assert told(read_whole(ThoughtReader(None, is_open=is_open), [text])) == expected
    said = read_whole(
        ThoughtReader(reader("hermes"), is_open=False),
        [f"<think>a</think>\n<tool_call>{WEATHER}</tool_call>"],
    )
    assert told(said) == ("a", "", [("weather", ARGUMENTS)])
    json.loads(said.calls[0].arguments)

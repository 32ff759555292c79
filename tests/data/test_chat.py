import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from sferic.data import M1, TEXT_01, ChatTemplate, Reply, ToolCall, format_calls, parse_reply
from sferic.data.chat import Form

B, E = "<beginning_of_sentence>", "<end_of_sentence>"
CONTROLS = ("<begin_of_document>", B, E, "<function_call>", "<image>")
TEMPLATES = {"text-01": ChatTemplate(TEXT_01), "m1": ChatTemplate(M1)}
FORMS: list[Form] = ["text-01", "m1"]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "about": "a < b & 'c' 天"}},
}
WEATHER_JSON = (
    '{"type": "function", "function": {"name": "weather", "parameters": '
    '{"type": "object", "about": "a < b & \'c\' 天"}}}'
)
CLOCK = {"type": "function", "function": {"name": "clock"}}
CLOCK_JSON = '{"type": "function", "function": {"name": "clock"}}'


def call(name: str, arguments: Any, id: str = "1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Weather and time?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            call("weather", '{"city": "上海"}', "a"),
            call("clock", {}, "b"),
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": '{"sky": "clear"}'},
    {"role": "tool", "tool_call_id": "b", "content": "12"},
]


def written(template: ChatTemplate, messages: list[dict[str, Any]]) -> list[str]:
    rendered = template.render(messages)
    return [rendered.text[start:end] for start, end in rendered.spans]


def test_text_01_as_published() -> None:
    rendered = TEMPLATES["text-01"].render(CHAT, [WEATHER, CLOCK], True)
    assert rendered.text == (
        f"{B}system ai_setting=assistant\nBe brief.{E}\n"
        f"{B}user name=user\nHello!{E}\n"
        f"{B}ai name=assistant\nHi.{E}\n"
        f"{B}user name=user\nWeather and time?{E}\n"
        f"{B}ai name=assistant\n<function_call>```typescript\n"
        f'functions.weather({{"city": "上海"}})\nfunctions.clock({{}})\n```{E}\n'
        f'{B}system function_response=functions\n{{"name": "weather", "response": '
        f'{{"sky": "clear"}}}}{E}\n'
        f'{B}system function_response=functions\n{{"name": "clock", "response": 12}}{E}\n'
        f"{B}system function_setting=functions\n{WEATHER_JSON}{E}\n"
        f"{B}system function_setting=functions\n{CLOCK_JSON}{E}\n"
        f"{B}ai name=assistant\n"
    )


def test_text_01_follows_the_template_and_not_the_guide_beside_it() -> None:
    # The guide puts the inner object of a tool between the system turn and the conversation.
    text = TEMPLATES["text-01"].render(CHAT[:2], [CLOCK], True).text
    assert text.index("Hello!") < text.index("function_setting")
    assert text.endswith(
        f"{B}system function_setting=functions\n{CLOCK_JSON}{E}\n{B}ai name=assistant\n"
    )


def test_text_01_images() -> None:
    parts = [
        {"type": "image"},
        {"type": "text", "text": "What is "},
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "text", "text": " this?"},
    ]
    rendered = TEMPLATES["text-01"].render(
        [{"role": "user", "content": parts}], controls=["<image>"]
    )
    assert rendered.text == f"{B}user name=user\n<image>What is <image> this?{E}\n"
    assert [rendered.text[a:b] for a, b in rendered.controls] == ["<image>"] * 2


def test_m1_as_published() -> None:
    rendered = TEMPLATES["m1"].render(CHAT, [WEATHER, CLOCK], True)
    assert rendered.text == (
        f"<begin_of_document>{B}system ai_setting=MiniMax AI\nBe brief.{E}\n"
        f"{B}system tool_setting=tools\nYou are provided with these tools:\n<tools>\n"
        f"{WEATHER_JSON}\n{CLOCK_JSON}\n</tools>\n\nIf you need to call tools, please respond with "
        "<tool_calls></tool_calls> XML tags, and provide tool-name and json-object of arguments, "
        'following the format below:\n<tool_calls>\n{"name": <tool-name>, "arguments": '
        f"<args-json-object>}}\n...\n</tool_calls>{E}\n"
        f"{B}user name=user\nHello!{E}\n"
        f"{B}ai name=MiniMax AI\nHi.{E}\n"
        f"{B}user name=user\nWeather and time?{E}\n"
        f'{B}ai name=MiniMax AI\n<tool_calls>\n{{"name": "weather", "arguments": {{"city": "上海"}}'
        f'}}\n{{"name": "clock", "arguments": {{}}}}\n</tool_calls>{E}\n'
        f'{B}tool name=tools\ntool result: {{"sky": "clear"}}\n\n{E}\n'
        f"{B}tool name=tools\ntool result: 12\n\n{E}\n"
        f"{B}ai name=MiniMax AI\n"
    )


def test_m1_default_system_text_and_stripped_content() -> None:
    chat = [
        {"role": "user", "content": "  hi \n"},
        {"role": "assistant", "content": [{"type": "text", "text": " yes "}]},
    ]
    head = "You are a helpful assistant created by Minimax based on MiniMax-M1 model."
    assert TEMPLATES["m1"].render(chat).text == (
        f"<begin_of_document>{B}system ai_setting=MiniMax AI\n{head}{E}\n"
        f"{B}user name=user\nhi{E}\n{B}ai name=MiniMax AI\nyes{E}\n"
    )
    silent = [{"role": "system", "content": " "}, *chat]
    assert "system" not in TEMPLATES["m1"].render(silent).text


def test_m1_names_results_that_have_names() -> None:
    parts = [
        {"type": "text", "name": "weather", "text": "clear"},
        {"type": "text", "name": "clock", "text": "12"},
    ]
    text = TEMPLATES["m1"].render([*CHAT[:5], {"role": "tool", "content": parts}]).text
    assert text.endswith(
        f"{B}tool name=tools\ntool name: weather\ntool result: clear\n\n"
        f"tool name: clock\ntool result: 12\n\n{E}\n"
    )
    named = {"role": "tool", "name": "clock", "content": "12"}
    text = TEMPLATES["m1"].render([*CHAT[:5], named]).text
    assert text.endswith(f"{B}tool name=tools\ntool name: clock\ntool result: 12\n\n{E}\n")


@pytest.mark.parametrize("form", FORMS)
def test_spans_hold_what_the_model_writes_with_its_end(form: Form) -> None:
    calls = [ToolCall("weather", {"city": "上海"}), ToolCall("clock", {})]
    assert written(TEMPLATES[form], CHAT) == [f"Hi.{E}", format_calls(calls, form) + E]


@pytest.mark.parametrize("form", FORMS)
def test_text_before_calls_is_kept(form: Form) -> None:
    message = {"role": "assistant", "content": "I look.", "tool_calls": [call("clock", "")]}
    (text,) = written(TEMPLATES[form], [CHAT[1], message])
    reply = parse_reply(text.removesuffix(E), form)
    assert reply == Reply("I look.", None, (ToolCall("clock", {}),))


@pytest.mark.parametrize("form", FORMS)
def test_roles_of_results_are_those_that_the_template_knows(form: Form) -> None:
    other = [{**m, "role": "function"} if m["role"] == "tool" else m for m in CHAT]
    assert TEMPLATES[form].render(other) == TEMPLATES[form].render(CHAT)


@pytest.mark.parametrize("form", FORMS)
def test_messages_are_left_as_they_were(form: Form) -> None:
    before = json.dumps([CHAT, WEATHER])
    TEMPLATES[form].render(CHAT, [WEATHER], controls=CONTROLS)
    assert json.dumps([CHAT, WEATHER]) == before


# What the published template of Text-01 does: it walks through the parts of every content.
ONLY_PARTS = (
    "{% for m in messages %}{% if m.role == 'user' or m.role == 'function' %}"
    "{{ '[' + m['role'] + ' ' }}{% for p in m['content'] %}{{ p.text }}{% endfor %}]{% endif %}"
    "{% endfor %}"
)
ONLY_STRINGS = "{% for m in messages %}[{{ m.role + ' ' + m.content }}]{% endfor %}"
PRINTS = "{% for m in messages %}[{{ m.role }} {{ m.content }}]{% endfor %}"


@pytest.mark.parametrize("source", [ONLY_PARTS, ONLY_STRINGS, PRINTS])
def test_content_is_given_as_the_template_reads_it(source: str) -> None:
    template = ChatTemplate(source)
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    for content in ("one two", parts):
        assert template.render([{"role": "user", "content": content}]).text == "[user one two]"
    with pytest.raises(ValueError, match=r"message 0, part 1 is an image, which .* leaves out"):
        template.render([{"role": "user", "content": [parts[0], {"type": "image"}]}])


def test_what_a_template_drops_is_refused() -> None:
    template = ChatTemplate(ONLY_PARTS, name="the folder's template")
    assert template.render([{"role": "tool", "name": "f", "content": "x"}]).text == "[function x]"
    with pytest.raises(ValueError, match="message 1 has the role 'assistant', which the folder's"):
        template.render(CHAT[1:])
    text = ChatTemplate(ONLY_STRINGS)
    with pytest.raises(ValueError, match=r"message 1 has tool_calls, which .* format_calls"):
        text.render([CHAT[1], {**CHAT[4], "content": ""}])


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ("hello", "messages are a str: give a list"),
        ({"role": "user"}, "messages are a dict: give a list"),
        ([USER, "hello"], "message 1 is 'hello': give an object"),
        ([USER, {"content": "x"}], "message 1 has the role None: use one of system, user"),
        ([{"role": "bot", "content": "x"}], "message 0 has the role 'bot': use one of"),
        ([USER, {"role": "user"}], "message 1 has the content None: give a string or a list"),
        ([{"role": "user", "content": 3}], "message 0 has the content 3: give"),
        ([{"role": "user", "content": ["x"]}], "message 0, part 0 is 'x': give an object"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "part 0 has the type 'audio': use"),
        ([{"role": "user", "content": [{"type": "text"}]}], "part 0 has the text None: give"),
        ([{**USER, "tool_calls": [1]}], "message 0 has tool_calls .*: only an assistant"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], "tool call 0 is .*: give"),
        ([{"role": "assistant", "tool_calls": [call("f", "{")]}], "arguments '{', which are not"),
        ([{"role": "assistant", "tool_calls": [call("f", "[]")]}], r"arguments \[\]: give an obj"),
        ([{"role": "assistant", "tool_calls": [call("f(", {})]}], r"has the name 'f\('"),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_bad_messages_are_named(form: Form, messages: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        TEMPLATES[form].render(messages)


def test_results_need_names_in_text_01() -> None:
    result = {"role": "tool", "tool_call_id": "z", "content": "x"}
    with pytest.raises(ValueError, match="message 7 is a tool's result, its name is None and its"):
        TEMPLATES["text-01"].render([*CHAT, result])
    assert "tool result: x" in TEMPLATES["m1"].render([*CHAT, result]).text
    # Two calls without ids: whose result it is stays open.
    calls = [{"type": "function", "function": {"name": n, "arguments": {}}} for n in "fg"]
    chat = [USER, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "x"}]
    with pytest.raises(ValueError, match="message 2 is a tool's result, its name is None"):
        TEMPLATES["text-01"].render(chat)


def test_m1_has_one_system_message() -> None:
    with pytest.raises(ValueError, match="message 1 is a system message: only the first"):
        TEMPLATES["m1"].render([USER, CHAT[0]])


@pytest.mark.parametrize("tools", ["f", [{"name": "f"}], [CLOCK, 3]])
def test_bad_tools_are_named(tools: Any) -> None:
    with pytest.raises(ValueError, match=r"tools are a str|tool \d is .*: give"):
        TEMPLATES["m1"].render([USER], tools)


def test_no_tools_are_no_tools() -> None:
    for template in TEMPLATES.values():
        assert template.render([USER], []) == template.render([USER])


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{% if %}", "mine, line 1: .*; it must be a Jinja2 template"),
        ("\n{% generation %}", "mine, line 2: "),
        ("{{ nothing.here }}", "mine: 'nothing' is undefined"),
        ("{{ messages.__class__.__mro__ }}", "mine: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "mine: .*safe"),
        ("{{ raise_exception('no such turn') }}", "mine: no such turn"),
        ("{{ 1 // 0 }}", "mine fails: ZeroDivisionError"),
    ],
)
def test_bad_templates_are_named(source: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ChatTemplate(source, name="mine").render([USER])


def test_generation_blocks_in_macros_loops_and_captures() -> None:
    source = (
        "{% macro say(t) %}<{% generation %}{{ t }}{% endgeneration %}>{% endmacro %}"
        "{% for m in messages %}{{ say(m.content) }}{% if loop.last %}{% break %}{% endif %}"
        "{% endfor %}{% set end %}!{% generation %}z{% endgeneration %}{% endset %}{{ end }}"
        "{% generation %}{% endgeneration %}"
    )
    rendered = ChatTemplate(source).render([USER, {**USER, "content": "yy"}])
    assert rendered.text == "<x><yy>!z"
    assert rendered.spans == ((1, 2), (4, 6), (8, 9))


def test_variables() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", variables={"bos_token": B})
    assert template.render([USER], controls=CONTROLS).controls == ((0, len(B)),)


PIECES = st.sampled_from([*CONTROLS, "<", "<end_of_", "sentence>", " ", "\n", "x", "\U0010fffd"])
TEXT = st.lists(PIECES).map("".join)


@given(st.lists(TEXT, min_size=1), TEXT, TEXT, st.sampled_from(FORMS))
def test_controls_are_the_template_s_own(parts: list[str], key: str, end: str, form: Form) -> None:
    def chat(parts: list[str], key: str, end: str) -> Any:
        content = [{"type": "text", "text": part} for part in parts]
        calls = [call("f", {key: parts})]
        return [
            {"role": "system", "content": "." + end},
            {"role": "user", "content": content},
            {"role": "assistant", "content": end, "tool_calls": calls},
            {"role": "tool", "name": "f", "content": content},
        ]

    template = TEMPLATES[form]
    tool = {"type": "function", "function": {"name": "f", "x": {key: end}}}
    plain = template.render(chat(parts, key, end), [tool], True)
    rendered = template.render(chat(parts, key, end), [tool], True, CONTROLS)
    assert rendered.text == plain.text
    assert rendered.spans == plain.spans
    blank = template.render(chat(["x"], "x", "x"), [CLOCK], True, CONTROLS)
    assert [rendered.text[a:b] for a, b in rendered.controls] == [
        blank.text[a:b] for a, b in blank.controls
    ]


@pytest.mark.parametrize("parts", [("<image", ">"), ("<", "image>"), ("<image \n", " > ")])
def test_parts_of_a_message_form_no_control_together(parts: tuple[str, str]) -> None:
    content = [{"type": "text", "text": part} for part in parts]
    rendered = TEMPLATES["m1"].render([{"role": "user", "content": content}], controls=CONTROLS)
    assert "\n<image><end_of_sentence>" in rendered.text
    assert "<image>" not in [rendered.text[a:b] for a, b in rendered.controls]


def test_of_two_controls_at_one_place_the_longer_counts() -> None:
    rendered = ChatTemplate("<a>{{ '' }}<b>").render([], controls=["<a>", "<a><b>", "<b>"])
    assert rendered.controls == ((0, 6),)


def test_a_template_that_takes_messages_apart_is_refused() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content.split('<image>')[0] }}{% endfor %}"
    )
    assert template.render([USER], controls=CONTROLS).text == "x"
    with pytest.raises(ValueError, match="takes apart a message that holds the name of a special"):
        template.render([{**USER, "content": "a<image>b"}], controls=CONTROLS)


@pytest.fixture(scope="module")
def peer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(c, special=True) for c in CONTROLS])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=E)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("tools", [None, [WEATHER, CLOCK]])
def test_transformers_renders_our_templates_alike(
    peer: PreTrainedTokenizerFast, form: Form, prompt: bool, tools: Any
) -> None:
    template = TEMPLATES[form]
    chat = template._normalised(CHAT)  # transformers decodes no arguments and finds no names
    peer.chat_template = template.source
    text: Any = peer.apply_chat_template(
        chat, tools=tools, add_generation_prompt=prompt, tokenize=False
    )
    rendered = template.render(CHAT, tools, prompt)
    assert rendered.text == text
    out: Any = peer.apply_chat_template(
        chat,
        tools=tools,
        add_generation_prompt=prompt,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    encoding = peer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert out["input_ids"] == encoding["input_ids"]
    inside = [
        int(any(a <= start and end <= b for a, b in rendered.spans))
        for start, end in encoding["offset_mapping"]
    ]
    assert out["assistant_masks"] == inside
    assert 0 < sum(inside) < len(inside)


HARD = 'line\nline ) }) ``` </tool_calls> <tool_calls> functions.f({"a": 1}) </think> "\\ 天'
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,12}", fullmatch=True)
STRINGS = st.text() | st.just(HARD) | st.lists(st.sampled_from(HARD.split(" "))).map(" ".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.builds(ToolCall, NAMES, st.dictionaries(STRINGS, JSON, max_size=3)), max_size=4
).map(tuple)


@given(CALLS, st.sampled_from(FORMS))
def test_calls_come_back(calls: tuple[ToolCall, ...], form: Form) -> None:
    assert parse_reply(format_calls(calls, form), form) == Reply("", None, calls)


@given(CALLS.filter(bool), st.sampled_from(FORMS))
def test_templates_write_calls_as_format_calls_does(
    calls: tuple[ToolCall, ...], form: Form
) -> None:
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call(c.name, json.dumps(c.arguments)) for c in calls],
    }
    assert written(TEMPLATES[form], [USER, message]) == [format_calls(calls, form) + E]


@given(CALLS.filter(bool), st.sampled_from(FORMS), st.data())
def test_a_cut_reply_stays_as_it_is(
    calls: tuple[ToolCall, ...], form: Form, data: st.DataObject
) -> None:
    whole = "Look: " + format_calls(calls, form)
    closing = len("```" if form == "text-01" else "</tool_calls>")
    # Cut behind "Look: " at the earliest, and before the closing mark is whole.
    cut = whole[: data.draw(st.integers(6, len(whole) - 1))]
    assert parse_reply(cut, form) == Reply(cut, None, ())
    assert parse_reply(whole[:-closing] + "x", form).tool_calls == ()


def test_text_01_replies() -> None:
    fence = '```typescript\nfunctions.get_weather({"location": "Shanghai"})\n```'
    weather = ToolCall("get_weather", {"location": "Shanghai"})
    assert parse_reply(fence, "text-01") == Reply("", None, (weather,))
    assert parse_reply(f"<function_call>{fence}", "text-01") == Reply("", None, (weather,))
    several = f"First.\n<function_call>{fence}\nThen.\n{fence}\n"
    assert parse_reply(several, "text-01") == Reply("First.\n\nThen.", None, (weather, weather))
    raw = '```typescript\nfunctions.f( {"a": "one\ntwo"} )\r\nfunctions.g({})```'
    assert parse_reply(raw, "text-01").tool_calls == (
        ToolCall("f", {"a": "one\ntwo"}),
        ToolCall("g", {}),
    )


def test_m1_replies() -> None:
    calls = '<tool_calls>\n{"name": "f", "arguments": {"a": "</tool_calls>"}}\n</tool_calls>'
    found = (ToolCall("f", {"a": "</tool_calls>"}),)
    assert parse_reply(calls, "m1") == Reply("", None, found)
    assert parse_reply(f"<think>\nhm\n</think>\n\nSo:\n{calls}\n", "m1") == Reply(
        "So:", "hm", found
    )
    thought = f"<think>I could {calls}</think>No."
    assert parse_reply(thought, "m1") == Reply("No.", f"I could {calls}", ())
    later = f"One. <think>{calls}</think> Two."
    assert parse_reply(later, "m1") == Reply(later, None, ())
    assert parse_reply(f"{later} {calls}", "m1") == Reply(later, None, found)
    assert parse_reply(f"<think>cut {calls}", "m1") == Reply("", f"cut {calls}", ())
    assert parse_reply("<think></think>x", "m1") == Reply("x", None, ())


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("text-01", "```typescript\nconst a = f({});\n```"),
        ("text-01", "```typescript\n```"),
        ("text-01", '```typescript\nfunctions.f({"a": })\n```'),
        ("text-01", "```typescript\nfunctions.f([1])\n```"),
        ("text-01", "```typescript\nfunctions.f({}\n```"),
        ("text-01", "```typescript\nfunctions.f\n```"),
        ("text-01", "```typescript\nfunctions.f({})\nfunctions.g(x)\n```"),
        ("text-01", "```typescript\nnothing..f({})\n```"),
        ("m1", "<tool_calls>\n</tool_calls>"),
        ("m1", '<tool_calls>\n{"name": "f"}\n</tool_calls>'),
        ("m1", '<tool_calls>\n{"name": 1, "arguments": {}}\n</tool_calls>'),
        ("m1", '<tool_calls>\n{"name": "f", "arguments": "x"}\n</tool_calls>'),
        ("m1", '<tool_calls>\n{"name": "f", "arguments": {}}\nnot JSON\n</tool_calls>'),
        ("m1", "<tool_calls>[]</tool_calls>"),
        ("m1", "<tool_calls>" + '{"a":' * 100_000),
        ("m1", '<tool_calls>{"name": "f", "arguments": {"a": ' + "1" * 10_000 + "}}</tool_calls>"),
    ],
)
def test_malformed_calls_stay_text(form: Form, text: str) -> None:
    text = f" before {text} after "
    assert parse_reply(text, form) == Reply(text, None, ())


@given(
    st.lists(
        st.sampled_from(
            ["<think>", "</think>", "<tool_calls>", "</tool_calls>", "```typescript\n", "```", "\n"]
            + ["functions.f({})", '{"name": "f", "arguments": {}}', "<function_call>", "text", " "]
        )
    ).map("".join),
    st.sampled_from(FORMS),
)
def test_no_reply_raises_or_loses_words(text: str, form: Form) -> None:
    reply = parse_reply(text, form)
    kept = reply.content + (reply.reasoning or "")
    assert kept.count("text") == text.count("text")
    if not reply.tool_calls and reply.reasoning is None and not text.lstrip().startswith("<think>"):
        assert reply.content == text


def test_names_that_a_form_cannot_write() -> None:
    for name in ("", "a b", "a(", "a\nb"):
        with pytest.raises(ValueError, match="holds a space or a parenthesis: rename it"):
            format_calls([ToolCall(name, {})], "text-01")

"""Chats to text and back: Jinja2 templates, the model's own text in them, and tool calls.

    messages -> ChatTemplate.render -> Rendered        reply -> parse_reply -> Reply

Messages have OpenAI's form. A message's content is a string or a list of parts, `{"type": "text",
"text": ...}` or `{"type": "image"}`; each template gets the one that it reads.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, NamedTuple, get_args

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

Form = Literal["text-01", "m1"]
Message = Mapping[str, Any]

ROLES = ("system", "user", "assistant", "tool", "function")
# A result of a tool is either, by the template: each is given the one that it knows.
RESULTS = {"tool": "function", "function": "tool"}
# Private characters stand in a rendered text for what is no text; templates never write them.
PRIVATE = range(0x10FFFD, 0xF0000, -1)

_TEMPLATES = resources.files("sferic.data") / "templates"
TEXT_01 = (_TEMPLATES / "text-01.jinja").read_text("utf-8")
M1 = (_TEMPLATES / "m1.jinja").read_text("utf-8")
# what both write around turns: without these as special tokens a model doesn't see the turns
MARKERS = ("<begin_of_document>", "<beginning_of_sentence>", "<end_of_sentence>")


class Rendered(NamedTuple):
    """A chat as text; ranges are (start, end) in its characters, in order.

    Attributes:
        text: what the model reads.
        spans: what the model wrote or has to learn to write: the template's generation blocks.
        controls: where the template, and not a message, wrote one of the control strings.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    controls: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What a model answered.

    Attributes:
        content: the text, without the reasoning and the calls below.
        reasoning: the text of a leading <think>, None without one.
        tool_calls: in order.
    """

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which puts the render's two marks around its text.

    Marks hold wherever the text is built, in a macro too, where positions would be unknown.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark", [nodes.Name("generation_marks", "load")])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, marks: str, caller: Macro) -> str:
        return marks[0] + caller() + marks[1]


class _Mask:
    """Exchanges the first character of each control string in a JSON value, one for one.

    So positions stay, and white space, by which templates strip. Where a string ends within a
    control string that is exchanged too: the next string could hold the rest.
    """

    def __init__(self, controls: Collection[str], free: Iterator[str]) -> None:
        self._controls = controls
        self._beginnings = {c[:n] for c in controls for n in range(1, len(c))}
        self._longest = max(map(len, self._beginnings), default=0)
        firsts = dict.fromkeys(control[0] for control in controls)
        self._masks = dict(zip(firsts, free, strict=False))
        self._unmask = str.maketrans({mask: first for first, mask in self._masks.items()})

    def undo(self, text: str) -> str:
        return text.translate(self._unmask)

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        # Roles and types of parts are from fixed lists, and templates branch on them.
        result = {**self.value(message), "role": message["role"]}
        if isinstance(message["content"], list):
            parts = message["content"]
            result["content"] = [{**self.value(p), "type": p["type"]} for p in parts]
        return result

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._string(value, [*self._whole(value), *self._begun(value)])
        if isinstance(value, Mapping):
            # Templates look keys up: one that only ends like a control string stays.
            return {
                self._string(key, self._whole(key)) if isinstance(key, str) else key: self.value(v)
                for key, v in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        return value

    def _string(self, text: str, positions: list[int]) -> str:
        if not positions:
            return text
        characters = list(text)
        for position in positions:
            characters[position] = self._masks[text[position]]
        return "".join(characters)

    def _whole(self, text: str) -> list[int]:
        positions = []
        for control in self._controls:
            position = text.find(control)
            while position >= 0:
                positions.append(position)
                position = text.find(control, position + 1)
        return positions

    def _begun(self, text: str) -> list[int]:
        text = text.rstrip()
        starts = range(max(0, len(text) - self._longest), len(text))
        return [start for start in starts if text[start:] in self._beginnings]


class ChatTemplate:
    """A Jinja2 chat template, which sees the messages and nothing else of the program.

    Attributes:
        source: the template's text.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str = "the chat template",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Compile a template and find out which messages it can show.

        Args:
            source: the template's text.
            name: what errors call it.
            variables: further names that it may use, such as `bos_token`.

        Raises:
            ValueError: it is no Jinja2 template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        if "{" not in source:
            raise ValueError(f"{name} is {source[:40]!r}, which holds no Jinja2: give its text")
        self.source = source
        self._name = name
        self._variables = dict(variables or {})
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            where = name if line is None else f"{name}, line {line}"
            raise ValueError(f"{where}: {error}; it must be a Jinja2 template") from error
        self._probe()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        controls: Collection[str] = (),
    ) -> Rendered:
        """The chat as text.

        Args:
            messages: in OpenAI's form; the arguments of tool calls as JSON or as objects.
            tools: each `{"type": "function", "function": {...}}`.
            add_generation_prompt: whether the text ends with the head of the model's next turn.
            controls: strings to find where the template wrote them. The same strings in messages
                and tools are not found, nor are those that two parts of messages form together.

        Raises:
            ValueError: a message, a tool or the template is bad, or the template cannot show a
                message; the text says which.
        """
        chat = self._normalised(messages)
        checked = _checked_tools(tools)
        known = sorted(controls, key=len, reverse=True)  # of two at one place, the longer
        used = json.dumps([chat, checked, self._variables], ensure_ascii=False, default=str)
        free = _unused(used + self.source)
        marks = next(free) + next(free)
        mask = _Mask(known, free)
        masked = [mask.message(message) for message in chat]
        masked_tools = mask.value(checked)
        raw = self._run(masked, masked_tools, add_generation_prompt, marks)
        if (masked, masked_tools) != (chat, checked) and mask.undo(raw) != self._run(
            chat, checked, add_generation_prompt, marks
        ):
            raise ValueError(
                f"{self._name} takes apart a message that holds the name of a special token, so "
                "which names are text is unknown: remove the name from the message"
            )
        text, spans = _cut_marks(raw, marks)
        pattern = "|".join(map(re.escape, known))
        found = tuple(m.span() for m in re.finditer(pattern, text)) if known else ()
        return Rendered(mask.undo(text), spans, found)

    def _run(
        self,
        chat: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        marks: str,
    ) -> str:
        try:
            return self._template.render(
                **self._variables,
                messages=chat,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                generation_marks=marks,
            )
        except TemplateError as error:
            raise ValueError(f"{self._name}: {error}") from error
        except Exception as error:  # a template is a program, and may fail in any way
            raise ValueError(f"{self._name} fails: {type(error).__name__}: {error}") from error

    def _probe(self) -> None:
        """Find what the template shows: it drops silently what it was not written for."""
        needle = "text that a template must show"

        def shows(*messages: dict[str, Any]) -> bool | None:
            try:
                out = self._run(list(messages), None, False, "  ")
            except ValueError:
                return None
            # A list that is printed as it is shows its quotes.
            return needle in out and "'type'" not in out

        def parts(text: str) -> Any:
            return [{"type": "text", "text": text}]

        self._takes_strings = shows({"role": "user", "content": needle}) is True
        self._takes_parts = shows({"role": "user", "content": parts(needle)}) is True
        self._takes_images = self._takes_parts and self._differs(
            [{"role": "user", "content": parts("")}],
            [{"role": "user", "content": [{"type": "image"}, *parts("")]}],
        )

        def turn(role: str, text: str, **more: Any) -> dict[str, Any]:
            return {"role": role, "content": self._as_content(text), **more}

        def calling(name: str) -> dict[str, Any]:
            function = {"name": name, "arguments": {}}
            call = {"id": "1", "type": "function", "function": function}
            return turn("assistant", "", tool_calls=[call])

        question = turn("user", "?")
        before = {
            "assistant": [question],
            "tool": [question, calling("f")],
            "function": [question, calling("f")],
        }
        self._shown = {
            role: shows(*before.get(role, []), turn(role, needle, name="f", tool_call_id="1"))
            for role in ROLES
        }
        self._shows_calls = shows(question, calling(needle))

    def _as_content(self, text: str) -> str | list[dict[str, Any]]:
        if self._takes_strings or not self._takes_parts:
            return text
        return [{"type": "text", "text": text}]

    def _differs(self, one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
        try:
            return self._run(one, None, False, "  ") != self._run(other, None, False, "  ")
        except ValueError:
            return False

    def _normalised(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """A copy of the messages as this template reads them."""
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
            raise ValueError(
                f"messages are a {type(messages).__name__}: give a list of "
                '{"role": ..., "content": ...}'
            )
        names: dict[str, str] = {}
        chat = []
        for i, message in enumerate(messages):
            where = f"message {i}"
            if not isinstance(message, Mapping):
                raise ValueError(
                    f'{where} is {message!r}: give an object {{"role": ..., "content": ...}}'
                )
            role = self._role(message, where)
            result = {**message, "role": role}
            calls = message.get("tool_calls")
            if calls:
                result["tool_calls"] = self._calls(calls, role, where)
                names |= {
                    c["id"]: c["function"]["name"]
                    for c in result["tool_calls"]
                    if isinstance(c.get("id"), str)
                }
            else:
                result.pop("tool_calls", None)
            result["content"] = self._content(message.get("content"), bool(calls), where)
            if role == "function":
                result["name"] = _result_name(message, names, where)
            chat.append(result)
        return chat

    def _role(self, message: Message, where: str) -> str:
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"{where} has the role {role!r}: use one of {', '.join(ROLES)}")
        other = RESULTS.get(role)
        if other is not None and self._shown[other] and not self._shown[role]:
            return other
        if self._shown[role] is False:
            raise ValueError(
                f"{where} has the role {role!r}, which {self._name} leaves out: "
                "remove the message, or use another template"
            )
        return role

    def _calls(self, calls: Any, role: str, where: str) -> list[dict[str, Any]]:
        if role != "assistant" or not isinstance(calls, Sequence) or isinstance(calls, str):
            raise ValueError(
                f"{where} has tool_calls {calls!r}: only an assistant's message has them, as a list"
            )
        if self._shows_calls is False:
            raise ValueError(
                f"{where} has tool_calls, which {self._name} leaves out: use a built-in template, "
                "or write them into the content with format_calls"
            )
        return [_checked_call(call, f"{where}, tool call {j}") for j, call in enumerate(calls)]

    def _content(self, content: Any, calls: bool, where: str) -> str | list[dict[str, Any]]:
        if content is None and calls:
            content = ""
        if isinstance(content, str):
            return self._as_content(content)
        if not isinstance(content, Sequence):
            raise ValueError(
                f'{where} has the content {content!r}: give a string or a list of {{"type": ...}}'
            )
        parts = [_checked_part(part, f"{where}, part {j}") for j, part in enumerate(content)]
        for j, part in enumerate(parts):
            if part["type"] == "image" and not self._takes_images:
                raise ValueError(
                    f"{where}, part {j} is an image, which {self._name} leaves out: remove it, "
                    "or use the template of a model that sees"
                )
        return parts if self._takes_parts else "".join(part["text"] for part in parts)


def format_calls(calls: Sequence[ToolCall], form: Form) -> str:
    """Calls as a model writes them: the inverse of `parse_reply`; no calls give no text.

    Raises:
        ValueError: the form cannot write a call's name.
    """
    if not calls:
        return ""
    if form == "m1":
        lines = [_tojson({"name": call.name, "arguments": call.arguments}) for call in calls]
        return "\n".join(["<tool_calls>", *lines, "</tool_calls>"])
    for call in calls:
        if not _NAME.fullmatch(call.name):
            raise ValueError(
                f"the tool name {call.name!r} is empty or holds a space or a parenthesis: rename it"
            )
    lines = [f"functions.{call.name}({_tojson(call.arguments)})" for call in calls]
    return "\n".join(["<function_call>```typescript", *lines, "```"])


def parse_reply(text: str, form: Form) -> Reply:
    """A model's reply in its parts.

    A block of calls that is cut off or malformed stays in the content as it is, as a whole, and so
    does what looks like calls within <think>. A leading <think> that is cut off is reasoning.
    """
    if form not in get_args(Form):
        raise ValueError(f"form is {form!r}, it must be {' or '.join(map(repr, get_args(Form)))}")
    reasoning = None
    if match := _REASONING.match(text):
        reasoning = match[1].strip() or None
        text = text[match.end() :].lstrip()
    opening, read = (_FENCE, _fenced_calls) if form == "text-01" else (_TAG, _tagged_calls)
    calls: list[ToolCall] = []
    kept: list[str] = []
    position = 0
    while match := opening.search(text, position):
        end = match.end()
        if match[0] == "<think>":
            close = text.find("</think>", end)
            end = len(text) if close < 0 else close
        elif block := read(text, end):
            kept.append(text[position : match.start()])
            calls += block[0]
            position = block[1]
            continue
        kept.append(text[position:end])
        position = end
    kept.append(text[position:])
    content = "".join(kept)
    return Reply(content.strip() if calls else content, reasoning, tuple(calls))


_REASONING = re.compile(r"\s*<think>(.*?)(?:</think>|\Z)", re.DOTALL)
# The special token is missing where special tokens were left out in decoding.
_FENCE = re.compile(r"<think>|(?:<function_call>\s*)?```typescript[ \t]*\r?\n")
_TAG = re.compile(r"<think>|<tool_calls>")
_NAME = re.compile(r"[^\s()]+")
_SPACE = re.compile(r"\s*")
# Models write line ends into strings as they are.
_DECODER = json.JSONDecoder(strict=False)


def _fenced_calls(text: str, position: int) -> tuple[list[ToolCall], int] | None:
    """The calls from `functions.` to the closing fence, and where they end; None if broken."""
    calls: list[ToolCall] = []
    while True:
        position = _skip(text, position)
        if text.startswith("```", position):
            return (calls, position + 3) if calls else None
        name = _NAME.match(text, position + len("functions."))
        if not text.startswith("functions.", position) or name is None:
            return None
        if not text.startswith("(", name.end()):
            return None
        found = _json_object(text, name.end() + 1)
        if found is None:
            return None
        position = _skip(text, found[1])
        if not text.startswith(")", position):
            return None
        calls.append(ToolCall(name[0], found[0]))
        position += 1


def _tagged_calls(text: str, position: int) -> tuple[list[ToolCall], int] | None:
    """The calls up to </tool_calls>, and where they end; None if broken."""
    calls: list[ToolCall] = []
    while True:
        position = _skip(text, position)
        if text.startswith("</tool_calls>", position):
            return (calls, position + len("</tool_calls>")) if calls else None
        found = _json_object(text, position)
        if found is None:
            return None
        call, position = found
        name, arguments = call.get("name"), call.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        calls.append(ToolCall(name, arguments))


def _json_object(text: str, position: int) -> tuple[dict[str, Any], int] | None:
    try:
        value, end = _DECODER.raw_decode(text, _skip(text, position))
    except (ValueError, RecursionError):
        return None
    return (value, end) if isinstance(value, dict) else None


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


def _checked_part(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise ValueError(f'{where} is {part!r}: give an object {{"type": "text", "text": ...}}')
    kind = part.get("type")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{where} has the text {part.get('text')!r}: give a string")
        return dict(part)
    if kind in ("image", "image_url"):
        return {**part, "type": "image"}
    raise ValueError(f"{where} has the type {kind!r}: use text, image or image_url")


def _checked_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f'{where} is {call!r}: give {{"type": "function", "function": '
            '{"name": ..., "arguments": ...}}'
        )
    if not _NAME.fullmatch(function["name"]):
        raise ValueError(
            f"{where} has the name {function['name']!r}: it must not be empty or hold a space or "
            "a parenthesis"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{where} has the arguments {function['arguments']!r}, which are not JSON: {error}"
            ) from error
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{where} has the arguments {arguments!r}: give an object, or its JSON")
    return {**call, "function": {**function, "arguments": dict(arguments)}}


def _checked_tools(tools: Any) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError(f"tools are a {type(tools).__name__}: give a list")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f'tool {i} is {tool!r}: give {{"type": "function", "function": '
                '{"name": ..., "description": ..., "parameters": ...}}'
            )
    return [dict(tool) for tool in tools]


def _result_name(message: Message, names: dict[str, str], where: str) -> str:
    """The tool's name of a result, where the template writes it."""
    name, id = message.get("name"), message.get("tool_call_id")
    if name is None and isinstance(id, str):
        name = names.get(id)
    if not isinstance(name, str):
        raise ValueError(
            f"{where} is a tool's result, its name is {message.get('name')!r} and its tool_call_id "
            f"{id!r} that of no call before: give the tool's name"
        )
    return name


def _cut_marks(raw: str, marks: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The text without the marks, and where the non-empty pairs of them were."""
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    position = start = 0
    for piece in re.split(f"([{marks}])", raw):
        if piece == marks[0]:
            start = position
        elif piece == marks[1]:
            if position > start:
                spans.append((start, position))
        else:
            pieces.append(piece)
            position += len(piece)
    return "".join(pieces), tuple(spans)


def _unused(text: str) -> Iterator[str]:
    return (chr(code) for code in PRIVATE if chr(code) not in text)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Transformers' filter: jinja2's own escapes what HTML would read."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)

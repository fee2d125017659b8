"""Chat templates of other people: what each of them shows of a message, which ids it takes, and
where folders and GGUF files keep theirs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from crossover.models.errors import BadChat
from crossover.models.text.chat_template import CHATML, CallsForm
from crossover.models.text.template_process import AsWritten
from crossover.models.text.tokenizer import load_tokenizer, shipped
from crossover.models.weights.random_weights import write_gguf
from tests.models.text.test_chat_template import Chat
from tests.shapes import TINY_LLAMA

PARTS = (
    "{% for m in messages %}|{{ m['role'] }}:{% for p in m['content'] %}"
    "{% if p['type'] == 'text' %}{{ p['text'] }};{% endif %}{% endfor %}{% endfor %}"
)
# The texts of the user in parts, all others as they are.
MIXED = (
    "{% for m in messages %}|{{ m.role }}:{% if m.role == 'user' %}{% for p in m.content %}"
    "{{ p.text }};{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}|{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}|{{ m.content }}{% endfor %}"
)
FIRST_PART = "{% for m in messages %}|{{ m.role }}:{{ m.content[0]['text'] }}{% endfor %}"
WORDS = "Grüße an 200 Wörter"
LIST = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def turns(*pairs: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.mark.parametrize(
    ("template", "messages", "prompt"),
    [
        (PARTS, turns(("user", WORDS)), f"|user:{WORDS};"),
        (PARTS, turns(("user", LIST)), "|user:a;b;"),
        (
            PARTS,
            turns(("system", "s"), ("user", "u"), ("assistant", "a"), ("user", LIST)),
            "|system:s;|user:u;|assistant:a;|user:a;b;",
        ),
        (PARTS, turns(("user", "")), "|user:"),
        (MIXED, turns(("system", LIST), ("user", "u")), "|system:a\nb|user:u;"),
        (EITHER, turns(("user", LIST)), "|user:a\nb"),
        (EITHER, turns(("user", "u"), ("tool", "t")), "|user:u|tool:t"),
        (LLAMA2, turns(("user", "u"), ("assistant", "")), "[INST]u[/INST]"),
        # What a tool said is shown by every template.
        (
            LLAMA2,
            turns(("user", "u"), ("assistant", "c"), ("tool", "t"), ("tool", "v")),
            "[INST]u[/INST]c[INST]<tool_response>\nt\n</tool_response>\n"
            "<tool_response>\nv\n</tool_response>[/INST]",
        ),
        (
            ALTERNATING,
            turns(("user", "u"), ("assistant", "c"), ("tool", "t")),
            "|u|c|<tool_response>\nt\n</tool_response>",
        ),
        (CHATML, turns(("user", LIST)), "<|im_start|>user\na\nb<|im_end|>\n"),
        (FIRST_PART, turns(("system", LIST), ("user", "u")), "|system:a\nb|user:u"),
        (FIRST_PART, turns(("user", ""), ("assistant", "a")), "|user:|assistant:a"),
        (
            ALTERNATING,
            turns(("user", "u"), ("assistant", "c"), ("tool", "t"), ("user", LIST)),
            "|u|c|<tool_response>\nt\n</tool_response>\na\nb",
        ),
        (
            PARTS.replace(
                "{% for m",
                "{% for m in messages if m.role == 'tool' %}"
                "{{ raise_exception('no') }}{% endfor %}{% for m",
            ),
            turns(("user", "u"), ("assistant", "c"), ("tool", "t"), ("user", "v")),
            "|user:u;|assistant:c;|user:<tool_response>\nt\n</tool_response>\nv;",
        ),
    ],
)
def test_a_text_is_shown_in_the_form_that_the_template_reads(
    template: str, messages: list[dict[str, Any]], prompt: str
) -> None:
    chat = Chat(template)
    chat.check_shown(messages, False)
    assert chat.render_chat(messages, False) == prompt


@pytest.mark.parametrize(
    ("template", "messages", "role"),
    [
        ("{{ messages | length }}", turns(("user", "u")), "user"),
        (LLAMA2, turns(("system", "s"), ("user", "u")), "system"),
        (PARTS.replace("p['text']", "p['value']"), turns(("user", "u")), "user"),
    ],
)
def test_a_text_that_no_form_shows_is_refused(
    template: str, messages: list[dict[str, Any]], role: str
) -> None:
    with pytest.raises(BadChat, match=f"does not show the content of '{role}' messages"):
        Chat(template).check_shown(messages, False)


# As Mistral's.
NINE = (
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{% if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('ids of 9 letters or digits') }}{% endif %}"
    "[{{ c.function.name }} {{ c.id }}]{% endfor %}{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids of 9 letters or digits') }}{% endif %}"
    "({{ m.content }} {{ m.tool_call_id }}){% else %}{{ m.content }}{% endif %}{% endfor %}"
)
ANY = NINE.replace("length != 9", "length == 0")


def calls(*ids: str | None, results: Any = None) -> list[dict[str, Any]]:
    made = [
        {"id": one, "type": "function", "function": {"name": f"f{place}", "arguments": {}}}
        for place, one in enumerate(ids)
    ]
    answers = [
        {"role": "tool", "content": f"r{place}"} | ({} if one is None else {"tool_call_id": one})
        for place, one in enumerate(ids if results is None else results)
    ]
    return [
        *turns(("user", "u")),
        {"role": "assistant", "content": "", "tool_calls": made},
        *answers,
    ]


# As Llama 3.1's.
SINGLE = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('single calls only') }}{% endif %}"
    "{{ m.content }}[{{ m.tool_calls[0].function.name }}]"
    "{% elif m.role == 'tool' %}({{ m.content }}){% else %}{{ m.content }}{% endif %}{% endfor %}"
)
LONG = "call_0123456789abcdef01234567", "call_0123456789abcdef01234568"


@pytest.mark.parametrize(
    ("template", "messages", "prompt"),
    [
        (NINE, calls("abcDEF123"), "u[f0 abcDEF123](r0 abcDEF123)"),
        (NINE, calls(LONG[0]), "u[f0 000000001](r0 000000001)"),
        (NINE, calls(*LONG), "u[f0 000000001][f1 000000002](r0 000000001)(r1 000000002)"),
        (
            *(NINE, calls(*LONG, results=LONG[::-1])),
            "u[f0 000000001][f1 000000002](r0 000000002)(r1 000000001)",
        ),
        (NINE, calls("1", "22"), "u[f0 000000001][f1 000000002](r0 000000001)(r1 000000002)"),
        (NINE, calls(None, None), "u[f0 000000001][f1 000000002](r0 000000001)(r1 000000002)"),
        (
            NINE,
            calls("éé--é----", "x"),
            "u[f0 000000001][f1 000000002](r0 000000001)(r1 000000002)",
        ),
        (SINGLE, calls(*LONG), "u[f0](r0)[f1](r1)"),
        (SINGLE, calls(*LONG, results=LONG[::-1]), "u[f0](r1)[f1](r0)"),
        (SINGLE, calls(None, None), "u[f0](r0)[f1](r1)"),
        (SINGLE, calls("a", "b", results=["b"]), "u[f0][f1](r0)"),
        (SINGLE, calls("a", "b", results=[]), "u[f0][f1]"),
        (ANY, calls(*LONG), f"u[f0 {LONG[0]}][f1 {LONG[1]}](r0 {LONG[0]})(r1 {LONG[1]})"),
    ],
)
def test_ids_of_calls_are_those_that_the_template_takes(
    template: str, messages: list[dict[str, Any]], prompt: str
) -> None:
    assert Chat(template).render_chat(messages) == prompt


# As DeepSeek-R1's: calls in turns whose content is null, their arguments as a text.
NULL_CONTENT = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    "{% for c in m.tool_calls %}[{{ c.function.name + ' ' + c.function.arguments }}]{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (NULL_CONTENT, CallsForm(True, True)),
        (NULL_CONTENT.replace("is none", "== ''"), CallsForm(True, False)),
        (NULL_CONTENT.replace("c.function.arguments", "c.function.arguments | tojson"), (False, 1)),
        (SINGLE.replace("function.name", "function.arguments.a"), CallsForm(False, False)),
        (CHATML, None),
        ("{# tool_calls #}" + CHATML, None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_what_a_template_shows_of_calls(template: str, form: CallsForm | None) -> None:
    assert Chat(template).calls_form(template) == form


@pytest.mark.parametrize(
    ("template", "is_shown"),
    [
        ("{% for t in tools or () %}{{ t | tojson }}{% endfor %}{{ messages[0].content }}", True),
        ("{# tools #}" + CHATML, False),
        ("{{ custom_tools }}" + CHATML, False),
    ],
)
def test_whether_a_template_supports_tools(template: str, is_shown: bool) -> None:
    assert Chat(template).shows_tools(template) == is_shown


def test_what_a_model_wrote_stands_as_it_is() -> None:
    source = "{{ a | tojson }} {{ [a] | tojson }} {{ a }} {% for k, v in a | items %}x{% endfor %}"
    given = {"a": AsWritten('{"b": ')}
    assert Chat(source).render_chat([], variables=given) == '{"b":  [{"b": ] {"b":  '
    source = "{% for k, v in a.items() %}x{% endfor %}{{ {'b': 1} | items | list }}"
    assert Chat(source).render_chat([], variables=given) == "[('b', 1)]"


# --- where templates are kept

USE, USUAL = "{{ messages[0].content }} by tools", "{{ messages[0].content }} as usual"
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
NAMED = [{"name": "tool_use", "template": USE}, {"name": "default", "template": USUAL}]
# How a folder keeps them -> prompts without and with tools; None: a sentence instead
KEPT: dict[str, tuple[dict[str, Any], str | None, str | None]] = {
    "one": ({"tokenizer_config.json": {"chat_template": USUAL}}, "x as usual", "x as usual"),
    "two": ({"tokenizer_config.json": {"chat_template": NAMED}}, "x as usual", "x by tools"),
    "an object": (
        {"tokenizer_config.json": {"chat_template": {"tool_use": USE, "default": USUAL}}},
        *("x as usual", "x by tools"),
    ),
    "one of another name": (
        {"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": USUAL}]}},
        *(None, None),
    ),
    "one for tools": ({"tokenizer_config.json": {"chat_template": NAMED[:1]}}, None, "x by tools"),
    "files": (
        {
            "chat_template.jinja": USUAL,
            "additional_chat_templates/tool_use.jinja": USE,
            "tokenizer_config.json": {"chat_template": "old"},
        },
        *("x as usual", "x by tools"),
    ),
    "a file with a BOM": ({"chat_template.jinja": "\ufeff" + USUAL}, "x as usual", "x as usual"),
    "a processor's": ({"chat_template.json": {"chat_template": USUAL}}, "x as usual", "x as usual"),
    "none": ({}, None, None),
}


def both(tokenizer: Any) -> list[str | None]:
    rendered: list[str | None] = []
    for variables in ({}, TOOLS):
        try:
            rendered.append(tokenizer.render_chat(turns(("user", "x")), variables=variables))
        except BadChat as problem:
            rendered.append(None)
            named = "rag" in tokenizer.other_templates or "tool_use" in tokenizer.other_templates
            assert ("several chat templates" in str(problem)) == named
    return rendered


@pytest.mark.parametrize("place", KEPT)
def test_a_folders_templates_are_chosen_as_transformers_does(place: str, tmp_path: Path) -> None:
    files, *prompts = KEPT[place]
    (tmp_path / "tokenizer.json").write_text(json.dumps(shipped(600)), encoding="utf-8-sig")
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        mark = "" if isinstance(content, str) else "\ufeff"  # as some tools of Windows write it
        (tmp_path / name).write_text(mark + text, encoding="utf-8")
    assert both(load_tokenizer(tmp_path)) == prompts


@pytest.mark.parametrize("names", [["default", "tool_use"], ["rag"]])
def test_a_gguf_files_templates_are_chosen_so_too(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"default": USUAL, "tool_use": USE, "rag": USUAL}
    named: Any = [{"name": name, "template": known[name]} for name in names]
    plain = gguf.GGUFWriter.add_chat_template
    monkeypatch.setattr(gguf.GGUFWriter, "add_chat_template", lambda self, _: plain(self, named))
    write_gguf(TINY_LLAMA, tmp_path / "x.gguf")
    wanted = [None, None] if names == ["rag"] else ["x as usual", "x by tools"]
    assert both(load_tokenizer(tmp_path / "x.gguf")) == wanted

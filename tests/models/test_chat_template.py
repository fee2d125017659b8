import datetime
import time

import pytest

from models import chat_template
from models.chat_template import CHATML, MAX_TEMPLATE, MOST_CHARACTERS, ChatTemplate
from models.errors import BadChat

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>\n{{ 1 }}"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "é"},
]
LLAMA3 = (
    "{%- set date = strftime_now('%Y') %}{% for message in messages %}{% set content = '<|start|>' "
    "+ message['role'] ~ '|' + "
    "message['content'] | trim + '<|eot|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + "
    "content %}{% endif %}{{ content }}"
    "{% endfor %}\n    {%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}{{ "
    "{'a': ['<', 'é']} | tojson }}"
    "{% macro twice(x) %}{{ x * 2 }}{% endmacro %}{{ twice('ab') }}{% set ns = namespace(n=0) %}{% "
    "for i in range(5) %}{% if i == 3 %}"
    "{% break %}{% endif %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}{% generation %}x{% "
    "endgeneration %}{{ ['p', 'q'] | join('-') }}"
)


@pytest.mark.parametrize("source", [CHATML, LLAMA3])
@pytest.mark.parametrize("add", [True, False])
def test_renders_as_transformers_does(source: str, add: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    (want,), _ = render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=add, bos_token="<s>"
    )
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, add) == want


def test_llama_3_is_told_the_day_and_a_request_may_tell_another() -> None:
    template = ChatTemplate(
        "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
        "{{ date_string }}"
    )
    assert template.render([]) == datetime.date.today().strftime("%d %b %Y")
    assert template.render([], variables={"date_string": "1 May 2031"}) == "1 May 2031"


def test_the_templates_own_complaint_reaches_the_caller() -> None:
    template = ChatTemplate(
        "{% if messages[0].role != 'user' %}{{ raise_exception('must begin with user') }}{% endif "
        "%}ok"
    )
    assert template.render([{"role": "user", "content": ""}]) == "ok"
    with pytest.raises(BadChat, match="must begin with user"):
        template.render([{"role": "system", "content": ""}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_nothing_leads_out_of_the_sandbox(source: str) -> None:
    try:
        assert (
            ChatTemplate(source).render(MESSAGES) == ""
        )  # Jinja prints what it does not let see as nothing
    except BadChat:
        pass
    assert MESSAGES[0] == {"role": "system", "content": "Be brief."}


GROWING = (
    "{% set ns = namespace(s='xxxxxxxxxxxxxxxx') %}{% for i in range(60) %}"
    "{% set ns.s = EXPRESSION %}{% endfor %}"
)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        GROWING.replace("EXPRESSION", "ns.s ~ ns.s"),
        GROWING.replace("EXPRESSION", "ns.s + ns.s"),
        GROWING.replace("EXPRESSION", "[ns.s, ns.s] | join"),
        GROWING.replace("EXPRESSION", "ns.s.replace('x', ns.s)"),
        GROWING.replace("EXPRESSION", "ns.s | replace('x', ns.s)"),
        GROWING.replace("EXPRESSION", "''.join([ns.s, ns.s])"),
        "{{ 'x' * 9999999999 }}",
        "{{ [0] * 9999999999 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% set ns = namespace(x=3) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}"
        "{% endfor %}",
        "{{ ('a'.encode() * 1500000000) | length }}",
        "{{ (1).to_bytes(1500000000) | length }}",
        "{{ ['x'] | batch(100000000, 'x') | list | length }}",
        "{{ ['x'] | slice(100000000) | list | length }}",
        "{{ 1.5 | round(100000000, 'ceil') }}",
        "{{ 5 | round(-100000000) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ 'x'.ljust(9999999999) }}",
        "{{ 'x' | center(9999999999) }}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    ],
)
def test_a_runaway_template_is_stopped_soon(source: str) -> None:
    started = time.process_time()
    with pytest.raises(BadChat):
        ChatTemplate(source).render(MESSAGES)
    assert time.process_time() - started < 10


def test_a_template_has_a_clock_and_no_text_is_longer_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(BadChat, match=f"more than {MOST_CHARACTERS}"):
        ChatTemplate(f"{{{{ 'x' * {MOST_CHARACTERS + 1} }}}}").render(MESSAGES)
    slow = ChatTemplate(
        "{% set x = 'x' * 200000 %}{% for i in range(99999) %}"
        "{% if x | upper == 'y' %}{% endif %}{% endfor %}"
    )
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 0.02)
    with pytest.raises(BadChat, match="more than 0.02 s"):
        slow.render(MESSAGES)


@pytest.mark.parametrize("block", ["{}", "{{% set y %}}{}{{% endset %}}"])
def test_a_text_of_many_pieces_is_bounded(block: str) -> None:
    loop = "{% set x = 'x' * 100000 %}{% for i in range(99) %}{{ x }}{% endfor %}"
    with pytest.raises(BadChat, match=f"more than {MOST_CHARACTERS}"):
        ChatTemplate(block.format(loop)).render(MESSAGES)


def test_a_template_cannot_be_compiled_or_is_too_long() -> None:
    with pytest.raises(BadChat, match="compiled"):
        ChatTemplate("{% for %}")
    with pytest.raises(BadChat, match=str(MAX_TEMPLATE)):
        ChatTemplate("x" * (MAX_TEMPLATE + 1))


def test_missing_fields_are_the_callers_error() -> None:
    with pytest.raises(BadChat, match="messages"):
        ChatTemplate(CHATML).render([{"role": "user"}])

import contextlib
import datetime
import time

import pytest

from crossover.models.errors import BadChat
from crossover.models.text import chat_template
from crossover.models.text.chat_template import CHATML, RendersChat

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


class Chat(RendersChat):
    def __init__(self, template: str) -> None:
        self.chat_template, self.chat_tokens = template, {"bos_token": "<s>"}


@pytest.mark.parametrize("source", [CHATML, LLAMA3])
@pytest.mark.parametrize("add", [True, False])
def test_renders_as_transformers_does(source: str, add: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    (want,), _ = render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=add, bos_token="<s>"
    )
    assert Chat(source).render_chat(MESSAGES, add) == want


def test_llama_3_gets_the_date_and_a_request_may_set_another() -> None:
    template = Chat(
        "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
        "{{ date_string }}"
    )
    assert template.render_chat([]) == datetime.date.today().strftime("%d %b %Y")
    assert template.render_chat([], variables={"date_string": "1 May 2031"}) == "1 May 2031"


def test_the_templates_own_complaint_reaches_the_caller() -> None:
    template = Chat(
        "{% if messages[0].role != 'user' %}{{ raise_exception('must begin with user') }}{% endif "
        "%}ok"
    )
    assert template.render_chat([{"role": "user", "content": ""}]) == "ok"
    with pytest.raises(BadChat, match="must begin with user"):
        template.render_chat([{"role": "system", "content": ""}])


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
    with contextlib.suppress(BadChat):  # Jinja prints what it does not let see as nothing
        assert Chat(source).render_chat(MESSAGES) == ""
    assert MESSAGES[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{{ 9 ** 9 ** 9 }}",
    ],
)
def test_a_runaway_template_is_stopped_soon(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 0.2)
    started = time.process_time()
    with pytest.raises(BadChat):
        Chat(source).render_chat(MESSAGES)
    assert time.process_time() - started < 10


def test_what_a_template_cannot_do_is_the_callers_error() -> None:
    with pytest.raises(BadChat, match="compiled"):
        Chat("{% for %}").render_chat(MESSAGES)
    with pytest.raises(BadChat, match="messages"):
        Chat(CHATML).render_chat([{"role": "user"}])

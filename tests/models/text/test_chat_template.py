import contextlib
import datetime
import resource
import subprocess
import sys
import time

import psutil
import pytest

from crossover.models.errors import BadChat
from crossover.models.text.chat_template import CHATML, RendersChat
from crossover.models.text.template_process import (
    MAX_TEMPLATE_CHARACTERS,
    BadTemplate,
    TemplateProcess,
)

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
    templates = TemplateProcess()  # one for all tests, since each takes 0.1 s to start

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
        "{% if messages[0].name %}{{ raise_exception('must have no name') }}{% endif %}ok"
    )
    assert template.render_chat([{"role": "user", "content": ""}]) == "ok"
    with pytest.raises(BadChat, match="must have no name"):
        template.render_chat([{"role": "system", "content": "", "name": "x"}])


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


RUNAWAY = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "macros that double": "{% macro a(n) %}{% if n %}{{ a(n-1) }}{{ a(n-1) }}{% endif %}"
    "{% endmacro %}{{ a(40) }}",
    "calls that double": "{% macro a(n) %}{% if n %}{% call a(n-1) %}{% endcall %}"
    "{% call a(n-1) %}{% endcall %}{% endif %}{% endmacro %}{{ a(40) }}",
    "a sum of lists": "{{ ([[1]]*250000)|sum(start=[])|length }}",
    "long integers": "{% set n = namespace(x=(messages|length)**9999) %}{% for i in range(20) %}"
    "{% set n.x = n.x * n.x %}{% endfor %}{{ (n.x * 7) // n.x }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a long text": "{{ '%0*d' % (2000000000, 1) }}",
    "a long prompt": "{{ 'x' * 50000000 }}",
    "doubling text": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}",
    "compilation": "{{a}}" * 50_000,
    "many macros": "".join(f"{{% macro m{i}() %}}{{% endmacro %}}" for i in range(7000)),
    "too long": "x" * (MAX_TEMPLATE_CHARACTERS + 1),
}


# Each of these costs time, memory or compilation as another one does.
FURTHER_RUNAWAY = ("macros that double", "doubling text", "many macros")


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, id=name, marks=[pytest.mark.slow] * (name in FURTHER_RUNAWAY))
        for name, source in RUNAWAY.items()
    ],
)
def test_a_runaway_template_costs_bounded_time_and_memory_of_its_process(source: str) -> None:
    """And nearly none of this one, which serves other requests meanwhile."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = psutil.Process().memory_info().rss
    started = time.process_time()
    with pytest.raises(BadChat, match=r"chat template (has|was stopped|refuses)"):
        TemplateProcess(cpu_seconds=0.3).render(source, {"messages": MESSAGES})
    assert time.process_time() - started < 0.3
    assert psutil.Process().memory_info().rss - used < 100 << 20
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 0.3 + 1.5  # and its start
    assert after.ru_maxrss << 10 < (1 << 30)


def test_a_process_that_was_stopped_is_replaced_and_ends_with_its_owner() -> None:
    templates = TemplateProcess(cpu_seconds=0.3)
    assert templates.render("{{ x }}", {"x": 1}) == "1"
    first = psutil.Process(templates.pid)
    with pytest.raises(BadTemplate, match="rendering takes more than 0.3 s"):
        templates.render(RUNAWAY["loops"], {})
    assert templates.render("{{ x }}", {"x": 2}) == "2"
    second = psutil.Process(templates.pid)
    second.kill()
    second.wait(10)
    assert templates.render("{{ x }}", {"x": 3}) == "3"
    third = psutil.Process(templates.pid)
    del templates
    assert not psutil.wait_procs([first, second, third], timeout=10)[1]


def test_the_process_ends_when_its_parent_is_killed() -> None:
    code = """
import sys
from crossover.models.text.template_process import (
    MAX_TEMPLATE_CHARACTERS,
    BadTemplate,
    TemplateProcess,
)
templates = TemplateProcess()
templates.render("x", {})
print(templates.pid, flush=True)
templates.render(sys.argv[1], {})
"""
    command = [sys.executable, "-c", code, RUNAWAY["loops"]]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    assert not psutil.wait_procs([child], timeout=60)[1]  # its limit of CPU time is 2 s


def test_a_template_that_is_too_slow_for_a_trial_is_not_tried_again() -> None:
    chat = Chat(RUNAWAY["loops"])
    chat.templates = TemplateProcess(cpu_seconds=0.3)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    chat.try_forms()
    for _ in range(10):
        with pytest.raises(BadChat, match="takes more than 0.3 s"):
            chat.render_chat(MESSAGES)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3 + 1.5


def test_what_a_template_cannot_do_is_the_callers_error() -> None:
    with pytest.raises(BadChat, match="compiled"):
        Chat("{% for %}").render_chat(MESSAGES)
    with pytest.raises(BadChat, match="messages"):
        Chat(CHATML).render_chat([{"role": "user"}])

"""Templates that mean harm end with an error that says which limit; all others render as they always did.

Nothing here is timed: without the limits, most of these would take hours or all of the memory.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from moeflux import FormatError, InputError
from moeflux.text import meter
from moeflux.text.template import MAX_BYTES, ChatTemplate
from text.test_template import ours

BIG = "{% set b = 'a' * 1000000 %}"
TIMES = "{% for i in range(99999) %}"
END = "{% endfor %}"
GROW = "{% set ns = namespace(s='<', n=9, l=[1]) %}{% for i in range(99) %}"
TWICE = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
OTHER = "[ns.x[0], ns.x[1]]"


def render(source, messages=({"role": "user", "content": "hi"},), **variables):
    return ChatTemplate({"default": source}, {}, "here").render(messages, **variables)


STEPS = [
    TIMES * 2 + END * 2,
    TIMES + "{% for j in range(99999) if j < 0 %}{% endfor %}" + END,
    TIMES * 2 + "{% continue %}" + END * 2,
    TIMES + "{% set x = 1 %}" * 2000 + END,
    "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "{% macro m() %}{% endmacro %}" + TIMES * 2 + "{{ m() }}" + END * 2,
    "{% macro m() %}{{ caller() }}{% endmacro %}" + TIMES * 2 + "{% call m() %}{% endcall %}" + END * 2,
    TIMES + "{% set x = cycler(*range(99999)) %}" + END,
    TIMES * 2 + "{{- ''|default('x')|first -}}" + END * 2,
    BIG + "{% set c = 'a' * 1000000 %}" + TIMES + "{% if b == c %}{% endif %}" + END,
    BIG + TIMES + "{% if 'b' in b %}{% endif %}" + END,
    BIG + TIMES + "{% if b is lower %}{% endif %}" + END,
    BIG + TIMES + "{% set x = b.find('aaab') %}" + END,
    BIG + TIMES + "{% set x = messages[b] %}" + END,
    *(TWICE + show for show in (
        "{{ ns.x }}", "{{ ns.x|tojson }}", "{{ ns.x|string }}", "{{ ns.x ~ '' }}", "{{ '%s' % ns.x }}",
        "{{ '{!r}'.format(ns.x) }}", f"{{{{ ns.x == {OTHER} }}}}", f"{{{{ ns.x is eq({OTHER}) }}}}",
        f"{{{{ ns.x in [{OTHER}] }}}}", f"{{{{ [ns.x].index({OTHER}) }}}}", f"{{{{ [ns.x, {OTHER}]|sort }}}}",
        "{% for i in [1, 2] %}{{ loop.changed([ns.x, i]) }}{% endfor %}", "{{ raise_exception(ns.x) }}",
    )),
]  # fmt: skip
BYTES = [
    "{{ 'a' * 10**9 }}", "{{ 10**9 * 'a' }}", "{{ [1] * 10**9 }}", "{{ ('a'|safe) * 10**9 }}", "{{ true * 'a' * 10**9 }}",
    GROW + "{% set ns.s = ns.s + ns.s %}" + END,
    GROW + "{% set ns.s = ns.s ~ ns.s %}" + END,
    GROW + "{% set ns.l = ns.l + ns.l %}" + END,
    GROW + "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}" + END,
    GROW + "{% set ns.s = (''|safe) + (ns.s|string) + ns.s %}" + END,
    "{% autoescape true %}" + GROW + "{% set ns.s = 'x' ~ ns.s ~ ns.s %}" + END + "{% endautoescape %}",
    "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + GROW + "{% set ns.s = m(ns.s) %}" + END,
    "{{ 'a'.center(10**9) }}", "{{ 'a'.ljust(10**9) }}", "{{ 'a'.rjust(10**9) }}", "{{ 'a'.zfill(10**9) }}",
    "{{ 'a'|center(10**9) }}", "{{ 'a'|center(999999999) }}", "{{ ['a']|map('center', 10**9)|list }}",
    r"{{ '\t'.expandtabs(10**9) }}", r"{{ 'a\nb'|indent(10**9) }}", r"{{ ('a\n' * 10000)|indent(100000) }}",
    BIG + "{{ b.replace('a', b) }}", BIG + "{{ b|replace('a', b) }}", BIG + "{{ b.replace('', b) }}",
    BIG + "{{ b.join(b) }}", BIG + "{{ b|join(b) }}", BIG + "{{ b.join(range(9999)|map('string')) }}",
    BIG + "{{ (b|safe).join(b) }}", "{{ ('a ' * 4000000).split()|length }}", "{{ ('a' * 4000000)|list|length }}",
    TIMES + "{% set x = ('a,' * 10000).split(',') %}" + END, TIMES + "{% set x = ('a' * 100000)|list %}" + END,
    BIG + "{% set ns = namespace(x=[]) %}" + TIMES + "{% set ns.x = [ns.x, b[1:]] %}" + END,
    BIG + "{% set ns = namespace(x=[]) %}" + TIMES + "{% set ns.x = [ns.x, b|upper] %}" + END,
    BIG + TIMES + "{% set x = b|float %}" + END,
    TIMES + "{% set x = dict.fromkeys(range(99999)) %}" + END,
    TIMES + "{% set x = range(99999)|list|sort %}" + END,
    "{{ ('%(a)s' * 10000) % {'a': 'x' * 100000} }}", "{{ ('{0}' * 10000).format('x' * 100000) }}",
]  # fmt: skip
REFUSED = [
    ("{{ 9 ** (9 ** 8) }}", "4096 bits"),
    (GROW + "{% set ns.n = ns.n * ns.n %}" + END, "4096 bits"),
    ("{{ '%1000000000d' % 1 }}", "wider"),
    ("{{ '%.1000000000f' % 1 }}", "wider"),
    ("{{ '%*d' % (1000000000, 1) }}", "width"),
    ("{{ '%1000000000d'|format(1) }}", "wider"),
    ("{{ ('%1000000000d'|safe) % 1 }}", "wider"),
    ("{{ '{:1000000000}'.format(1) }}", "wider"),
    ("{{ '{:{}}'.format(1, 1000000000) }}", "wider"),
    ("{{ ('{:1000000000}'|safe).format(1) }}", "wider"),
    ("{{ [[1]]|tojson(indent=1000000000) }}", "indent"),
    ("{{ [1, 2]|tojson(separators=('x' * 1000, ':')) }}", "separator"),
    ("{{ 1.5|round(1000000000, 'ceil') }}", "precision"),
    ("{{ [[1], [2]]|sum(start=[]) }}", "sum"),
    ("{{ strftime_now('%Y' * 1000) }}", "date"),
    (GROW + "{% for j in range(9) %}{% set ns.l = [ns.l] %}{% endfor %}" + END + "{{ ns.l|tojson }}", "200 levels"),
    (TIMES + "{{ 'a' * 1000 }}" + END, "characters of output"),
    (TIMES + "a" * 10000 + END, "characters of output"),
]
HARMFUL = [*((s, "steps") for s in STEPS), *((s, "bytes of values|steps") for s in BYTES), *REFUSED]


@pytest.mark.parametrize(("source", "words"), HARMFUL, ids=lambda value: value[-60:])
def test_limits(source, words):
    with pytest.raises(FormatError, match=f"^here: the chat template does more than it may: .*({words})"):
        render(source)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}", "Recursion"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "Recursion"),
        ("{% for x in [1] recursive %}{{ loop([1]) }}{{ loop([1]) }}{% endfor %}", "Recursion"),
        ("{{ 'a'.translate({97: 'b'}) }}", "translate cannot be called"),
        ("{{ 'a'.encode() }}", "encode cannot be called"),
        ("{{ (1).to_bytes(10**9, 'big') }}", "to_bytes cannot be called"),
        ("{{ '{a}'.format_map({'a': 1}) }}", "format_map cannot be called"),
        ("{{ lipsum(n=100000) }}", "lipsum"),
        ("{{ raise_exception('a' * 100000) }}", "^.{900,1200}$"),
    ],
)
def test_what_fails(source, words):
    with pytest.raises(InputError, match=words):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in [1] %}" * 25 + END * 25, "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", "{{ 1" + "+1" * 20000 + " }}",
        "{{ " + "[" * 5000 + "]" * 5000 + " }}", "{% if a %}" * 3000 + "{% endif %}" * 3000, "{{ a+1 }}" * 14000,
        "x" * (MAX_BYTES + 1), "{{ 'a'|urlize }}",
    ],
    ids=lambda value: value[:20],
)  # fmt: skip
def test_what_is_not_compiled(source):
    with pytest.raises(FormatError, match="chat template"):
        render(source)


def test_memory_stays_small():
    """In a process of its own that may not have more than one GiB."""
    code = (
        "import resource, sys, json; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n"
        "from moeflux.core.errors import MoefluxError\n"
        "from moeflux.text.template import ChatTemplate\n"
        "for source in json.load(sys.stdin):\n"
        "    try: ChatTemplate({'default': source}, {}, 'here').render([{'role': 'user', 'content': 'hi'}])\n"
        "    except MoefluxError: continue\n"
        "    raise SystemExit(source)\n"
    )
    sources = json.dumps([*BYTES, *STEPS[-4:], *(source for source, _ in REFUSED)])
    done = subprocess.run([sys.executable, "-c", code], input=sources, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


ORDINARY = [
    "{{ 2 ** 10 }} {{ 'ab' * 3 }} {{ [1] * 2 + [2] }} {{ '%s-%03d' % ('a', 7) }} {{ 7 % 4 }} {{ 1 + 0.5 }}",
    "{{ 'a' ~ 1 ~ none ~ [1] }}{{ 'x'|center(5) }}|{{ '{:>4}|{a}'.format(1, a=2) }}",
    "{% for i in range(5) if i % 2 %}{{ loop.index }}{{ loop.last }}{{ i }}{% else %}none{% endfor %}",
    "{% for k, v in {'a': 1, 'b': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}{{ [3, 1]|sort|join(',') }}",
    "{{ ['a', 'b']|map('upper')|list }}{{ [1, 2, 3]|select('odd')|join }}{{ [{'a': 1}]|selectattr('a')|list|length }}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ m(1) }}{% call m(3) %}x{% endcall %}",
    "{% for x in [[1, [2]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
    "{{ 'a b c'.split() }}{{ 'a-b'.split('-', 1) }}{{ 'x'.join(['a', 'b']) }}{{ 'aXb'.replace('X', '--') }}",
    "{{ 1 < 2 <= 3 }}{{ 'a' in 'abc' }}{{ 'z' not in {'a': 1} }}{{ 3 is in [1, 3] }}{{ messages[::-1]|length }}",
    "{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}abc{% endfilter %}{% with y = 2 %}{{ y }}{% endwith %}",
    "{{ {'a': [1, {'b': 'é'}]}|tojson(indent=2) }}{{ '<&>'|e }}{{ 'a\nb'|indent(2) }}{{ 1.256|round(2) }}",
    "{{ messages|map(attribute='role')|unique|list }}{{ dict(a=1)|items|list }}{{ namespace(a=1).a }}",
    "{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}{{ loop.length }}{% endfor %}",
    "{% block a %}x{% endblock %}{{ self.a() }}{% autoescape true %}{{ '<' ~ '>' }}{{ '<'|safe }}{% endautoescape %}",
]


@pytest.mark.parametrize("source", ORDINARY, ids=range(len(ORDINARY)))
def test_what_templates_do_is_as_before(source):
    """As jinja2's own sandbox renders it, with the options of chat templates."""
    chat_templates = pytest.importorskip("transformers.utils.chat_template_utils")
    plain = chat_templates._compile_jinja_template(source)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert render(source, messages) == plain.render(messages=messages)


@pytest.mark.parametrize("name", ["chatml", "thinking"])
def test_long_conversations_stay_far_below_the_limits(name, monkeypatch):
    """Thousands of messages, megabytes of text: with a quarter of what is allowed."""
    for limit in ("WORK", "WORK_PER_VALUE", "MEMORY", "MEMORY_PER_BYTE", "OUTPUT", "OUTPUT_PER_BYTE"):
        monkeypatch.setattr(meter, limit, getattr(meter, limit) // 4)
    chat, reference = ours(name)
    call = {"type": "function", "function": {"name": "look", "arguments": {"city": "Köln" * 50}}}
    turns = [
        {"role": "user", "content": "漢字 and more " * 50},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n" + "yes, é " * 100, "tool_calls": [call]},
        {"role": "tool", "content": "x" * 1000},
    ]
    messages = [dict(turn) for _ in range(700) for turn in turns]
    messages.append({"role": "user", "content": "a long document 🙂 " * 50_000})
    wanted = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.template.render(messages) == wanted

"""Chat templates: what transformers makes of the same folders, and what a stranger's may not do."""

import datetime
import json
from pathlib import Path

import pytest

from eagle3_jax import templates
from eagle3_jax.contracts import LoadError, RequestError
from eagle3_jax.templates import check_template, render
from eagle3_jax.tokenizer import Tokenizer, read_tokenizer

GOLDEN = json.loads((Path(__file__).parent / "golden" / "templates.json").read_text())
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(params=sorted(GOLDEN["cases"]))
def case(request, tmp_path, monkeypatch) -> tuple[Tokenizer, dict]:
    """A folder's tokenizer and what transformers made of it, at the same moment."""

    class Then(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromisoformat(GOLDEN["now"])

    monkeypatch.setattr(templates.datetime, "datetime", Then)
    wanted = GOLDEN["cases"][request.param]
    files = {"tokenizer.json": GOLDEN["tokenizer.json"], **wanted["files"]}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    tokenizer, _ = read_tokenizer(tmp_path)
    assert tokenizer is not None
    return tokenizer, wanted


def test_texts_and_ids_are_those_of_transformers(case):
    tokenizer, wanted = case
    rendered = set()
    for chat in wanted["chats"]:
        messages, prompt = (
            GOLDEN["conversations"][chat["conversation"]],
            chat["add_generation_prompt"],
        )
        assert tokenizer.render(messages, prompt) == chat["text"]
        assert tokenizer.chat(messages, prompt) == chat["ids"]
        rendered.add(chat["conversation"])
    for name in GOLDEN["conversations"].keys() - rendered:
        with pytest.raises(RequestError, match="template refused the messages"):
            tokenizer.chat(GOLDEN["conversations"][name])


def test_plain_text_is_that_of_transformers(case):
    tokenizer, wanted = case
    assert tokenizer.encode(GOLDEN["plain"], special=True) == wanted["plain"]


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(a='x') %}{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}"
BRANCHING = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('only\n two') }}", "only two"),
        ("{{ a.b.c }}", "'a' is undefined"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ range(10**9) }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        (DOUBLING + "{% endfor %}", "+ would give 1024 characters"),
        ("{{ 'a' * 10**10 }}", "* would give 10000000000 characters"),
        ("{{ 10**10 * [1] }}", "* would give 10000000000 characters"),
        ("{{ 10 ** 9999999999 }}", "** would give"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "'__class__' of 'str' object is unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(content='x') }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
)
def test_what_a_template_may_not_do(monkeypatch, template, said):
    monkeypatch.setattr(templates, "MOST", 1000)
    messages = [dict(MESSAGES[0])]
    with pytest.raises(RequestError) as caught:
        render(template, messages, True, {})
    message = str(caught.value)
    assert message.startswith("the chat template refused the messages: ") and "\n" not in message
    assert said in message and messages == MESSAGES


@pytest.mark.parametrize("template", [ENDLESS, BRANCHING + "{{ f(99) }}"])
def test_a_template_without_end_is_stopped(monkeypatch, template):
    monkeypatch.setattr(templates, "SECONDS", 0.1)
    with pytest.raises(RequestError, match="it does not end within 0.1 seconds"):
        render(template, MESSAGES, True, {})


def test_ordinary_sums_and_products_are_left_alone():
    template = (
        "{{ 1 + 2.5 }} {{ 'a' + 'b' }} {{ [1] + [2] }} {{ 2 * 'ab' }} {{ 3 * 4 }} {{ 2 ** 5 }}"
    )
    assert render(template, MESSAGES, True, {}) == "3.5 ab [1, 2] abab 12 32"


def test_what_is_none_counts_as_absent():
    messages = [{**MESSAGES[0], "tool_calls": None}]
    template = "{{ 'tool_calls' in messages[0] }} {{ tools is none }} {{ bos_token }}"
    assert render(template, messages, True, {"bos_token": "<s>"}) == "False True <s>"


def test_a_template_that_is_none_is_named():
    check_template("{% generation %}x{% endgeneration %}", "a.jinja")
    with pytest.raises(LoadError, match="^a.jinja holds no chat template: Unexpected end"):
        check_template("{% generation %}x", "a.jinja")

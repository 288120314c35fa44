"""Chat templates: rendered as transformers renders them, in a sandbox and for a limited time.

They come with downloaded models, so they are treated as a stranger's code: no attribute of Python's
own, no change to what they are given, no endless loop and no text of any length.
"""

import datetime
import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from checkpoints.tensors import one_line
from eagle3_jax.contracts import LoadError, RequestError

SECONDS = 5.0
"""Of this thread's own time; a template that takes more has no end, real ones take milliseconds."""

MOST = 1 << 24
"""Characters, items or bits that one operation of a template may give."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Sums, products and powers are measured before they are computed: one can fill a memory."""

    intercepted_binops = frozenset(["+", "*", "**"])

    def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
        """The sum, product or power of two values.

        Raises:
            OverflowError: it would be too large.
        """
        size = _size(left) + _size(right)
        if operator == "**" and isinstance(right, int):
            size = _size(left) * abs(right)
        elif operator == "*" and isinstance(left, int) != isinstance(right, int):
            size = _size(right) * abs(left) if isinstance(left, int) else _size(left) * abs(right)
        if size > MOST:
            raise OverflowError(f"{operator} would give {size} characters, items or bits")
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> int:
    """Characters or items of a value, bits of a whole number."""
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if hasattr(value, "__len__") else 0


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, for training; it prints what it holds."""

    tags = {"generation"}

    def parse(self, parser) -> nodes.Node:
        """The statements up to `{% endgeneration %}`, as they are."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.cache
def _compiled(template: str) -> jinja2.Template:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment.from_string(template)


def check_template(template: str, source: str) -> None:
    """Refuse a template that is none.

    Args:
        template: its text.
        source: the file it is from, for the message.

    Raises:
        LoadError: it cannot be compiled.
    """
    try:
        _compiled(template)
    except Exception as error:
        raise LoadError(f"{source} holds no chat template: {one_line(error)}") from None


def render(
    template: str,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool,
    special: dict[str, str],
) -> str:
    """The text of a conversation.

    Args:
        template: a jinja2 template as models bring it.
        messages: each a `role` and a `content`, and whatever else the template reads; what is None
            counts as absent.
        add_generation_prompt: end with what makes the model answer.
        special: special tokens by name.

    Raises:
        RequestError: the template refuses the messages, is damaged, or does not end.
    """
    messages = [{k: v for k, v in each.items() if v is not None} for each in messages]
    given = {**special, "messages": messages, "add_generation_prompt": add_generation_prompt}
    given |= {"tools": None, "documents": None}
    try:
        compiled = _compiled(template)
        return _timed(lambda: compiled.render(given))
    except Exception as error:
        raise RequestError(f"the chat template refused the messages: {one_line(error)}") from None


def _timed[T](call: Callable[[], T]) -> T:
    """What a call gives, if it does within `SECONDS`; every line of Python in it looks.

    Raises:
        TimeoutError: it took longer.
    """
    end = time.thread_time() + SECONDS

    def look(frame, event, argument):
        if time.thread_time() > end:
            raise TimeoutError(f"it does not end within {SECONDS:g} seconds")
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        return call()
    finally:
        sys.settrace(before)

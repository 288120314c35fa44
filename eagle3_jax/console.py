"""What the command line shows: text with its tokens told apart, tables, progress."""

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from eagle3_jax.generation import Piece, Row, Stats
from eagle3_jax.tokenizer import Tokenizer

PROMPT_LINES = 40
"""Lines of a prompt that are shown; of a longer one the last."""


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, where that is a terminal.

    Yields:
        A function of how much is done and how much there is in all.
    """
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = not sys.stderr.isatty()
    # Refreshed seldom: it shares the processor with what is being timed.
    with Progress(
        *columns, console=console, transient=True, disable=hidden, refresh_per_second=2
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def pieces(
    row: Row, tokenizer: Tokenizer | None, first: int = 0, whole: bool = True
) -> list[tuple[str, bool]]:
    """A row's new text in runs of tokens alike: the text, and whether it was drafted.

    A character whose bytes come from two runs goes to the second.

    Args:
        row: its tokens, and which were drafted.
        tokenizer: None shows token ids.
        first: token to begin with.
        whole: the text ends with the row; else a character that it breaks off in is left out.
    """
    if tokenizer is None:
        marks = zip(row.tokens[first:], row.drafted[first:], strict=True)
        return [(f"{token} ", drafted) for token, drafted in marks]
    out, end = [], len(row.drafted)
    shown = tokenizer.decode(row.tokens[:first]).rstrip("\N{REPLACEMENT CHARACTER}")
    for i, drafted in enumerate(row.drafted[first:], first + 1):
        if i < end and row.drafted[i] == drafted:
            continue
        text = tokenizer.decode(row.tokens[:i])
        if i < end or not whole:
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        out.append((text[len(shown) :], drafted))
        shown = text
    return out


class Answer:
    """A prompt and its new text, accepted and bonus tokens told apart.

    By colour on a terminal that has it; otherwise accepted drafts stand in angle quotes, line by
    line and without the white space around them.
    """

    def __init__(
        self,
        prompt: str,
        runs: Sequence[tuple[str, bool]],
        title: str = "",
        legend: bool = True,
    ):
        lines = prompt.splitlines(keepends=True)
        self.left_out = max(len(lines) - PROMPT_LINES, 0)
        self.prompt = "".join(lines[self.left_out :])
        self.runs, self.title, self.legend = runs, title, legend

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        text = Text(no_wrap=True, overflow="ignore", end="\n\n")
        for part, style in self._parts(self.runs, _coloured(console)):
            text.append(part, style)
        yield text

    def live(self, console: Console, found: Iterable[Piece], tokenizer: Tokenizer | None) -> None:
        """Print the answer while its pieces come."""
        row, left = Row([], [], None, 0, ()), []

        def runs() -> Iterator[tuple[str, bool]]:
            for piece in found:
                first = len(row.tokens)
                row.tokens.extend(piece.tokens)
                row.drafted.extend(piece.drafted)
                left.extend(pieces(row, tokenizer, first, piece.done))
                room = len(piece.text)
                while room and left:
                    run, drafted = left.pop(0)
                    if run[room:]:
                        left.insert(0, (run[room:], drafted))
                    yield run[:room], drafted
                    room -= len(run[:room])

        for part, style in self._parts(runs(), _coloured(console)):
            console.out(part, style=style, end="", highlight=False)
        console.out("\n")

    def _parts(
        self, runs: Iterable[tuple[str, bool]], coloured: bool
    ) -> Iterator[tuple[str, str | None]]:
        """Text and style of all that is shown."""
        if self.title:
            yield f"{self.title}\n", "bold"
        if self.left_out:
            yield f"[{self.left_out} lines above]\n", "dim"
        if coloured:
            yield self.prompt, "dim"
            for run, drafted in runs:
                yield run, "green" if drafted else "bold"
            if self.legend:
                yield "\n\nprompt", "dim"
                yield "  ", None
                yield "accepted drafts", "green"
                yield "  ", None
                yield "the verifier's own tokens", "bold"
        else:
            yield f"{self.prompt}\n\n-- new text; ‹accepted drafts›, the verifier's own --\n", None
            for run, drafted in runs:
                yield re.sub(r"\S(?:.*\S)?", r"‹\g<0>›", run) if drafted else run, None


def _coloured(console: Console) -> bool:
    has = console.is_terminal and console.color_system is not None
    return has and not console.no_color


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ignore")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values) or "-"


def decode_table(ways: Mapping[str, tuple[Stats, str]], notes: Sequence[str]) -> RenderableType:
    """Figures of one or two ways of decoding side by side.

    Args:
        ways: by what they are called; stats and dtype.
        notes: lines below.
    """
    table = _table("", *ways)
    columns = [stats for stats, _ in ways.values()]
    table.add_row("new tokens", *(f"{s.new_tokens}" for s in columns))
    table.add_row("accept length", *(f"{s.accept_length:.2f}" for s in columns))
    table.add_row("acceptance by depth", *(_shares(s.acceptance_by_depth) for s in columns))
    table.add_row("tokens a second", *(f"{s.tokens_per_second:.1f}" for s in columns))
    table.add_row("dtype", *(dtype for _, dtype in ways.values()))
    return Group(table, *map(_line, notes))


EVAL_COLUMNS = {
    "accept_length": ("accept length", ".2f"),
    "break_even_accept_length": ("break-even", ".2f"),
    "acceptance_by_depth": ("acceptance by depth", ""),
    "tokens_per_second": ("tokens/s", ".1f"),
    "plain_tokens_per_second": ("plain", ".1f"),
    "speedup": ("speedup", ".2f"),
    "same_dtype_speedup": ("in one dtype", ".2f"),
}
"""Figures of an evaluation that are shown where they are there: heading and format."""


def eval_table(drafters: Mapping[str, Mapping[str, Any]], notes: Sequence[str]) -> RenderableType:
    """Figures of an evaluation by drafter and set.

    Args:
        drafters: by name, `sets` and `mean` of each.
        notes: lines below.
    """
    out: list[RenderableType] = []
    for name, found in drafters.items():
        columns = {key: how for key, how in EVAL_COLUMNS.items() if key in found["mean"]}
        table = _table("set", *(head for head, _ in columns.values()))
        for label, figures in {**found["sets"], "mean": found["mean"]}.items():
            if label == "mean":
                table.add_section()
            cells = [
                format(figures[key], how) if how else _shares(figures[key])
                for key, (_, how) in columns.items()
            ]
            table.add_row(Text(label), *cells)
        out += [_line(f"drafter {name}", "bold"), table]
    return Group(*out, *map(_line, notes))


def fields(found: Mapping[str, Any]) -> RenderableType:
    """A JSON object as lines of name and value, nested names joined by dots."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _flat(found):
        table.add_row(Text(name), Text(value))
    return table


def _flat(found: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in found.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _said(value)


def _said(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return " ".join(_said(item) for item in value) or "-"
    return str(value)

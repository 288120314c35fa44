"""The command line: `eagle3 VERB` and `python -m eagle3_jax VERB`.

Here is what all verbs share: parsing, one line for every error, JSON or text on standard output.
"""

import contextlib
import difflib
import io
import json
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import tyro
from rich.console import Console
from rich.text import Text

import eagle3_jax
from eagle3_jax.contracts import Eagle3Error, RequestError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: its words, without the program's name; None is the process's own.

    Returns:
        The exit status: 0, 2 after bad input (one line on standard error), 130 after an interrupt.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            _run(words)
    except SystemExit as stop:  # --help
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        return _fail("interrupted", status=130)
    except (Eagle3Error, _ForeignPackage) as error:
        return _fail(str(error))
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _fail(f"{place}{error.strerror or error}")
    return 0


class _ForeignPackage(Exception):
    """Another package stands where one of ours should."""


def _run(words: list[str]) -> None:
    try:
        eagle3_jax.check_packages()
    except ImportError as error:
        raise _ForeignPackage(error) from None
    # The verbs import `checkpoints`, which is known to be ours only now.
    from eagle3_jax.verbs import VERBS
    from sharding.processes import is_first, only_python_prints, together

    command = parse(words, VERBS)
    with together():
        if command.json:
            with contextlib.redirect_stdout(sys.stderr), only_python_prints():
                found, _ = command.execute()
        else:
            found, shown = command.execute()
    if not is_first():
        return
    if command.json:
        print(json.dumps(found))
    else:
        Console(highlight=False).print(shown, crop=False)


def _fail(message: str, status: int = 2) -> int:
    print("eagle3: error:", " ".join(message.split()), file=sys.stderr)
    return status


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    from sharding.processes import is_first

    if not is_first():
        return
    print("eagle3: warning:", " ".join(str(message).split()), file=sys.stderr)


def parse(words: list[str], verbs: dict[str, type]) -> Any:
    """The command that some words mean: an instance of one of the verbs' dataclasses.

    Raises:
        RequestError: there is no such verb or flag, or a value does not fit; says what would be
            near.
        SystemExit: help was asked for and has been printed.
    """
    known = f"expected one of {', '.join(verbs)}"
    if not words:
        raise RequestError(f"no verb was given; {known}")
    if not words[0].startswith("-") and words[0] not in verbs:
        near = difflib.get_close_matches(words[0], verbs, n=1)
        hint = f"did you mean {near[0]}?" if near else known
        raise RequestError(f"there is no verb {words[0]!r}; {hint}")
    with contextlib.redirect_stderr(io.StringIO()) as box:
        try:
            return tyro.extras.subcommand_cli_from_dict(
                verbs,
                prog="eagle3",
                description="EAGLE-3 speculative decoding in JAX.",
                args=words,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
        except SystemExit as stop:
            if not stop.code:
                raise
            # A setting that its own dataclass refused has said why better than the box does.
            cause = stop.__context__
            while cause is not None and not isinstance(cause, Eagle3Error):
                cause = cause.__context__
            raise cause or RequestError(_one_line(box.getvalue())) from None


def _one_line(box: str) -> str:
    """The message in tyro's box of a parse error: what was wrong, and flags like it."""
    parts: list[list[str]] = [[]]
    for row in Text.from_ansi(box).plain.splitlines():
        inner = row.strip(" │")
        if not inner or inner.startswith(("╭", "╰")):
            continue
        if inner.strip("─-"):
            parts[-1].append(inner)
        else:
            parts.append([])
    if "╭" not in box:  # no UTF-8: the title is not in the border, but a part of its own
        parts = parts[1:]
    out = []
    for part in parts:
        head = part[0] if part else ""
        flags = [row.split()[0] for row in part[1:] if row.startswith("--")]
        if flags and head.startswith(("Perhaps you meant", "Arguments similar to")):
            out.append(f"did you mean {flags[0]}?")
        elif flags and head.startswith("Missing from"):
            out.append(f"{head.removeprefix('Missing from ')} {' and '.join(flags)} must be given")
        elif head and not head.startswith(("Argument helptext", "For full helptext")):
            out.append(" ".join(part))
    return "; ".join(out)

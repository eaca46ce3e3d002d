"""The entry point: verbs, and one place where errors become one line and an exit code.

Exit codes: 0 done; 1 it failed; 2 the command was typed or configured wrongly; 130 and 143 a
signal ended it (128 + its number, as shells count).
"""

from __future__ import annotations

import signal
import sys
import warnings
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

import forebay
from forebay.cli.bench import bench
from forebay.cli.export import export
from forebay.cli.inspect import inspect
from forebay.cli.plan import plan
from forebay.cli.probe import probe
from forebay.cli.train import train
from forebay.errors import ConfigError, ForebayError, ForebayWarning, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

__all__ = ["app", "main"]

_FAILED: Final = 1
_MISUSED: Final = 2


class _Verbs(TyperGroup):
    """Hears of a KeyboardInterrupt itself: typer makes an exit code of it and says nothing."""

    def invoke(self, ctx: Any) -> Any:
        """Run a verb; returns its exit code."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            return _interrupted(error)


app = typer.Typer(
    name="forebay",
    cls=_Verbs,
    help="Train PyTorch models whose state does not fit in accelerator memory.",
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help: tables of 80 columns would cut the names of options short.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="train")(train)
app.command(name="export")(export)
app.command(name="inspect")(inspect)
app.command(name="plan")(plan)
app.command(name="probe")(probe)
app.add_typer(bench)


def _print_version(*, asked: bool) -> None:
    if asked:
        typer.echo(forebay.__version__)
        raise typer.Exit


@app.callback()
def _global(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version.",
            is_eager=True,
            callback=lambda value: _print_version(asked=value),
        ),
    ] = False,
) -> None:
    del version


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Words after the program's name; None takes the process's own.

    Returns:
        The exit code.

    Example:
        >>> main(["--version"])  # doctest: +SKIP
        0
    """
    words = _with_auto(sys.argv[1:] if arguments is None else arguments)
    if not words:
        app(args=["--help"], prog_name="forebay", standalone_mode=False)
        return _MISUSED
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = app(args=words, prog_name="forebay", standalone_mode=False)
    except ForebayError as error:
        _say("error", error.message, error.hint)
        misused = isinstance(error, ConfigError | UnsupportedError)
        return _MISUSED if misused else _FAILED
    except _usage_errors() as error:
        known = {command.name for command in app.registered_commands}
        verb = f" {words[0]}" if words[0] in known else ""
        _say("error", str(error.format_message()), f"forebay{verb} --help")
        return _MISUSED
    return code if isinstance(code, int) else 0


def _interrupted(error: KeyboardInterrupt) -> int:
    number = signal.Signals(getattr(error, "signum", signal.SIGINT))
    when = " before the first step; nothing was trained" if hasattr(error, "signum") else ""
    _say("ended", f"{number.name}{when}")
    return 128 + int(number)


def _with_auto(words: Sequence[str]) -> list[str]:
    """`--resume` alone means `--resume auto`, which typer's options cannot say."""
    found: list[str] = []
    for place, word in enumerate(words):
        found.append(word)
        following = words[place + 1] if place + 1 < len(words) else "--"
        if word == "--resume" and following.startswith("-"):
            found.append("auto")
    return found


def _usage_errors() -> Any:
    """The class of typer's usage errors: its own, or click's before typer brought it along."""
    own = getattr(typer, "TyperException", None)
    if own is not None:
        return own
    import click

    return click.ClickException


def _say(kind: str, message: str, hint: str | None = None) -> None:
    """One line, and one for the hint; a message of several lines is a list of findings."""
    typer.echo(f"{kind}: {message}", err=True)
    if hint:
        typer.echo(f"hint: {hint}", err=True)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Shows forebay's warnings as a line; those of libraries as Python does."""
    if issubclass(category, ForebayWarning):
        typer.echo(f"warning: {message}", err=True)
        return
    text = warnings.formatwarning(message, category, filename, lineno, line)
    (file or sys.stderr).write(text)

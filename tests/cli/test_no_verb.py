"""`forebay` alone teaches."""

from __future__ import annotations

from forebay.cli.main import main


def test_help_is_shown_and_the_exit_code_is_that_of_misuse(capsys):
    assert main([]) == 2
    shown = capsys.readouterr()
    assert "train" in shown.out + shown.err

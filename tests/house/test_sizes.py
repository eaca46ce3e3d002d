"""No file over 400 lines, no function over 60: what does not fit has more than one noun."""

from __future__ import annotations

from house.tree import NATIVE_SUFFIXES, files, native_functions, python_functions, relative

FILE_LINES = 400
FUNCTION_LINES = 60


def test_files_are_short() -> None:
    """Counts every line, comments and blank ones too."""
    long = {
        relative(path): count
        for path in files(".py", *NATIVE_SUFFIXES)
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > FILE_LINES
    }
    assert not long


def test_python_functions_are_short() -> None:
    """Counts from `def` to the last line; a docstring may be as long as its arguments need."""
    functions = [function for path in files(".py") for function in python_functions(path)]
    assert functions, "found no function at all: the test looks in the wrong place"
    assert not [function for function in functions if function.lines > FUNCTION_LINES]


def test_native_functions_are_short() -> None:
    """Counts top-level functions as clang-format lays them out."""
    functions = [
        function for path in files(*NATIVE_SUFFIXES) for function in native_functions(path)
    ]
    assert not [function for function in functions if function.lines > FUNCTION_LINES]

"""The demo in small: what it writes, that losses match bit for bit, that it ends in a sample.

Whether the full demo learns more than byte pairs takes minutes; `make demo` itself checks that.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

_DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"
_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The demo's module with a model, a context and a library of a tenth of their size."""
    spec = importlib.util.spec_from_file_location("demo", _DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    library = tmp_path / "library"
    small = {"stdlib": str(library)}
    library.mkdir()
    taken = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        (library / path.name).write_bytes(path.read_bytes())
        taken += path.stat().st_size
        if taken > 1_200_000:
            break
    real = sysconfig.get_paths
    monkeypatch.setattr(
        sysconfig, "get_paths", lambda *names, **more: {**real(*names, **more), **small}
    )
    monkeypatch.setattr(module, "MODEL", {**module.MODEL, **_SMALL})
    monkeypatch.setattr(module, "SEQUENCE_LENGTH", 32)
    return module


def test_demo_in_small(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Every part of the demo runs; only the bar of byte pairs is left out."""
    monkeypatch.setattr(demo, "beats_byte_pairs", lambda loss, entropy: loss < 6 > entropy.order1)
    arguments = ["--output", str(tmp_path / "run"), "--steps", "4", "--compared", "3"]
    monkeypatch.setattr(sys, "argv", ["demo", *arguments, "--tokens", "8"])
    assert demo.main() == 0
    shown = capsys.readouterr().out
    assert "the same, bit for bit" in shown
    assert "def " in shown

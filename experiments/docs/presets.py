"""`python experiments/docs/presets.py`: write the signatures of methods as Python calls, kvq/methods/__init__.pyi."""

from __future__ import annotations

from pathlib import Path

from kvq.methods import presets

FILE = Path(presets.__file__).with_name("__init__.pyi")

if __name__ == "__main__":
    FILE.write_text(presets.stub(), encoding="utf-8")

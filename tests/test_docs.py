"""The documentation's examples run as they stand."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from kvq.config import compose, resolve
from kvq.methods.build import build_method

ROOT = Path(__file__).parents[1]
NAMED_BLOCK = re.compile(r"`my_methods/([\w/.]+)`:\n\n```(?:yaml|python)\n(.*?)```", re.S)
PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.S)


@pytest.fixture
def my_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of docs/add_a_method.md, written where the page says."""
    text = (ROOT / "docs" / "add_a_method.md").read_text(encoding="utf-8")
    files = NAMED_BLOCK.findall(text)
    assert [name for name, _ in files] == ["method/rotated_norm.yaml", "channel_scale.py", "method/channel_scaled.yaml"]
    for name, content in files:
        path = tmp_path / "my_methods" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "my_methods")
    monkeypatch.delitem(sys.modules, "channel_scale", raising=False)
    return tmp_path / "my_methods"


def test_the_worked_example_runs(my_methods: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "add_a_method.md").read_text(encoding="utf-8")
    example = PYTHON_BLOCK.findall(text)[-1]
    exec(compile(example, "add_a_method.md", "exec"), {})
    bits, error = map(float, re.findall(r"[\d.]+", capsys.readouterr().out)[:2])
    # 3-bit codes, one fp16 scale per token of 128 channels, one fp16 scale per channel of 256 tokens.
    assert bits == pytest.approx(3 + 16 / 128 + 16 / 256, abs=1e-3)
    assert 0.05 < error < 0.6


def test_the_yaml_only_method_quantizes(my_methods: Path) -> None:
    x = torch.randn(1, 2, 128, 128, generator=torch.Generator().manual_seed(0))
    errors = []
    for bits in (2, 4, 8):
        method = build_method("rotated_norm", bits=bits, config_dir=my_methods)
        assert method.key is not None
        packed = method.key.encode(x)
        # The gain folds into the token norm: codes, two statistics per 64 channels, one norm.
        assert packed.bits_per_element == bits + 32 / 64 + 16 / 128
        errors.append(float((method.key.decode(packed) - x).norm() / x.norm()))
    assert errors[0] > 3 * errors[1] > 9 * errors[2]


def test_the_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The first Python block of the README, with the model of the block after it left out."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    exec(compile(PYTHON_BLOCK.findall(text)[0], "README.md", "exec"), {})
    assert "bits" in capsys.readouterr().out


@pytest.mark.parametrize(
    "page", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"], ids=lambda page: page.name
)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for name in re.findall(r"`((?:kvq|conf|tests|docs|experiments)/[\w/.]+\.(?:py|yaml|md))`", text):
        assert (ROOT / name).exists(), name


def test_the_readme_shows_the_committed_tables() -> None:
    """Every number of the README's tables is that of results/tables; `python experiments/readme.py` puts them there."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    script = runpy.run_path(str(ROOT / "experiments" / "readme.py"))
    assert script["filled"](text) == text
    for place in script["PLACE"].finditer(text):
        rows = [[cell.strip() for cell in row.split("|")[1:3]] for row in place[5].splitlines()[3:]]
        assert {name for name, _ in rows} == set(place[3].split())
        assert {bits for _, bits in rows} == set(place[4].split())


def test_the_commands_for_an_8b_model_compose() -> None:
    text = (ROOT / "docs" / "first_8b_model.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    python run\.py (.*)$", text, re.M)
    assert len(commands) > 8
    seen: set[str] = set()
    for command in commands:
        overrides = OverridesParser.create().parse_overrides([word for word in shlex.split(command) if word != "-m"])
        for job in BasicSweeper.split_arguments(overrides, None)[0]:
            if seen >= set(job):  # each value once: composing takes a quarter of a second
                continue
            seen |= set(job)
            assert "8B" in resolve(compose(list(job))).model.path

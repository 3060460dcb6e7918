"""How many files a change to kvq touches: each is made in a copy, where it must work (docs/contributing.md)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("kvq", "conf", "plugins", "hydra_plugins", "tests", "run.py", "results/reference")

PRESET = """\
# {about}
name: {name}
note: Ours.
bits_range: [2, 8]
key: &codec
  _target_: kvq.codecs.Codec
  stages: {{}}
  order: []
  quantizer: {{_target_: {target}, bits: "${{kvbits:key}}"{settings}}}
value: *codec
residual: {{policy: block, size: 64}}
{more}"""
UNIFORM = {"target": "kvq.codecs.UniformQuantizer", "settings": ", axis: per_token"}
QUANTIZER = '''
from typing import ClassVar

from kvq.codecs.uniform import UniformQuantizer


class CoarseQuantizer(UniformQuantizer):
    """Round to nearest per token with one bit less than asked for."""

    version: ClassVar[int] = 1

    def __init__(self, bits: int) -> None:
        super().__init__(bits - 1, axis="per_token")
'''
ORACLE = """
import kvq


def test_it_is_round_to_nearest_with_a_bit_less() -> None:
    assert kvq.build_method("coarse", bits=4, head_dim=64).key.quantizer.bits == 3
"""
POLICY = '''
from typing import ClassVar

from kvq.methods.policies import Policy


class EveryOther(Policy):
    """Only every other layer is quantized."""

    version: ClassVar[int] = 1
    setting = "every_other"
    does = "quantizes every other layer"
    excludes = frozenset({"all_layers", "same_stages", "one_width"})

    def codec(self, codec, side, layer):
        return codec if layer % 2 else None
'''
TASK = '''"""`task=count`: the tokens that there are."""

from kvq.tasks.measurement import Measurement, Task

TASK = Task(
    lambda inputs, method: None,
    lambda inputs, method, baseline, journal: Measurement({"counted": 7.0}, {"counted": "tokens"}, []),
    lambda inputs: "seven",
)
'''
SETTINGS = '''@dataclass
class CountConfig(TaskConfig):
    """Nothing to set."""

    version: ClassVar[int] = 1
    name: str = "count"


SCHEMAS: dict'''
FIGURE = """

@register_figure("half-{run}", "Half of the perplexity on {model}", lambda runs, store: pd.DataFrame({"a": [1]}))
def _half(numbers: pd.DataFrame) -> Figure:
    return plt.figure()
"""

Edit = str | tuple[str, str] | Callable[[str], str]
"""The text of a new file; what is replaced by what; or a function of the whole text."""


@dataclass(frozen=True)
class Change:
    """What is written to which file, what shows that it works, and the most files that it may take."""

    files: Mapping[str, Edit]
    works: str
    most: int
    golden: str | None = None


def behind(more: str) -> Edit:
    return lambda text: text + more


def preset(name: str, **words: str) -> Mapping[str, Edit]:
    text = PRESET.format_map({"about": "Ours.", "name": name, "more": "", **UNIFORM, **words})
    return {f"conf/method/{name}.yaml": text}


RUN = "from kvq.runs import run\nfrom kvq.config import compose, resolve\n"
RUN += "record = lambda *words: run(resolve(compose([*words, 'results_dir=out', 'threads=1'])))\n"
CHANGES = {
    "a quantizer": Change(
        {
            "kvq/codecs/coarse.py": QUANTIZER,
            **preset("coarse", target="kvq.codecs.coarse.CoarseQuantizer", settings=""),
            "tests/codecs/test_coarse.py": ORACLE,
        },
        "import pytest; assert not pytest.main(['-q', '-p', 'no:cacheprovider', 'tests/codecs/test_coarse.py'])",
        4,
        "coarse",
    ),
    "a metric": Change(
        {
            "kvq/tasks/memory.py": (
                'found = {"total_bytes": float(total), ',
                'found = {"halved": total / 2, "total_bytes": float(total), ',
            ),
            "kvq/results/metrics.csv": behind("halved,bytes,Half of the bytes,Half,0,1,,lower,\n"),
        },
        f"{RUN}assert record('task=memory', 'model=tiny', 'task.lengths=[64]', 'method=kivi').metrics['halved_64'] > 0",
        2,
    ),
    "a task": Change(
        {
            "kvq/tasks/count.py": TASK,
            "kvq/config/tasks.py": lambda text: text.replace("SCHEMAS: dict", SETTINGS, 1).replace(
                '    "ppl": PplConfig,\n', '    "ppl": PplConfig,\n    "count": CountConfig,\n', 1
            ),
            "conf/task/count.yaml": "# Counts.\ndefaults: [count_schema, _self_]\nname: count\n",
            "kvq/results/metrics.csv": behind("counted,tokens,Tokens,Tokens,0,1,,,\n"),
        },
        f"{RUN}assert record('task=count', 'model=tiny', 'method=fp16').metrics['counted'] == 7",
        4,
    ),
    "a figure": Change(
        {"kvq/report/figures/loss.py": behind(FIGURE)},
        "from kvq.report.figures.every import kinds; assert any(kind.stem == 'half-{run}' for kind in kinds())",
        1,
    ),
    "a new kind of policy": Change(
        {
            "kvq/methods/every_other.py": POLICY,
            **preset("every_other", more="policies: {every_other: {_target_: kvq.methods.every_other.EveryOther}}\n"),
        },
        "import kvq; assert kvq.build_method('every_other', bits=3, head_dim=64)",
        3,
        "every_other",
    ),
}


def changed(copy: Path) -> set[str]:
    """Files of a copy that the original lacks or has otherwise."""
    files = {path.relative_to(copy) for part in COPIED for path in [copy / part, *(copy / part).rglob("*")]}
    return {
        str(file)
        for file in files
        if (copy / file).is_file()
        and not {"__pycache__", "out"} & set(file.parts)
        and not ((ROOT / file).is_file() and (ROOT / file).read_bytes() == (copy / file).read_bytes())
    }


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_touches_few_files(name: str, tmp_path: Path) -> None:
    change = CHANGES[name]
    for part in COPIED:
        source, target = ROOT / part, tmp_path / part
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    for file, edit in change.files.items():
        path = tmp_path / file
        if isinstance(edit, str):
            path.write_text(edit, encoding="utf-8")
            continue
        before = path.read_text(encoding="utf-8")
        after = edit(before) if callable(edit) else before.replace(*edit)
        assert after != before, file
        path.write_text(after, encoding="utf-8")
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{tmp_path / 'plugins'}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    commands = [["-c", change.works], *([["-m", "tests.golden", f"method {change.golden}"]] if change.golden else [])]
    for command in commands:
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert not done.returncode, done.stdout + done.stderr
    touched = changed(tmp_path)
    assert touched >= set(change.files)
    assert len(touched) == len(change.files) + bool(change.golden) <= change.most, touched

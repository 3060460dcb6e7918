"""The documentation's examples run as they stand."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from experiments.docs import readme
from experiments.docs.notebooks import MOST_BYTES
from experiments.docs.places import PLACE, filled
from kvq import KVCache, cli
from kvq.config import compose, resolve
from kvq.config.choices import find
from kvq.config.plugins import conf_dirs, merge_tables
from kvq.entry import COMMANDS
from kvq.methods.build import build_method
from kvq.papers import __main__ as papers
from kvq.papers import expected
from kvq.papers.sweep import list_jobs
from kvq.report import __main__ as report
from kvq.report.tables.build import build_tables
from kvq.report.tables.formats import csv, markdown
from kvq.results import Record, Store, is_stale
from kvq.results.record import code_hash
from tests.random_models import llama

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
NAMED_BLOCK = re.compile(r"`mine/([\w/.]+)`:\n\n```(?:yaml|python|json)\n(.*?)```", re.S)
PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.S)
TEMPLATES = ROOT / "experiments" / "docs" / "templates"
ENGINES = TEMPLATES / "engines.md"
COMMAND = re.compile(r"^    python (run\.py|-m kvq\.papers) (.+)$", re.M)
MODULES = ("channel_scale", "key_norm", "agreement")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files of docs/extend.md, written where the page says."""
    for name, content in NAMED_BLOCK.findall(PAGE):
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path / "mine"
    for name in MODULES:
        sys.modules.pop(name, None)


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def ran(title: str) -> list[Record]:
    """Records of the commands of a section, in the order in which they were written."""
    found = COMMAND.findall(section(title))
    assert found
    for program, words in found:
        if program == "run.py":
            assert cli.main(shlex.split(words)) == 0, words
    store = Store("results")
    records, broken = store.scan()
    assert not broken
    written = {record.key: store.record_path(record.key).stat().st_mtime_ns for record in records}
    return sorted((record for record in records if record.baseline_key), key=lambda record: written[record.key])


@pytest.mark.long
def test_a_method(mine: Path) -> None:
    records = ran("A method")
    assert [(record.method, record.bits) for record in records] == [
        ("rotated_norm", "2"),
        ("kivi", "2"),
        ("rotated_norm", "2"),
    ]
    # The gain folds into the token norm of keys; without the norm it is stored by itself, one number for a token too.
    whole, kivi, ablated = (record.metrics for record in records)
    assert whole["key_bits"] == ablated["key_bits"] == 2 + 32 / 64 + 16 / 128
    assert whole["value_bits"] == 2 + 32 / 64
    assert whole["nll"] != ablated["nll"]
    assert kivi["nll"] != whole["nll"]


def test_the_yaml_only_method_quantizes(mine: Path) -> None:
    x = torch.randn(1, 2, 128, 128, generator=torch.Generator().manual_seed(0))
    errors = []
    for bits in (2, 4, 8):
        method = build_method("rotated_norm", bits=bits, config_dir=mine)
        assert method.key is not None
        packed = method.key.encode(x)
        # The gain folds into the token norm: codes, two statistics per 64 channels, one norm.
        assert packed.bits_per_element == bits + 32 / 64 + 16 / 128
        errors.append(float((method.key.decode(packed) - x).norm() / x.norm()))
    assert errors[0] > 3 * errors[1] > 9 * errors[2]


def test_a_stage(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (record,) = ran("A stage")
    assert record.method == "channel_scaled"
    assert record.versions["channel_scale.ChannelScale"] == code_hash(mine / "channel_scale.py")
    capsys.readouterr()
    exec(compile(PYTHON_BLOCK.findall(section("A stage"))[-1], "extend.md", "exec"), {})
    bits, error = map(float, re.findall(r"[\d.]+", capsys.readouterr().out)[:2])
    # 3-bit codes, one fp16 scale per token of 128 channels, one fp16 scale per channel of 256 tokens.
    assert bits == pytest.approx(3 + 16 / 128 + 16 / 256, abs=1e-3)
    assert 0.05 < error < 0.6


def test_an_eviction_policy(mine: Path) -> None:
    """The tokens that stay are those of the smallest keys in each head, with the values that they had."""
    built = build_method("key_norm", head_dim=32, config_dir=str(mine), overrides=["eviction.budget=16"])
    layer = KVCache(llama(head_dim=32), built).layers[0]
    keys, values = torch.randn(2, 1, 2, 40, 32).unbind()
    layer.update(keys, values)
    smallest = keys.norm(dim=-1).topk(16, -1, largest=False).indices.sort(-1).values
    new = torch.ones(1, 2, 1, 32)
    for states, kept in zip((keys, values), layer.update(new, new), strict=True):
        assert torch.equal(kept, torch.cat([states.gather(2, smallest[..., None].expand(-1, -1, -1, 32)), new], 2))


def test_a_saved_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The example of docs/generate.md, which has assertions of its own."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "generate.md").read_text(encoding="utf-8")
    (example,) = PYTHON_BLOCK.findall(page)
    exec(compile(example, "generate.md", "exec"), {})
    assert re.fullmatch(r"\d+ bytes for \d+ tokens\n", capsys.readouterr().out)
    assert [path.name for path in tmp_path.iterdir()] == ["sorted.kvq"]


@pytest.mark.long
def test_a_task(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = ran("A task")
    assert [record.task for record in records] == ["agreement", "agreement"]
    assert "agreement (% of tokens)" in capsys.readouterr().out
    full = Store("results").get(records[0].baseline_key or "")
    assert full is not None
    assert full.metrics["effective_bits"] == 16  # of the embedded models' caches
    for record in records:
        assert 0 <= record.metrics["agreement"] <= 100
        assert record.units["agreement"] == "% of tokens"
        assert record.versions["agreement"] == 1
        assert record.versions["agreement.AgreementConfig"] == code_hash(mine / "agreement.py")
        assert not is_stale(record)
    sys.path.remove(str(mine))
    assert all(map(is_stale, records))  # as in a process that knows nothing of the folder
    assert report.main(["--config-dir=mine", "--out=tables"]) == 0
    (written,) = Path("tables").glob("agreement-*.md")
    assert "†" not in written.read_text(encoding="utf-8")
    file = mine / "agreement.py"
    file.write_text(file.read_text(encoding="utf-8").replace("100 * sum", "99 * sum"), encoding="utf-8")
    assert all(map(is_stale, records))
    file.unlink()
    assert all(map(is_stale, records))
    table = next(table for table in build_tables(Store("results")).tables if table.title.startswith("agreement"))
    assert f"{records[0].metrics['agreement']:.4f}" in markdown(table)
    assert f"{records[0].metrics['agreement']}" in csv(table)


def test_a_data_set(mine: Path) -> None:
    (record,) = ran("A data set")
    assert record.dataset == "notes"
    assert record.metrics["windows"] >= 1


@pytest.mark.long
def test_an_experiment(mine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    records = ran("An experiment")
    cells = {(record.dataset, record.method): record.metrics["agreement"] for record in records}
    assert set(cells) == {(text, method) for text in ("pydocs", "pysource") for method in ("kivi", "rotated_norm")}
    shown = capsys.readouterr().out.partition("Greedy answers in common")[2]
    assert all(f"{value:.3f}" in shown for value in cells.values())
    # Of kvq's own experiments one is enough here.
    own = expected.names
    monkeypatch.setattr(expected, "names", lambda: [name for name in own() if name in ("mine/agreement", "nsn/main")])
    ((_, words),) = [found for found in COMMAND.findall(section("An experiment")) if found[0] == "-m kvq.papers"]
    assert papers.main(shlex.split(words)) == 0
    written = Path("results/tables/experiments/mine.md").read_text(encoding="utf-8")
    assert all(f"{value:.3f}" in written for value in cells.values())


def test_every_file_and_command_of_the_page_is_tried() -> None:
    assert [name for name, _ in NAMED_BLOCK.findall(PAGE)] == [
        "method/rotated_norm.yaml",
        "channel_scale.py",
        "method/channel_scaled.yaml",
        "key_norm.py",
        "method/key_norm.yaml",
        "agreement.py",
        "task/agreement.yaml",
        "notes.jsonl",
        "dataset/notes.yaml",
        "experiment/mine/agreement.yaml",
    ]
    titles = ("A method", "A stage", "An eviction policy", "A task", "A data set", "An experiment")
    assert COMMAND.findall(PAGE) == [found for title in titles for found in COMMAND.findall(section(title))]


def test_the_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The first Python block of the README, with the model of the block after it left out."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    exec(compile(PYTHON_BLOCK.findall(text)[0], "README.md", "exec"), {})
    assert "bits" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?://|#)([^)#]+)(?:#([^)]+))?", text):
        assert (page.parent / target).exists(), target
        assert "/tables/" not in target or f'id="{anchor}"' in (page.parent / target).read_text() or not anchor, anchor
    for name in re.findall(r"`((?:kvq|conf|tests|docs|experiments)/[\w/.]+\.(?:py|yaml|md))`", text):
        assert (ROOT / name).exists(), name


def test_the_readme_shows_the_committed_tables() -> None:
    """Every number of the README's tables is that of results/tables; `experiments/docs/readme.py` puts them there."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert filled(text, "table", readme.table_lines) == text
    for place in PLACE.finditer(text):
        words = readme.WORDS.fullmatch(place[3])
        assert words is not None
        rows = [[cell.strip() for cell in row.split("|")[1:3]] for row in place[4].splitlines()[3:]]
        assert {name for name, _ in rows} == set(readme.named_methods(words[2]))
        assert {bits for _, bits in rows} == set(words[3].split())


def test_pages_stay_short() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert sum(len(text.split()) for text in texts) <= 45_000
    assert len(texts[0].splitlines()) <= 130


def test_every_page_is_in_the_navigation() -> None:
    navigation = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(navigation) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.every_plugin
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "changelog.md"], ids=lambda page: page.name)
def test_commands_exist_and_compose(page: Path) -> None:
    """Runs have settings that compose, each value once; of other commands the module, name or target exists."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^ {4}(?:\$ )?((?:python|kvq|make) .+)$", text, re.M)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    seen: set[str] = set()
    for line in blocks + re.findall(r"`((?:python run\.py|python -m|kvq|make) [^`]+)`", text):
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, line
        elif words[0] == "kvq":
            assert words[1] in COMMANDS | merge_tables("commands"), line
        elif words[1] == "-m":
            assert not words[2].startswith("kvq") or importlib.util.find_spec(words[2]), line
        elif words[1] == "run.py" and words[2] not in COMMANDS and not re.search(r"--config-dir|<|\.\.\.", line):
            overrides = OverridesParser.create().parse_overrides([word for word in words[2:] if word != "-m"])
            plain = [one for one in overrides if not (one.key_or_group or "").startswith("hydra")]
            for one in plain:
                assert one.key_or_group != "experiment" or find("experiment", one.value(), *conf_dirs()), line
            if "+experiment=" not in line:
                for job in list_jobs(plain):
                    if not seen >= set(job):
                        seen |= set(job)
                        resolve(compose(list(job)))
    for name in set(re.findall(r"`(?:\+experiment=)?((?:embedded|real|speed|suite|waterfill)/\w+)`", text)):
        assert find("experiment", name, *conf_dirs()) or find("method", name, *conf_dirs()), name


def test_the_peaks_of_an_8b_model_are_those_on_record() -> None:
    text = (ROOT / "docs" / "first_8b_model.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "results" / "bench" / "memory_peak.json").read_text(encoding="utf-8"))
    rows = re.findall(r"^\| ([\w ]+?)(?: 2)? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+|–) \|$", text, re.M)
    assert len(rows) == 6
    for name, *cells in rows:
        label = {"full precision": "fp16"}.get(name, name.lower())
        dense, packed = (found["one_layer"].get(f"{label} {attention}") for attention in ("dense", "packed"))
        sizes = [found["layers"] * dense["stored"], dense["encoding"], dense["decoding"]]
        sizes += [max(packed["decoding"], 0)] if packed else []
        assert [cell for cell in cells if cell != "–"] == [f"{size / 2**30:.2f}" for size in sizes], name


@pytest.mark.long
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    """Every page, link and docstring of the site; a warning is an error (`--strict`)."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {page.parent.name for page in (tmp_path / "site").glob("*/index.html")}
    assert pages >= {"api", "architecture", "extend", "findings", "methods"}
    assert "nsnquant" in (tmp_path / "site" / "methods" / "index.html").read_text(encoding="utf-8")


@pytest.mark.every_plugin
def test_lines_to_paste_are_those_of_the_presets() -> None:
    """docs/engines.md's commands are what `kvq recommend` prints for the same format."""
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| ([^|]+) \| [^|]+ \| [^|]+ \| `(engine/[\w/]+)", ENGINES.read_text(), re.M)
    assert len(rows) > 45
    for line, preset in rows:
        serve = find("method", preset, *conf_dirs()).read()["serve"]
        pasted = re.findall(r"`([^`]+)`", line)[0].replace("--kv-bits 3 ", "--kv-bits ${kvbits:key} ")
        assert serve == pasted or serve.endswith(f" {pasted}"), preset


def test_the_committed_figures_are_those_that_pages_show() -> None:
    seen = subprocess.run(["git", "ls-files", "results/figures"], cwd=ROOT, capture_output=True, text=True, check=False)
    if seen.returncode:
        pytest.skip("no checkout")
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    shown = {Path(name).stem for name in re.findall(r"results/figures/(\S+?\.png)", pages)}
    assert shown
    assert {Path(name).stem for name in seen.stdout.split()} == shown | {"index"}


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = ["choose_a_format", "compare_methods", "paper_figures", "quickstart", "tni_walkthrough"]


def code(path: Path) -> list[str]:
    notebook = nbformat.read(path, as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_as_it_ran(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    ran = "python experiments/docs/notebooks.py runs them"
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), ran
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs) or path.stem == "quickstart"
    assert not re.findall(r"/(?:home|root|tmp|work)/\w+", re.sub(r'"image/png": "[^"]*"', "", text))
    for source in code(path):
        ast.parse(re.sub(r"^%.*$", "", source, flags=re.M))
        assert max(map(len, source.splitlines())) <= 130


def test_they_are_small_together() -> None:
    assert sum(path.stat().st_size for path in NOTEBOOKS) < MOST_BYTES


def test_every_source_has_its_figures() -> None:
    """Behind each heading of a paper in `paper_figures` stands a figure or a table."""
    notebook = nbformat.read(ROOT / "notebooks" / "paper_figures.ipynb", as_version=4)
    drawn: dict[str, int] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (heading := re.match(r"## (.+)", cell.source)):
            drawn[heading[1]] = 0
        elif cell.cell_type == "code" and drawn:
            drawn[list(drawn)[-1]] += sum("image/png" in output.get("data", {}) for output in cell.outputs)
    assert all(drawn.values()), drawn
    for source in ("nsn", "NSNQuant", "OScaR", "KVQuant++"):
        assert any(re.search(rf"\b{re.escape(source)}", heading) for heading in drawn), source


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of Jupyter's own
@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=pytest.mark.long) for path in NOTEBOOKS], ids=lambda path: path.stem
)
def test_runs_from_top_to_bottom(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel (pip install -e '.[notebooks]')")
    pytest.importorskip("ipykernel", reason="needs ipykernel (pip install -e '.[notebooks]')")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:IProgress not found")  # tqdm without ipywidgets
    before = {file: file.stat().st_mtime_ns for file in (ROOT / "results").rglob("*")}
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert "image/png" in kinds or path.stem == "quickstart"
    assert {file: file.stat().st_mtime_ns for file in (ROOT / "results").rglob("*")} == before

"""Every published table has an experiment that composes, and every number in it a cell."""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path

import pytest

from experiments.docs.documents import PAGE, ROOT, Rows
from experiments.docs.places import PLACE, filled
from kvq.cli import main
from kvq.config import compose, resolve
from kvq.config.explain import choices
from kvq.config.identity import by_names, canonical
from kvq.config.run import LayoutConfig
from kvq.papers import expected
from kvq.papers.expected import experiment_of, layout_named, names, print_cost
from kvq.papers.sweep import cells_of, group_jobs, jobs_of, missing_choices, stand_in_overrides, sweep_of
from kvq.report.tables.experiment_files import write_experiments
from kvq.report.tables.experiments import Answers, Experiment, by_signature, shown_cells, signature
from kvq.report.tables.readings import Published, read_reference
from kvq.results import Store
from tests.results import made

REFERENCE = read_reference()
WITHOUT_NUMBERS = {"nsn/mmlu", "nsnquant/figure11", "nsnquant/figure12", "nsnquant/figure7", "nsnquant/figure8"}
WITHOUT_NUMBERS |= {f"oscar/{name}" for name in ("modality_norms", "token_norms", "tni_error")}
"""What a paper tells or draws without a number that could stand in the published figures."""


@functools.cache
def layouts() -> dict[str, LayoutConfig]:
    return {name: layout for name in names() if (layout := layout_named(name)).paper is not None}


@pytest.fixture(scope="module")
def experiments() -> list[Experiment]:
    return [found for name in names() if (found := experiment_of(name)) is not None]


def test_every_published_table_has_an_experiment_and_every_number_one_cell() -> None:
    """One experiment for a table; the sections of KVQuant++ have one for each of their subjects."""
    tables = Counter((layout.paper, layout.table) for layout in layouts().values() if layout.table)
    assert set(tables) == set(REFERENCE.tables)
    assert {table for table, count in tables.items() if count > 1} == {("kvquant-plus-plus", s) for s in "239"}
    found: Counter[Published | None] = Counter()
    for layout in layouts().values():
        if layout.table is not None:
            found.update(REFERENCE.find(layout.paper or "", layout.table, cell.labels) for cell in cells_of(layout))
    for table, rows in REFERENCE.tables.items():
        assert {row: found[row] for row in rows} == dict.fromkeys(rows, 1), table


def test_runs_choose_what_exists_or_is_said_to_be_missing(experiments: list[Experiment]) -> None:
    known = choices()
    for experiment, layout in zip(experiments, layouts().values(), strict=True):
        missing = {name for job in jobs_of(cells_of(layout), (), {}) for name in missing_choices(job, known)}
        assert missing == set(experiment.waiting), experiment.name
        for word in (word for job in jobs_of(cells_of(layout), (), {}) for word in job):
            group = word.lstrip("+").partition("=")[0].partition(".")[0]
            assert group in {"model", "dataset", "method", "task", "bits", "residual", "cache"}, (experiment.name, word)


@pytest.mark.long
@pytest.mark.slow
def test_every_run_of_every_experiment_composes() -> None:
    known = choices()
    jobs = {job for layout in layouts().values() for job in jobs_of(cells_of(layout), (), {})}
    jobs |= {job for layout in layouts().values() for job in jobs_of(cells_of(layout), ["model=tiny"], layout.small)}
    ready = [job for job in jobs if not list(missing_choices(job, known))]
    parts: set[tuple[str, ...]] = set()
    for job in ready:
        method = tuple(word for word in job if word.startswith(("method", "bits", "residual")))
        parts |= {method, tuple(word for word in job if word not in method)}
    assert len(parts) > 60
    for part in sorted(parts):
        compose(list(part))


def test_a_table_without_runs_prints_the_published_and_the_command(
    experiments: list[Experiment], tmp_path: Path
) -> None:
    write_experiments(experiments, Answers(), REFERENCE, tmp_path)
    text = (tmp_path / "nsnquant.md").read_text(encoding="utf-8")
    page = text.partition('id="nsnquant-table2"')[2].partition("\n## ")[0]
    assert "| NSNQuant-2b | 2.23 | – | – | – / 6.86 / –" in page
    assert "python run.py +experiment=nsnquant/table2" in page
    assert "Not measured:" in page
    own = {label for each in experiments for label in each.layout.own}
    index = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert all(f"`{experiment.name}`" in index for experiment in experiments)
    assert re.search(r"`oscar/mmau_pro`.* 10: open answers, graded by a judge .* \|", index)
    cells = [cell for each in experiments if each.layout.table for cell in shown_cells(each, Answers(), REFERENCE)]
    assert all(cell.published or set(cell.asked.labels.values()) & own for cell in cells)
    assert sum(cell.published is not None for cell in cells) == sum(map(len, REFERENCE.tables.values()))


def test_a_plan_says_which_cells_no_run_can_fill(capsys: pytest.CaptureFixture[str]) -> None:
    print_cost("oscar/mmau_pro", 5)
    assert "cells that cannot be measured: open answers, graded by a judge" in capsys.readouterr().out


def test_small_is_the_same_shape(experiments: list[Experiment]) -> None:
    """Each method of a table runs in the stand-in, on what ships with the package."""
    config = compose(["+experiment=nsnquant/table2"])
    from hydra.core.override_parser.overrides_parser import OverridesParser

    given = OverridesParser.create().parse_overrides(["+experiment=nsnquant/table2", "model=tiny"])
    jobs = sweep_of(config, given)
    methods = {word for job in jobs for word in job if word.startswith("method=")}
    assert {"method=fp16", "method=nsnquant", "method=kivi/nsnquant_setting"} <= methods
    assert {word for job in jobs for word in job if word.startswith("dataset=")} == {
        "dataset=pydocs",
        "dataset=pysource",
    }
    for layout in layouts().values():
        if layout.paper == "real" or layout.axes.get("model") == ["SmolLM2-135M"]:
            continue  # of one real model and its own text, which nothing stands in for
        for job in jobs_of(cells_of(layout), ["model=tiny"], layout.small):
            assert not {"dataset=wikitext2", "dataset=c4", "task=longbench"} & set(job)


@pytest.mark.every_plugin
def test_the_real_model_has_what_embedded_ones_have_and_its_own() -> None:
    """`layout.real` says only what differs from `layout.small`, which serves both."""
    for name, layout in layouts().items():
        assert not layout.small.items() & layout.real.items(), name
    words = _words_on_the_real_model("nsn/niah")
    assert {word for word in words if word.startswith("task.repeats")} == {"task.repeats=10"}
    assert {word for word in words if word.startswith("task.lengths")} == {"task.lengths=[1024]", "task.lengths=[2048]"}
    assert {"task.prompt=512", "task.new_tokens=8"} <= _words_on_the_real_model("speed/peers")  # as `small` has it


def _words_on_the_real_model(name: str) -> set[str]:
    layout, given = layouts()[name], ["model=smollm2_135m"]
    small = stand_in_overrides(layout, "smollm2_135m") or {}
    return {word for job in jobs_of(cells_of(layout), given, small) for word in job}


def test_a_record_is_found_by_what_it_measures(tmp_path: Path) -> None:
    """A run of the experiment, on disk under the names and settings that the runner gives it."""
    config = resolve(
        compose(["model=llama_2_7b", "dataset=wikitext2", "task=ppl/nsnquant_table2", "method=nsnquant", "bits=2"])
    )
    settings = canonical(config, "f" * 64, "d" * 64)
    names = {"model": "llama_2_7b", "dataset": "wikitext2", "metrics": {"perplexity": 5.3, "bits_per_element": 2.23}}
    store = Store(tmp_path)
    store.put(made.record("nsnquant", "2", settings=settings, **names))
    experiment = experiment_of("nsnquant/table2", frozenset({("llama_2_7b", "nsnquant")}))
    assert experiment is not None
    cells = shown_cells(experiment, by_signature(store.scan()[0]), REFERENCE)
    [cell] = [cell for cell in cells if cell.value is not None]
    assert cell.published is not None
    assert (cell.published.method, cell.published.dataset, cell.published.model) == (
        "NSNQuant-2b",
        "WikiText-2",
        "LLaMA2-7B",
    )
    assert cell.difference == pytest.approx(5.3 - cell.published.value)
    assert cell.bits == 2.23
    small = experiment_of("nsnquant/table2", frozenset({("tiny", "nsnquant")})).stand_ins["tiny"]
    assert {cell.labels["dataset"] for cell in small} == {"WikiText-2 (pydocs)", "C4 (pysource)"}


def test_a_table_that_waits_says_so_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A choice that no version has; its run is left out, and what is published stands all the same."""
    nowhere = "layout.common='model=llama_2_7b dataset=wikitext2 task=no_such'"
    assert main(["+experiment=nsnquant/table10", nowhere, f"results_dir={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "nsnquant/table10: 0 runs here" in said
    assert "– / 5.29 / –" in said


@pytest.mark.slow
def test_the_stand_in_runs_beside_the_published_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["dataset.max_tokens=400", "task.context=128"]
    assert main(["+experiment=nsnquant/table11", "model=tiny", *small, f"results_dir={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "– / 5.278 / –" in said
    assert len(Store(tmp_path).scan()[0]) == 5


def test_groups_composed_apart_are_the_run_composed_whole() -> None:
    runs = (
        (
            "model=tiny_outliers",
            "dataset=pysource",
            "method=nsn",
            "bits=3",
            "task=ppl",
            "task.max_windows=8",
            "residual.size=64",
        ),
        (
            "method=oscar",
            "method.residual.size=32",
            "bits=k3v2",
            "model=tiny",
            "task=niah",
            "dataset=pydocs",
            "dataset.max_tokens=512",
        ),
        ("method=kvquant", "method.calibration.dataset=wikitext2", "bits=2", "model=llama_2_7b"),
        ("task=latency", "method=oscar", "bits=2", "cache.attention=packed", "model=qwen3_8b"),
        ("model=distilgpt2", "task=ppl/kvquant_plus_plus", "dataset=wikitext2", "method=fp16"),
        ("model=hf", "model.path=a/b", "model.dtype=float16", "task=memory", "task.lengths=[1024]"),
        ("seed=3",),
        ("model=tiny", "method=kivi", "method.values_of=nsnquant", "bits=2"),
        ("method=oscar", "bits=2", "+method.key.stages.undo_rope={_target_:kvq.codecs.UndoRope}"),
    )
    for run in runs:
        whole = resolve(compose(list(run)))
        assert expected._signature(run) == signature(by_names(whole), whole.model.name, whole.dataset.name)


def test_jobs_of_a_model_and_a_text_stand_together() -> None:
    def words(*jobs: str) -> list[list[str]]:
        return [job.split() for job in jobs]

    mixed = words("model=b dataset=x bits=2", "model=a dataset=x bits=2", "model=b dataset=y bits=2", "bits=3",
                  "model=a dataset=x bits=3", "model=b dataset=x bits=3")  # fmt: skip
    assert group_jobs(mixed) == words("model=b dataset=x bits=2", "model=b dataset=x bits=3",
                                      "model=b dataset=y bits=2", "model=a dataset=x bits=2",
                                      "model=a dataset=x bits=3", "bits=3")  # fmt: skip
    own = words("method=nsn model_of=a bits=2", "method=kivi bits=2")
    assert group_jobs(own) == own


def test_a_plain_sweep_is_grouped_and_cut_into_batches() -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from hydra_plugins.kvq_experiments import GroupedSweeper

    given = OverridesParser.create().parse_overrides(["bits=2,3", "model=tiny,tiny_outliers"])
    wanted = [[f"bits={bits}", f"model={model}"] for model in ("tiny", "tiny_outliers") for bits in (2, 3)]
    assert GroupedSweeper().batches(given) == [wanted]
    assert GroupedSweeper(3).batches(given) == [wanted[:3], wanted[3:]]


PRINTED = {
    "nsn_readme": [],
    "nsnquant_paper": [f"Table {n}" for n in range(1, 22)] + [f"Figure {n}" for n in range(1, 14)],
    "oscar_paper_excerpt": ["Table 2", *(f"Figure {n}" for n in (1, 2, 3, 4, 19, 20, 21)), "Algorithm 1"],
    "oscar_review": ["Table 1", *(f"Figure {n}" for n in range(1, 8))],
    "kvquant_plus_plus_paper": [f"Figure {n}" for n in range(1, 10)],
}
"""Numbers read off the documents."""
UNNUMBERED = {
    "nsn_readme": {"main table", "NIAH", "INT4 valley", "mechanism", "memory", "throughput", "claims", "MMLU"},
    "nsnquant_paper": {"section 3.1"},
    "oscar_paper_excerpt": {"LongBench-E", "OCRBench", "MMAU-Pro", "Appendix D"},
    "oscar_review": {
        "gaps by task",
        "needles",
        *(f"limitation {n}" for n in (3, 5, 6, 7)),
        *(f"weakness {n}" for n in range(1, 8)),
    },
    "kvquant_plus_plus_paper": {
        *(f"section 2.2.{n}" for n in (1, 3, 5, 9)),
        *(f"section 3.{n}" for n in range(1, 6)),
        *(f"section {n}" for n in ("5.2", "5.3", "9.1", "9.2", "9.6")),
        "sections 7 and 9.5",
    },
}
"""What they print without a number, or ask for."""


def listed() -> dict[str, list[str]]:
    """First cells of the page's lists, by document."""
    page = PAGE.read_text(encoding="utf-8")
    return {
        place[3]: [line.split("|")[1].strip() for line in place[4].splitlines()[2:]] for place in PLACE.finditer(page)
    }


def test_each_table_and_figure_is_listed_once() -> None:
    assert list(listed()) == list(PRINTED)
    for document, lines in listed().items():
        numbered = Counter(line for line in lines if re.fullmatch(r"(Table|Figure|Algorithm) \d+", line))
        assert numbered == Counter(PRINTED[document]), document
        assert {line.partition(":")[0] for line in lines} >= UNNUMBERED[document], document
        assert len(set(lines)) == len(lines), document


OURS = (None, "embedded", "real", "speed", "suite", "waterfill")
"""Papers of experiments that stand in no document."""


@pytest.mark.long
def test_the_page_is_what_experiments_and_records_say() -> None:
    """`python experiments/docs/documents.py` writes it."""
    rows = Rows(ROOT / "results")
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, "document", rows.table) == page
    stands = {name for items in rows.documents.values() for item in items for name in item.experiments}
    assert stands >= {name for name in names() if layout_named(name).paper not in OURS}

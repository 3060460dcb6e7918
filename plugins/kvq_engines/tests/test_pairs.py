"""The map of pairs of a key and a value format."""

from dataclasses import replace

from kvq.cli import main
from kvq.report.tables.build import build_tables
from kvq.results import Store
from kvq_engines.figures import pairs_figure, pairs_table


def test_every_pair_is_a_cell(tmp_path):
    words = [
        "-m",
        "model=tiny",
        f"results_dir={tmp_path}",
        "task.context=64",
        "task.max_windows=2",
        "task.scoring=parallel",
    ]
    words += ["task.windows=disjoint", "threads=1", "method=fp16,rtn,q8_0", "method.values_of=fp16,rtn,q8_0", "bits=4"]
    assert main(words) == 0
    labelled = [*words[:-3], "method=nsn", "method.sink_tokens=1,2", "bits=2"]
    assert main(labelled) == 0
    (table,) = build_tables(Store(tmp_path)).tables
    rows = [row if row.record.method != "nsn" else replace(row, name="nsn on a+b", variant=True) for row in table.rows]
    numbers = pairs_table(replace(table, rows=rows))
    pairs = set(zip(numbers["keys"], numbers["values"], strict=True))
    names = ("fp16", "rtn", "q8_0")
    assert pairs == {(key, value) for key in names for value in names} - {("fp16", "fp16")}
    assert len(pairs_figure(numbers, "").axes) == 2

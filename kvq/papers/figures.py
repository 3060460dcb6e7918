"""`python -m kvq.papers.figures`: every figure that the records allow, and papers' numbers next to ours.

The figures of records alone are made by `kvq.report.figures`, which knows no experiment.
"""

from __future__ import annotations

if __name__ == "__main__":
    from kvq.entry import enter

    enter("kvq.papers.figures")

from collections.abc import Iterator, Mapping, Sequence

from kvq.papers.expected import experiment_of
from kvq.report.figures import every
from kvq.report.figures.drawing import Drawing
from kvq.report.figures.perplexity import published_figure, published_table
from kvq.report.tables.experiment_files import fill
from kvq.report.tables.experiments import by_signature
from kvq.report.tables.readings import read_reference
from kvq.results import Record

DRAWN: Mapping[str, tuple[str, str]] = {"nsnquant/table2": ("LLaMA3.1-8B", "NSNQuant, Table 2")}
"""Experiments whose table a paper draws too: the model that it draws, and where its numbers are printed."""


def published_drawings(records: Sequence[Record]) -> Iterator[Drawing]:
    """The drawings of `DRAWN`, from published numbers and the records that answer the same cells.

    Raises:
        KvqError: published numbers that cannot be read.
    """
    present = frozenset((record.model, record.method) for record in records)
    answers, reference = by_signature(records), read_reference()
    for name, (model, source) in DRAWN.items():
        experiment = experiment_of(name, present)
        assert experiment is not None  # it has a table
        table = published_table(fill(experiment, answers, reference), model)
        title = f"{experiment.title}: {model}"
        yield Drawing(f"published-{name.replace('/', '-')}", table, published_figure, (source, title))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return every.main(arguments, published_drawings)

"""Text of records in Markdown, LaTeX and CSV: each format escapes what would be markup in it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

import yaml

from kvq.errors import printable

_LATEX = str.maketrans(yaml.safe_load((Path(__file__).parent / "latex.yaml").read_text(encoding="utf-8")))
# Letters that pdflatex knows in any encoding of fonts. What is neither here nor above is named by its number, so that
# a name in another script compiles.
_UNKNOWN = re.compile(r"[^\x00-\x7fÀ-ÏÑ-ÖØ-Ýß-ïñ-öø-ýÿ]")
# An underscore between letters or digits starts no emphasis, and names stay readable as they are.
_MARKDOWN = re.compile(r"[\\`*\[\]|~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def one_line(text: str) -> str:
    """`text` on one line, without control characters."""
    return printable(" ".join(text.split()))


def plain_cell(value: object) -> object:
    """A value of a CSV's cell; text that a spreadsheet would take for a formula begins with an apostrophe."""
    if not isinstance(value, str):
        return value
    text = value if "\r" not in value else value.replace("\r\n", "\n").replace("\r", "\n")  # csv does not quote these
    formula = len(text) > 1 and text.lstrip()[:1] in ("=", "@", "+", "-") and not _is_number(text)
    return f"'{text}" if formula else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def csv_of(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows of the same columns as CSV: a header, `None` an empty field, floats in full, no formulas."""
    if not rows:
        return ""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writerow({name: plain_cell(name) for name in rows[0]})
    writer.writerows({name: plain_cell(value) for name, value in row.items()} for row in rows)
    return file.getvalue()


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Container[int] = ()) -> list[str]:
    """Lines of a Markdown table of cells that are escaped; `numbers`: the columns that are aligned right."""
    aligned = ["---:" if place in numbers else ":---" for place in range(len(header))]
    return [f"| {' | '.join(cells)} |" for cells in (header, aligned, *rows)]


def escape_markdown(text: str) -> str:
    """Text that Markdown shows as it is, also in a table's cell."""
    html = one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(lambda match: f"\\{match[0]}", html)


def escape_latex(text: str) -> str:
    """Text that LaTeX shows as it is; signs used by the tables become their commands."""
    # Two hyphens make a dash of another length.
    escaped = one_line(text).translate(_LATEX).replace("--", "-{}-").replace("--", "-{}-")
    return _UNKNOWN.sub(lambda found: rf"\texttt{{U+{ord(found[0]):04X}}}", escaped)

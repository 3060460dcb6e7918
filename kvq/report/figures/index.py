"""`figures/index.md`: every figure by what it shows, with its files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from kvq.report.command import write_files
from kvq.report.escapes import escape_markdown
from kvq.report.figures.drawing import Drawing
from kvq.results.noise import FRONTIER_RULE, NOISE_RULE

INDEX = "index.md"
# Headings by the beginning of a figure's name, in the order of the page; what has none comes last.
_KINDS = {
    "pareto": "Loss against effective bits, with the frontier",
    "measured": "Variants of a method against measured bits, beside the methods compared first",
    "engines": "Engines' formats beside papers' methods, against measured bits",
    "agreement": "Engines and their presets: KL of each and between them",
    "variants": "Variants of a method",
    "widths": "Loss by bit width",
    "calibration-shift": "Calibrated on one text, tested on another",
    "positions": "Loss over full precision by position",
    "niah": "Needles found, by depth and length",
    "memory": "Bytes of the cache",
    "throughput": "Throughput and peak memory by batch",
    "error-places": "Errors by layer and position",
    "error-steps": "Errors by stages of a method",
    "synthetic": "Errors on made-up keys: low sinks and outlier channels",
    "states-drawn": "Errors on drawn states, by configuration",
    "states-layers": "Errors on a model's states by layer, beside another method",
    "tni-boxes": "Token norms by position",
    "tni-layers": "Token norms by position, as they are",
    "tni-heat": "Token norms by layer and position",
    "tni-groups": "Ranges of groups, bounds and errors",
    "modality-tokens": "Token norms by position and modality",
    "modality-layers": "Spread of token norms by layer and modality",
    "distribution-kl": "Closeness to a normal distribution",
    "distribution-layers": "Normalized states by layer",
    "distribution-covariances": "Covariances of normalized states",
    "distribution-ranges": "Ranges of covariances by channel",
    "distribution-channels": "Means and deviations of normalized, rotated channels",
    "distribution-steps": "Channels by steps of NSN",
    "distribution-magnitudes": "Magnitudes of states by token and channel",
    "distribution-tsne": "Tokens in two dimensions",
    "published": "Published numbers, ours beside them where there are records",
    "stand-ins": "Losses on a real model and on the embedded ones",
    "dispersion": "Dispersion of norms and loss, over models",
}
_RULES = dict.fromkeys(("pareto", "engines"), f"{FRONTIER_RULE} {NOISE_RULE}") | {"widths": NOISE_RULE}
_OTHERS = "Others"


def kinds() -> tuple[str, ...]:
    """What the names of figures begin with, in the order of the page."""
    return tuple(_KINDS)


class Noted:
    """Drawings passed on one by one, while their names and titles are kept for the index."""

    def __init__(self, drawings: Iterable[Drawing]) -> None:
        self._drawings = drawings
        self.titles: dict[str, tuple[str, bool]] = {}

    def __iter__(self) -> Iterator[Drawing]:
        for drawing in self._drawings:
            self.titles[drawing.stem] = drawing.title, drawing.draw is not None
            yield drawing

    def write(self, folder: Path) -> Path:
        """Write the index and return its path.

        Raises:
            RecordError: a folder that cannot be written.
        """
        # One that could not be drawn has no files.
        self.titles = {stem: title for stem, title in self.titles.items() if (folder / f"{stem}.csv").is_file()}
        return write_files("figures", folder, {INDEX: self._page()})[0]

    def _page(self) -> str:
        begin = "Drawn from the records by `make figures`; changes here are overwritten. Each has its numbers"
        lines = ["# Figures", "", begin, "beside it. Tables are in [tables](../tables/index.md)."]
        for kind in [*_KINDS, ""]:
            stems = [stem for stem in sorted(self.titles) if _kind(stem) == kind]
            if not stems:
                continue
            lines += ["", f"## {_KINDS.get(kind, _OTHERS)}", ""]
            if kind in _RULES:
                lines += [_RULES[kind], ""]
            for stem in stems:
                title, drawn = self.titles[stem]
                kinds = ("png", "pdf", "csv") if drawn else ("csv",)
                files = ", ".join(f"[{suffix.upper()}]({stem}.{suffix})" for suffix in kinds)
                lines.append(f"- {escape_markdown(title)} (`{stem}`): {files}")
        return "\n".join(lines) + "\n"


def _kind(stem: str) -> str:
    return next((kind for kind in _KINDS if stem.startswith(kind)), "")

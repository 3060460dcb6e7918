"""Every figure of the diagnostic tasks and of widths, from records alone."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pandas as pd

from kvq.errors import RecordError
from kvq.report.command import made_of, noted
from kvq.report.figures import cost, distribution, norms, over_models, perplexity, texts
from kvq.report.figures import error as errors
from kvq.report.figures.drawing import Drawing, drawn
from kvq.report.figures.texts import heat_map, needle_grid
from kvq.report.labels import label, model_name, named, protocol_departures
from kvq.report.tables.layout import Row
from kvq.results import Record, Store, run_key
from kvq.results.presets import PROTOCOL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FEWEST_WIDTHS = 3
_KNOWN_STATES = ("random_states", "model_states")

Maker = Callable[[Sequence[Record], Store], Iterable[Drawing]]


def diagnostic_drawings(records: Iterable[Record], store: Store, skipped: list[str] | None = None) -> Iterator[Drawing]:
    """Every figure of the diagnostic tasks that records allow.

    `skipped` takes the reasons of runs whose samples cannot be read; None raises them.

    Raises:
        RecordError: samples that are missing, where `skipped` is None.
    """
    done = [record for record in records if record.status == "done"]
    for task, make in MAKERS.items():
        own = sorted((r for r in done if r.task == task), key=lambda r: (r.model, r.dataset, label(r), r.bits, r.key))
        for group in _grouped(own, _protocol).values():
            for made in _sound(group, make, store, f"figures of task={task}", skipped):
                first = group[0]
                stem = f"{made.stem}-{first.model}-{first.dataset}-{_protocol(first)[:6]}"
                yield replace(made, stem=file_name(stem))
    for make, what in ((_shifts, "shifts"), (_stand_ins, "stand-ins"), (_dispersions, "dispersion")):
        parts = _grouped(done, _shift_group).values() if make is _shifts else [done]
        for group in parts:
            yield from _sound(group, make, store, what, skipped)


def _sound(group: Sequence[Record], make: Maker, store: Store, what: str, skipped: list[str] | None) -> list[Drawing]:
    """Drawings of the records that allow them."""
    return made_of(group, lambda sound: list(make(sound, store)), run_of, what, noted(skipped)) or []


def run_of(record: Record) -> str:
    """A run in a sentence about what cannot be drawn."""
    return f"run {record.key[:12]}"


def file_name(stem: str) -> str:
    """A figure's name as a file's: no separator of folders, no leading dot, whatever a record holds."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", stem).lstrip(".")
    # The end of a stem tells protocols apart.
    return name if len(name) <= 200 else f"{name[:120]}_{name[-79:]}"


def _grouped(records: Iterable[Record], key: Callable[[Record], str]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    return groups


def _shift_group(record: Record) -> str:
    return run_key({name: record.config.get(name) for name in ("task", "model", "seed")})


def _shifts(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    """A figure of a model whose calibrated methods were tested on another text."""
    first = group[0]
    task = first.config.get("task")
    scoring = task.get("scoring") if isinstance(task, Mapping) else None
    protocol = ", scoring ".join(filter(None, [model_name(first.model), scoring and str(scoring)]))
    stem = file_name(f"calibration-shift-{first.model}-{_shift_group(first)[:6]}")
    title = f"Calibrated on another text (hollow): {protocol}"
    return drawn(stem, perplexity.shift_table(group, store), perplexity.shift_figure, title)


def _stand_ins(group: Sequence[Record], _: Store) -> Iterable[Drawing]:
    title = "Losses on a real model and on the embedded ones: one mark per method and bits"
    return drawn("stand-ins", over_models.stand_in_table(group), over_models.stand_in_figure, title)


def _dispersions(group: Sequence[Record], _: Store) -> Iterable[Drawing]:
    table = over_models.dispersion_table(group)
    if not table.empty:
        yield Drawing("dispersion-pairs", table, None)
        yield Drawing("dispersion-spearman", over_models.dispersion_correlations(table), None)
        for stem, title, numbers in over_models.scatters(table):
            yield Drawing(file_name(stem), numbers, over_models.scatter_figure, (title,))


def _protocol(record: Record) -> str:
    """A hash of the settings that the runs of a figure share.

    Known states are compared with another method at the run's own bits, which their fingerprint names.
    """
    parts = {name: record.config.get(name) for name in PROTOCOL}
    if record.task in _KNOWN_STATES:
        parts["dataset"] = {**(parts["dataset"] or {}), "fingerprint": record.dataset}
    return run_key(parts)


def _quantized(group: Sequence[Record]) -> list[Record]:
    return [record for record in group if record.baseline_key is not None]


def _where(group: Sequence[Record]) -> str:
    words = ", ".join(protocol_departures(group[0]))
    return f"{model_name(group[0].model)}, {group[0].dataset}{f' ({words})' if words else ''}"


def _bits_on(record: Record) -> str:
    return f"{named(record)} bits on {model_name(record.model)}"


def _errors(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    runs = _quantized(group)
    for record in runs:
        title = f"{_bits_on(record)}: error by stages"
        yield Drawing(f"error-steps-{named(record)}", errors.steps_table(record, store), errors.steps_figure, (title,))
    if runs:
        title = f"Errors on {_where(group)}"
        yield Drawing("error-places", errors.places_table(runs, store), errors.places_figure, (title,))


def _norms(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    table, where = norms.norms_table(group[0], store), _where(group)
    for stem, draw, words in (
        ("tni-boxes", norms.boxes_figure, "Token norms over layers and heads"),
        ("tni-layers", norms.layers_figure, "Token norms by layer, a box over heads"),
        ("tni-heat", norms.heat_figure, "Where tokens are low in norm"),
    ):
        yield Drawing(stem, table, draw, (f"{words}: {where}",))
    for record in _quantized(group):
        title = f"{_bits_on(record)}: ranges, bounds and errors"
        yield Drawing(f"tni-groups-{named(record)}", norms.groups_table(record, store), norms.groups_figure, (title,))


def _modalities(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    record, where = group[0], _where(group)
    tokens, layers = norms.modality_tokens_table(record, store), norms.modality_layers_table(record, store)
    title = f"Token norms by modality, from the least to the largest head: {where}"
    yield from drawn("modality-tokens", tokens, norms.modality_tokens_figure, title)
    yield from drawn("modality-layers", layers, norms.modality_layers_figure, f"Spread of norms by modality: {where}")


def _distributions(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    record, where, of = group[0], _where(group), distribution
    ranges, moments = of.ranges_table(record, store), of.moments_table(record, store)
    magnitudes, synthetic = of.magnitudes_table(record, store), errors.rows_of(record, store, "synthetic")
    closeness, covariances = of.closeness_table(record), of.covariances_table(record, store)
    title = f"NSN by layer: {where} (solid: keys, dotted: values, dashed: synthetic)"
    kinds: tuple[tuple[str, pd.DataFrame, Callable[..., Figure], str], ...] = (
        ("covariances", covariances, of.covariances_figure, "Covariances of channels behind NSN"),
        ("ranges", ranges, of.ranges_figure, "Covariances by channel behind NSN, layer {layer}"),
        ("channels", of.scattered(moments), of.scatter_figure, "Channels behind NSN and Hadamard"),
        ("steps", of.one_head(moments), of.steps_figure, "Channels by steps of NSN, layer {layer}, head 0"),
        ("magnitudes", magnitudes, of.magnitudes_figure, "Magnitudes, layer {layer}, head 0"),
    )
    yield from drawn("distribution-kl", closeness, of.closeness_figure, f"Closeness to N(0, 1): {where}")
    yield from drawn("distribution-layers", of.layers_table(record, store), of.layers_figure, synthetic, title)
    for stem, table, draw, words in kinds:
        layer = table["layer"].min() if "layer" in table else None
        yield from drawn(f"distribution-{stem}", table, draw, f"{words.format(layer=layer)}: {where}")


def _memory(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    title = f"Bytes of the cache: {model_name(group[0].model)}"
    return drawn("memory", errors.labelled_rows(group, store, "bytes"), cost.memory_figure, title)


def _throughputs(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    title = f"Throughput and memory by batch: {model_name(group[0].model)} on {group[0].config.get('machine')}"
    return drawn("throughput", cost.throughput_table(group, store), cost.throughput_figure, title)


def _planes(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    table = errors.labelled_rows(_quantized(group), store, "plane")
    sinks = f"sinks {'with' if group[0].config['task'].get('sink_outliers') else 'without'} outlier channels"
    for quantity, words in (
        ("neighbour_apart_error", "Error of a sink's neighbours, relative to what sets keys apart"),
        ("sink_error", "Error of the sinks, relative to their norm"),
    ):
        if quantity in table:
            yield Drawing(f"synthetic-{quantity}", table, errors.plane_figure, (quantity, f"{words}; {sinks}"))


def _widths(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    table = perplexity.valley_table(group, store)
    if table.empty or table["bits"].nunique() < _FEWEST_WIDTHS:
        return []
    return drawn("widths", table, perplexity.valley_figure, f"More bits, less loss? {_where(group)}")


def _drawn_states(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    title = f"Drawn states: {errors.states_of(group[0].config['task'])}"
    return drawn("states-drawn", errors.bars_table(_quantized(group), store), errors.bars_figure, title)


def _model_states(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    words = [f"{model_name(group[0].model)}, {group[0].dataset}", *errors.beside(group[0].config["task"])]
    title = f"Errors on a block of states: {', '.join(words)}"
    return drawn("states-layers", errors.layers_table(group, store), errors.layers_figure, title)


def _trajectories(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    table, title = texts.survival_table(_quantized(group), store), "Greedy texts beside full precision's"
    return drawn("trajectory", table, texts.survival_figure, f"{title}: {_where(group)}")


def _sensitivities(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    costs, sums = (make(_quantized(group), store) for make in (errors.costs_table, errors.sums_table))
    yield from drawn("sensitivity", costs, errors.costs_figure, f"Quantized alone: {_where(group)}")
    yield from drawn("sums", sums, errors.sums_figure, f"Do costs of layers add up? {_where(group)}")


MAKERS: dict[str, Maker] = {
    "error": _errors,
    "tni": _norms,
    "modality": _modalities,
    "distribution": _distributions,
    "memory": _memory,
    "throughput": _throughputs,
    "synthetic": _planes,
    "random_states": _drawn_states,
    "model_states": _model_states,
    "ppl": _widths,
    "trajectory": _trajectories,
    "sensitivity": _sensitivities,
}


def embedding_drawings(records: Iterable[Record], store: Store, skipped: list[str] | None = None) -> Iterator[Drawing]:
    """t-SNE of the tokens that `task=distribution` kept, a figure for every model with two corpora or more.

    `skipped` takes the reasons of runs that it cannot be made of; None raises them.

    Raises:
        RecordError: samples that are missing.
    """
    done = (record for record in records if record.task == "distribution" and record.status == "done")
    groups = _grouped(done, lambda r: run_key({"model": r.config.get("model"), "task": r.config.get("task")}))
    for name, group in groups.items():
        if len({r.dataset for r in group}) < 2:
            continue
        vectors = functools.partial(distribution.kept_vectors, store=store)
        kept = made_of(group, vectors, run_of, "embedding", noted(skipped))
        if kept is not None and not kept.empty:
            title = f"Tokens of {model_name(group[0].model)}, layer {kept['layer'].iloc[0]}, one head"
            stem = file_name(f"distribution-tsne-{group[0].model}-{name[:6]}")
            yield Drawing(stem, kept, distribution.embedding_figure, (title,), distribution.embedding_table)


def run_figures(record: Record, store: Store) -> list[tuple[str, Figure]]:
    """Figures of a run that is done, each with a name, for W&B; none where its samples cannot be read."""
    if record.status != "done":
        return []
    title = f"{named(record)}: {model_name(record.model)}, {record.dataset}"
    try:
        if record.task == "ppl":
            table, draw, name = perplexity.windows_table(record, store), perplexity.windows_figure, "windows"
        elif record.task == "niah":
            table, draw, name = needle_grid([Row(record, label(record), record.bits)], store), heat_map, "needles"
        else:
            made = MAKERS[record.task]([record], store) if record.task in MAKERS else []
            # Names without the run's label, so that W&B shows the same figure of several runs side by side.
            figures = [(drawing.stem.removesuffix(f"-{named(record)}"), drawing.figure()) for drawing in made]
            return [(name, figure) for name, figure in figures if figure is not None]
        return [] if table.empty else [(name, draw(table, title))]
    except (RecordError, KeyError):
        return []

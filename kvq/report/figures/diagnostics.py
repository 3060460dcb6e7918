"""Every figure of the diagnostic tasks and of widths, from records alone."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from kvq.report.figures import (
    channels,
    dispersion,
    distribution,
    memory,
    modality,
    shift,
    stand_ins,
    states,
    throughput,
    tni,
    valley,
)
from kvq.report.figures import error as errors
from kvq.report.figures.drawing import Drawing
from kvq.report.isolated import made_of, noted
from kvq.report.labels import label, model_name, named, protocol_departures
from kvq.report.settings import PROTOCOL
from kvq.results import Record, Store, run_key

_FEWEST_WIDTHS = 3
_KNOWN_STATES = ("random_states", "model_states")
Made = TypeVar("Made")
Maker = Callable[[Sequence[Record], Store], Iterable[Drawing]]


def diagnostic_drawings(records: Iterable[Record], store: Store, skipped: list[str] | None = None) -> Iterator[Drawing]:
    """Every figure of the diagnostic tasks that records allow.

    `skipped` takes the reasons of runs whose samples cannot be read; None raises them.

    Raises:
        RecordError: samples that are missing, where `skipped` is None.
    """
    done = [record for record in records if record.status == "done"]
    for task, make in MAKERS.items():
        for group in _protocols(record for record in done if record.task == task):
            for made in _sound(group, _made(make, store), f"figures of task={task}", skipped) or ():
                yield replace(made, stem=file_name(f"{made.stem}-{_suffix(group)}"))
    yield from _shifts(done, store, skipped)
    table = _sound(done, stand_ins.stand_in_table, "stand-ins", skipped)
    if table is not None and not table.empty:
        title = "Losses on a real model and on the embedded ones: one mark per method and bits"
        yield Drawing("stand-ins", table, stand_ins.stand_in_figure, (title,))
    table = _sound(done, dispersion.dispersion_table, "dispersion", skipped)
    if table is not None and not table.empty:
        yield Drawing("dispersion-pairs", table, None)
        yield Drawing("dispersion-spearman", dispersion.dispersion_correlations(table), None)
        for stem, title, numbers in dispersion.scatters(table):
            yield Drawing(file_name(stem), numbers, dispersion.scatter_figure, (title,))


def _sound(
    group: Sequence[Record], make: Callable[[list[Record]], Made], what: str, skipped: list[str] | None
) -> Made | None:
    return made_of(group, make, lambda record: f"run {record.key[:12]}", what, noted(skipped))


def _made(make: Maker, store: Store) -> Callable[[list[Record]], list[Drawing]]:
    return lambda group: list(make(group, store))


def file_name(stem: str) -> str:
    """A figure's name as a file's: no separator of folders, no leading dot, whatever a record holds."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", stem).lstrip(".")
    # The end of a stem tells protocols apart.
    return name if len(name) <= 200 else f"{name[:120]}_{name[-79:]}"


def _shifts(records: Sequence[Record], store: Store, skipped: list[str] | None) -> Iterator[Drawing]:
    """A figure of each model whose calibrated methods were tested on another text."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[run_key({name: record.config.get(name) for name in ("task", "model", "seed")})].append(record)
    for name, group in groups.items():
        table = _sound(group, functools.partial(shift.shift_table, store=store), "shifts", skipped)
        if table is not None and not table.empty:
            task = group[0].config.get("task")
            scoring = task.get("scoring") if isinstance(task, Mapping) else None
            protocol = filter(None, [model_name(group[0].model), scoring and str(scoring)])
            title = f"Calibrated on another text (hollow): {', scoring '.join(protocol)}"
            stem = file_name(f"calibration-shift-{group[0].model}-{name[:6]}")
            yield Drawing(stem, table, shift.shift_figure, (title,))


def _protocols(records: Iterable[Record]) -> list[list[Record]]:
    """Runs with the same task, model, dataset and seed, by method and bits."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda r: (r.model, r.dataset, label(r), r.bits, r.key)):
        groups[_protocol(record)].append(record)
    return list(groups.values())


def _protocol(record: Record) -> str:
    """A hash of the settings that the runs of a figure share.

    Known states are compared with another method at the run's own bits, which their fingerprint names.
    """
    parts = {name: record.config.get(name) for name in PROTOCOL}
    if record.task in _KNOWN_STATES:
        parts["dataset"] = {**(parts["dataset"] or {}), "fingerprint": record.dataset}
    return run_key(parts)


def _suffix(group: Sequence[Record]) -> str:
    first = group[0]
    return f"{first.model}-{first.dataset}-{_protocol(first)[:6]}"


def _quantized(group: Sequence[Record]) -> list[Record]:
    return [record for record in group if record.baseline_key is not None]


def _errors(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    runs = _quantized(group)
    for record in runs:
        title = f"{named(record)} bits on {model_name(record.model)}: error by stages"
        table = errors.steps_table(record, store)
        yield Drawing(f"error-steps-{named(record)}", table, errors.steps_figure, (title,))
    if runs:
        title = f"Errors on {_where(group)}"
        yield Drawing("error-places", errors.places_table(runs, store), errors.places_figure, (title,))


def _where(group: Sequence[Record]) -> str:
    words = ", ".join(protocol_departures(group[0]))
    return f"{model_name(group[0].model)}, {group[0].dataset}{f' ({words})' if words else ''}"


def _norms(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    table = tni.norms_table(group[0], store)
    where = _where(group)
    yield Drawing("tni-boxes", table, tni.boxes_figure, (f"Token norms over layers and heads: {where}",))
    yield Drawing("tni-layers", table, tni.layers_figure, (f"Token norms by layer, a box over heads: {where}",))
    yield Drawing("tni-heat", table, tni.heat_figure, (f"Where tokens are low in norm: {where}",))
    for record in _quantized(group):
        title = f"{named(record)} bits on {model_name(record.model)}: ranges, bounds and errors"
        numbers = tni.groups_table(record, store)
        yield Drawing(f"tni-groups-{named(record)}", numbers, tni.groups_figure, (title,))


def _modalities(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    where = _where(group)
    tokens = modality.tokens_table(group[0], store)
    if not tokens.empty:
        title = f"Token norms by modality, from the least to the largest head: {where}"
        yield Drawing("modality-tokens", tokens, modality.tokens_figure, (title,))
    layers = modality.layers_table(group[0], store)
    if not layers.empty:
        yield Drawing("modality-layers", layers, modality.layers_figure, (f"Spread of norms by modality: {where}",))


def _distributions(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    record = group[0]
    title = f"Closeness to N(0, 1): {_where(group)}"
    yield Drawing("distribution-kl", distribution.closeness_table(record), distribution.closeness_figure, (title,))
    layers = distribution.layers_table(record, store)
    synthetic = errors.rows_of(record, store, "synthetic")
    title = f"NSN by layer: {_where(group)} (solid: keys, dotted: values, dashed: synthetic)"
    yield Drawing("distribution-layers", layers, distribution.layers_figure, (synthetic, title))
    yield from _channels(record, store, _where(group))


def _channels(record: Record, store: Store, where: str) -> Iterable[Drawing]:
    covariances = channels.covariances_table(record, store)
    title = f"Covariances of channels behind NSN: {where}"
    yield Drawing("distribution-covariances", covariances, channels.covariances_figure, (title,))
    ranges = channels.ranges_table(record, store)
    if not ranges.empty:
        title = f"Covariances by channel behind NSN, layer {ranges['layer'].min()}: {where}"
        yield Drawing("distribution-ranges", ranges, channels.ranges_figure, (title,))
    moments = channels.moments_table(record, store)
    title = f"Channels behind NSN and Hadamard: {where}"
    yield Drawing("distribution-channels", channels.scattered(moments), channels.scatter_figure, (title,))
    first = channels.one_head(moments)
    title = f"Channels by steps of NSN, layer {first['layer'].min()}, head 0: {where}"
    yield Drawing("distribution-steps", first, channels.steps_figure, (title,))
    magnitudes = channels.magnitudes_table(record, store)
    if not magnitudes.empty:
        title = f"Magnitudes, layer {magnitudes['layer'].min()}, head 0: {where}"
        yield Drawing("distribution-magnitudes", magnitudes, channels.magnitudes_figure, (title,))


def _memory(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    table = memory.memory_table(group, store)
    yield Drawing("memory", table, memory.memory_figure, (f"Bytes of the cache: {model_name(group[0].model)}",))


def _throughputs(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    table = throughput.throughput_table(group, store)
    if not table.empty:
        title = f"Throughput and memory by batch: {model_name(group[0].model)} on {group[0].config.get('machine')}"
        yield Drawing("throughput", table, throughput.throughput_figure, (title,))


def _planes(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    table = errors.plane_table(_quantized(group), store)
    if table.empty:
        return
    sinks = "with" if group[0].config["task"].get("sink_outliers") else "without"
    parts = (
        (
            "neighbour_apart_error",
            f"Error of a sink's neighbours, relative to what sets keys apart; sinks {sinks} outlier channels",
        ),
        ("sink_error", f"Error of the sinks, relative to their norm; sinks {sinks} outlier channels"),
    )
    for quantity, title in parts:
        if quantity in table:
            yield Drawing(f"synthetic-{quantity}", table, errors.plane_figure, (quantity, title))


def _widths(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    table = valley.valley_table(group, store)
    if not table.empty and table["bits"].nunique() >= _FEWEST_WIDTHS:
        yield Drawing("widths", table, valley.valley_figure, (f"More bits, less loss? {_where(group)}",))


def _drawn_states(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    table = states.bars_table(_quantized(group), store)
    if not table.empty:
        title = f"Drawn states: {states.states_of(group[0].config['task'])}"
        yield Drawing("states-drawn", table, states.bars_figure, (title,))


def _model_states(group: Sequence[Record], store: Store) -> Iterable[Drawing]:
    table = states.layers_table(group, store)
    if not table.empty:
        words = ", ".join(
            [f"{model_name(group[0].model)}, {group[0].dataset}", *states.beside(group[0].config["task"])]
        )
        yield Drawing("states-layers", table, states.layers_figure, (f"Errors on a block of states: {words}",))


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
}


def embedding_drawings(records: Iterable[Record], store: Store, skipped: list[str] | None = None) -> Iterator[Drawing]:
    """t-SNE of the tokens that `task=distribution` kept, a figure for every model with two corpora or more.

    `skipped` takes the reasons of runs that it cannot be made of; None raises them.

    Raises:
        RecordError: samples that are missing.
    """
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.task == "distribution" and record.status == "done":
            name = run_key({"model": record.config.get("model"), "task": record.config.get("task")})
            groups[name].append(record)
    for name, group in groups.items():
        if len({r.dataset for r in group}) < 2:
            continue
        kept = _sound(group, functools.partial(distribution.kept_vectors, store=store), "embedding", skipped)
        if kept is not None and not kept.empty:
            title = f"Tokens of {model_name(group[0].model)}, layer {kept['layer'].iloc[0]}, one head"
            stem = file_name(f"distribution-tsne-{group[0].model}-{name[:6]}")
            yield Drawing(stem, kept, distribution.embedding_figure, (title,), distribution.embedding_table)

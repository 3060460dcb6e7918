"""`task=latency`, `task=throughput`: time and memory by batch and context, with references.

A cell of their grid is a batch of random prompts, timed in a process of its own. In every repeat the method and its
references alternate, each with a new cache, so that drift of the machine's speed affects all; ratios are of pairs.
"""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvq.cache import KVCache
from kvq.cache.packed import PreallocatedCache
from kvq.calibration import files
from kvq.calibration.fit import bind_calibration
from kvq.codecs import Codec
from kvq.config import Config
from kvq.config.diagnostics import LatencyConfig, References, Regime, SpeedConfig, ThroughputConfig
from kvq.config.run import Attention
from kvq.errors import Unsupported
from kvq.methods.build import method_of
from kvq.methods.method import Method, bind_kept_keys
from kvq.models.inputs import Inputs, with_cache_dtype
from kvq.models.layers import head_dims_of
from kvq.models.load import LoadedModel, load_model, pick_device
from kvq.results.files import Journal
from kvq.results.provenance import PeakMemory, bytes_in_use, cpu_name, device_name, now
from kvq.tasks import steps
from kvq.tasks.measurement import Baseline, Measurement, Task, units_like
from kvq.tasks.steps import Row, cache_maker, median_of, paired_ratio, step_metrics

SUBJECT = "method"
"""Name of the run's method among the subjects of a cell."""
UNITS = {
    "overhead_*": "%",
    "cache_bytes_*": "bytes",
    "prefill_share_*": "fraction",
    "decode_share_*": "fraction",
    "largest_batch": "requests",
    "*over_*": "x",
    "*tokens_per_second*": "tokens/s",
    "*": "s",
}


def check_length(inputs: Inputs, setting: str, tokens: int, method: Method) -> None:
    """Raise `ConfigError` for more tokens than the model takes, `Unsupported` for codes that attention cannot read."""
    inputs.check_tokens(tokens, f"{setting} and task.new_tokens: {tokens} tokens;", "")
    if inputs.config.cache.attention is Attention.packed and not method.is_full_precision:
        method.check_packed()


def fingerprint(inputs: Inputs) -> str:
    """The machine, to which a time belongs: processor or GPU, and number of threads."""
    device = pick_device(inputs.config.device)
    threads = inputs.config.threads or torch.get_num_threads()
    return cpu_name() + f", {threads} threads" if device.type == "cpu" else device_name(device)


def cells(config: Config, grid: list[tuple[int, int]], growing: bool = False) -> list[dict[str, Any]]:
    """Rows of a grid's cells, each in a fresh process; `growing`: what did not fit is not tried again."""
    rows: list[dict[str, Any]] = []
    for batch, tokens in grid:
        known = frozenset(row["subject"] for row in rows if growing and not row["fits"])
        if SUBJECT in known:
            break
        # A new process starts with a cold allocator and without the peak memory of other cells.
        # Ctrl-C reaches it too; this process then ends it (`kvq.entry`).
        context, ignored = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)
        with ProcessPoolExecutor(1, context, initializer=signal.signal, initargs=ignored) as pool:
            rows += pool.submit(cell, config, batch, tokens, known).result()
    return rows


def cell(config: Config, batch: int, tokens: int, without: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """Seconds, bytes and peaks by phase per repeat and subject; out of GPU memory: one row, `fits` false."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    loaded = with_cache_dtype(load_model(config.model, config.device), config)
    task: SpeedConfig = config.task
    generator = torch.Generator().manual_seed(config.seed)
    prompt = torch.randint(0, loaded.text_config.vocab_size, (batch, tokens), generator=generator).to(loaded.device)
    method = _method(config, loaded)
    room = tokens + task.new_tokens
    makers = {name: make for name, make in _makers(config, method, loaded, room) if name not in without}
    rows: list[dict[str, Any]] = []
    merged = nullcontext() if method.merged is None else method.merged.in_weights(loaded.model)
    place = {"batch": batch, "tokens": tokens}
    with merged, torch.inference_mode():
        for repeat in range(-task.warmup, task.repeats):
            for name, make in list(makers.items()):
                here, row = place | {"subject": name, "repeat": repeat}, None
                with suppress(torch.OutOfMemoryError):
                    row = timed(loaded, make(), prompt, task.new_tokens)
                if row is None:
                    torch.cuda.empty_cache()  # after the error, whose traceback kept tensors alive
                    del makers[name]
                    rows = [*(row for row in rows if row["subject"] != name), here | {"repeat": 0, "fits": False}]
                elif repeat >= 0:
                    rows.append(here | {"fits": True} | row)
            for name, row in _watched(config, loaded, prompt):
                if repeat >= 0:
                    rows.append(place | {"subject": name, "repeat": repeat, "fits": True} | row)
    return rows


def _watched(config: Config, loaded: LoadedModel, prompt: Tensor) -> Iterator[tuple[str, dict[str, Any]]]:
    """A prefill and decoding by steps, where asked for and where the GPU has the memory for it."""
    task: Any = config.task
    watched: dict[str, Callable[[Method], dict[str, Any]]] = {}
    if getattr(task, "prefill_steps", False):
        watched[steps.PREFILL] = lambda own: steps.watched_prefill(loaded, own, prompt)
    if getattr(task, "decode_steps", False):
        watched[steps.DECODE] = lambda own: steps.watched_decode(loaded, own, prompt, task.new_tokens)
    for name, measure in {} if config.method.is_full_precision else watched.items():
        try:
            yield name, measure(_method(config, loaded))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()


def _method(config: Config, loaded: LoadedModel) -> Method:
    """The run's method, with its calibration."""
    method = method_of(config, head_dims_of(loaded.text_config)[0])
    if method.policy("kept_keys") is not None:
        method = bind_kept_keys(method, Inputs(config).tokenizer)
    if not method.needs_calibration:
        return method
    return bind_calibration(method, loaded.model, files.file_of(Inputs(config)))  # which the run has written


def _makers(config: Config, method: Method, loaded: LoadedModel, room: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    # Full precision has no codes to attend to.
    attention = "dense" if method.is_full_precision else config.cache.attention.value
    kept = config.cache.keep_decoded
    yield SUBJECT, lambda: KVCache(loaded, method, kept, attention=attention)
    if getattr(config.task, "decode_steps", False) and (plain := steps.without_norms(method)) is not None:
        yield steps.PLAIN, lambda: KVCache(loaded, plain, kept, attention=attention)
    # Full precision has no past to decode.
    for regime in [] if method.is_full_precision else getattr(config.task, "regimes", []):
        yield regime.value, cache_maker(regime, loaded, method)
    if References.preallocated in config.task.references:
        yield References.preallocated.value, lambda: PreallocatedCache(loaded.model, room)
    if References.dynamic in config.task.references:
        yield References.dynamic.value, lambda: DynamicCache(config=loaded.model.config)


def timed(loaded: LoadedModel, cache: Any, prompt: Tensor, new_tokens: int) -> dict[str, Any]:
    """Read prompts and decode greedily; seconds of both, and their peak bytes above the memory in use before."""
    before, peak = bytes_in_use(loaded.device), PeakMemory(loaded.device)
    start = now(loaded.device)
    token = steps.next_token(loaded, prompt, cache)
    read, prefill_peak = now(loaded.device) - start, peak.read()
    peak = PeakMemory(loaded.device)
    took = steps.decode(loaded, cache, token, new_tokens)
    row = {"prefill_seconds": read, "decode_seconds": sum(took), "step_seconds_median": statistics.median(took)}
    peaks = {"prefill_peak_bytes": prefill_peak, "decode_peak_bytes": peak.read()}
    stored = [] if hasattr(cache, "nbytes") else [x for layer in cache.layers for x in (layer.keys, layer.values)]
    size = int(getattr(cache, "nbytes", sum(states.numel() * states.element_size() for states in stored)))
    return row | {name: top and top - before for name, top in peaks.items()} | {"cache_bytes": size}


def paired_ratios(rows: list[Row], value: Callable[[Row], float], subject: str = SUBJECT) -> dict[str, float]:
    """For each reference that fits, the median over repeats of subject / reference."""
    fitting = dict.fromkeys(row["subject"] for row in rows if row.get("fits", True))
    return {name: paired_ratio(rows, value, subject, name) for name in fitting if name in set(References)}


def mean_of(rows: list[Row], subject: str, value: Callable[[Row], float]) -> float:
    """The mean over repeats of a subject."""
    return statistics.fmean(value(row) for row in rows if row["subject"] == subject)


def measure_latency(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Medians and means for every cell, ratios to the references, and every repeat as a sample."""
    task: LatencyConfig = inputs.config.task
    grid = list(itertools.product(sorted(task.batches), sorted(task.contexts)))
    rows = cells(inputs.config, grid)
    metrics: dict[str, float] = {}

    def mean_step(row: Row) -> float:
        return float(row["decode_seconds"]) / task.new_tokens

    for batch, context in grid:
        here = [row for row in rows if (row["batch"], row["tokens"]) == (batch, context)]
        name = f"b{batch}_t{context}"
        if not all(row["fits"] for row in here if row["subject"] not in set(References)):
            raise Unsupported(f"task.batches={batch} at task.contexts={context}: does not fit the memory of the device")
        prefill, step = itemgetter("prefill_seconds"), itemgetter("step_seconds_median")
        metrics |= _time_metrics("prefill", name, here, SUBJECT, prefill, prefill)
        metrics |= _time_metrics("decode", name, here, SUBJECT, step, mean_step)
        for regime in () if method.is_full_precision else task.regimes:
            one = _time_metrics(f"decode_{regime}", name, here, regime, step, mean_step)
            over = {key.removeprefix("decode_"): ratio for key, ratio in one.items() if f"_{regime}_over_" in key}
            metrics |= one | {f"overhead_{key}": 100 * (ratio - 1) for key, ratio in over.items()}
        metrics |= step_metrics(name, here, SUBJECT)
        metrics[f"cache_bytes_{name}"] = float(here[0]["cache_bytes"])
    return Measurement(metrics, units_like(metrics, UNITS), rows)


def _time_metrics(
    part: str, cell: str, rows: list[Row], subject: str, middle: Callable[[Row], float], mean: Callable[[Row], float]
) -> dict[str, float]:
    """Medians of seconds and of ratios to references, and as `<part>_mean` means, which flushes of residuals are in."""
    metrics = {f"{part}_{cell}": median_of(rows, subject, middle), f"{part}_mean_{cell}": mean_of(rows, subject, mean)}
    for reference, ratio in paired_ratios(rows, middle, subject).items():
        of_means = metrics[f"{part}_mean_{cell}"] / mean_of(rows, reference, mean)
        metrics |= {f"{part}_over_{reference}_{cell}": ratio, f"{part}_mean_over_{reference}_{cell}": of_means}
    return metrics


def check_latency(inputs: Inputs, method: Method) -> None:
    """Raise for contexts that the model does not take, or a method that `cache.attention` cannot serve."""
    task: LatencyConfig = inputs.config.task
    check_length(inputs, f"task.contexts={task.contexts}", max(task.contexts) + task.new_tokens, method)
    if task.regimes:
        method.check_needs("task.regimes", "two_codecs")
        own = any(codec is not None and type(codec) is not Codec for codec in (method.key, method.value))
        if own and {Regime.per_head, Regime.compiled} & set(task.regimes):
            raise Unsupported(f"task.regimes: a codec of {method.name} decodes its own way, not per_head or compiled")
    if method.is_full_precision:
        return
    if Regime.packed in task.regimes:
        method.check_packed()
    packed = inputs.config.cache.attention is Attention.packed
    if task.prefill_steps and packed:
        raise Unsupported("task.prefill_steps: packed attention encodes in one pass; use cache.attention=dense")
    if task.decode_steps and not packed:
        raise Unsupported("task.decode_steps: the steps of attention on codes; use cache.attention=packed")
    for setting in ("prefill_steps", "decode_steps"):
        if getattr(task, setting):
            method.check_needs(f"task.{setting}", "two_codecs", "fixed_bits")


def measure_throughput(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Generated tokens per second for every batch, and every repeat as a sample."""
    task: ThroughputConfig = inputs.config.task
    rows = cells(inputs.config, [(batch, task.prompt) for batch in sorted(task.batches)], growing=True)
    metrics = rates_of(rows, task.new_tokens)
    return Measurement(metrics, units_like(metrics, UNITS), rows)


def rates_of(rows: list[dict[str, Any]], new_tokens: int) -> dict[str, float]:
    """Rates and ratios of every batch that fits, and of the largest ones.

    `tokens_per_second` is over prefill and decoding, `decode_tokens_per_second` only over decoding. `largest_batch`
    fits; `over_<reference>_largest` and `largest_batch_over_<reference>` compare each at its own largest batch, where a
    larger one did not fit the reference.
    """

    def rate(row: dict[str, Any], prefill: bool = True) -> float:
        return row["batch"] * new_tokens / (row["prefill_seconds"] * prefill + row["decode_seconds"])

    metrics: dict[str, float] = {}
    rates: dict[str, dict[int, float]] = {}
    for batch in sorted({row["batch"] for row in rows if row["subject"] == SUBJECT and row["fits"]}):
        here = [row for row in rows if row["batch"] == batch]
        for subject in dict.fromkeys(row["subject"] for row in here if row["fits"]):
            rates.setdefault(subject, {})[batch] = median_of(here, subject, rate)
        metrics[f"tokens_per_second_b{batch}"] = rates[SUBJECT][batch]
        metrics[f"decode_tokens_per_second_b{batch}"] = median_of(here, SUBJECT, partial(rate, prefill=False))
        for reference, ratio in paired_ratios(here, rate).items():
            metrics[f"over_{reference}_b{batch}"] = ratio
        metrics[f"cache_bytes_b{batch}"] = float(next(row for row in here if row["subject"] == SUBJECT)["cache_bytes"])
    if SUBJECT not in rates:
        raise Unsupported(f"task.batches={rows[0]['batch']}: does not fit the memory of the device")
    mine = max(rates[SUBJECT])
    metrics["largest_batch"] = float(mine)
    for reference in sorted({row["subject"] for row in rows if not row["fits"]} & rates.keys() - {SUBJECT}):
        theirs = max(rates[reference])
        metrics[f"largest_batch_over_{reference}"] = mine / theirs
        metrics[f"over_{reference}_largest"] = rates[SUBJECT][mine] / rates[reference][theirs]
    return metrics


def check_throughput(inputs: Inputs, method: Method) -> None:
    """Raise for requests that the model does not take, or a method that `cache.attention` cannot serve."""
    task: ThroughputConfig = inputs.config.task
    check_length(inputs, f"task.prompt={task.prompt}", task.prompt + task.new_tokens, method)


TASKS = {
    "latency": Task(check_latency, measure_latency, fingerprint),
    "throughput": Task(check_throughput, measure_throughput, fingerprint),
}

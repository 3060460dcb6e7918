"""The registry of metrics: unit, whether less is better, title and number format of each.

A metric that is not listed (of a task outside the package, of lm-eval) is shown by its name with its record's unit.
A part, `accuracy[length=512]`, is the quantity before the bracket.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from kvq.errors import RecordError

Better = Literal["lower", "higher", ""]


class Metric(NamedTuple):
    """A measured quantity.

    Attributes:
        name: as records spell it.
        unit: of the number in a record.
        title: with the unit that is shown.
        short: title for a narrow column.
        digits, scale, signed: decimals, the factor of what is shown (100: percent), whether a plus sign is shown.
        better: whether less or more is better; empty: neither.
        role: `size` (what a run costs), `quality` (what it scores), empty (bookkeeping).
    """

    name: str
    unit: str
    title: str
    short: str
    digits: int = 3
    scale: float = 1.0
    signed: bool = False
    better: Better = ""
    role: Literal["size", "quality", ""] = ""


def _quality(name: str, unit: str, title: str, short: str, digits: int, better: Better, **more: object) -> Metric:
    return Metric(name, unit, title, short, digits, better=better, role="quality", **more)  # type: ignore[arg-type]


def _share(
    name: str, title: str, short: str, digits: int = 1, better: Better = "higher", signed: bool = False
) -> Metric:
    return Metric(name, "fraction", title, short, digits, 100.0, signed, better, "quality")


def _less(name: str, title: str) -> Iterable[Metric]:
    """By how much an error is below another method's, on average, and in the draws or layers of least and most."""
    for kind in ("", "least", "most"):
        known = f"{name}_reduction_{kind}".removesuffix("_")
        words = f"{title}: less than the other's (%)" + (f", {kind}" if kind else "")
        yield Metric(known, "fraction", words, f"{kind} less%".lstrip(), 1, 100.0, True, "higher")


def _noise(name: str, words: str) -> Iterable[Metric]:
    """How far full precision's texts are from themselves under another rounding."""
    yield Metric(f"noise_{name}_left", "fraction", f"Full precision {words}: texts that change (%)", "Noise%", 1, 100.0)
    yield Metric(f"noise_{name}_kept_tokens", "tokens", f"Full precision {words}: tokens before", "Noise", 1)


def _check(name: str, title: str, short: str) -> Iterable[Metric]:
    """A check of answers: the share that passes, its difference from full precision's, and the items that differ."""
    yield _share(name, f"{title} (%)", short)
    yield _share(f"delta_{name}", f"Δ {title} (points)", f"Δ {short}", signed=True)
    yield _quality(f"{name}_lost", "items", f"{title}: lost (items)", f"-{short}", 0, "lower")
    yield _quality(f"{name}_gained", "items", f"{title}: gained (items)", f"+{short}", 0, "higher")
    yield Metric(f"{name}_p", "probability", f"p of {title}", f"p {short}", 4)


def _count(name: str, unit: str, title: str) -> Metric:
    return Metric(name, unit, title, name, 0)


METRICS = {
    metric.name: metric
    for metric in (
        Metric("bits_per_element", "bits", "Measured bits/element", "Meas.", role="size"),
        Metric("effective_bits", "bits", "Effective bits/element", "Eff.", role="size"),
        Metric("expanded_bits", "bits", "Effective bits/element of keys and values expanded from a latent", "Exp."),
        _quality("perplexity", "1", "Perplexity", "PPL", 3, "lower"),
        _quality("delta_perplexity", "1", "Δppl", "Δppl", 3, "lower", signed=True),
        _quality("delta_nll", "nats/token", "ΔNLL (nats/token)", "ΔNLL", 4, "lower", signed=True),
        _quality("kl_mean", "nats/token", "KL mean (nats)", "KL", 4, "lower"),
        _quality("kl_median", "nats/token", "KL median (nats)", "p50", 5, "lower"),
        _quality("kl_p99", "nats/token", "KL p99 (nats)", "p99", 3, "lower"),
        _quality("kl_p999", "nats/token", "KL p99.9 (nats)", "p99.9", 3, "lower"),
        _quality("kl_max", "nats/token", "KL max (nats)", "Max", 2, "lower"),
        _share("top1_agreement", "Top-1 agreement (%)", "Top-1%", 2),
        _share("accuracy", "Accuracy (%)", "Acc%"),
        _share("delta_accuracy", "Δ accuracy (points)", "Δ", signed=True),
        _share("score", "Score (%)", "Score%"),
        _share("delta_score", "Δ score (points)", "Δ", signed=True),
        _quality("lost", "items", "Lost (items)", "Lost", 0, "lower"),
        _quality("gained", "items", "Gained (items)", "Gained", 0, "higher"),
        _share("wrong_needle", "Wrong needle (%)", "Wrong", better="lower"),
        _share("bit_mixing", "Bit-mixing (%)", "Mix", better="lower"),
        _share("bit_mixing_random", "Bit-mixing of random strings (%)", "Rand.", better=""),
        _share("other", "Other (%)", "Other", better="lower"),
        _share("rouge_l", "ROUGE-L against full precision (%)", "R-L"),
        *_check("valid_json", "valid JSON", "JSON%"),
        *_check("schema_valid", "arguments that fit the schema", "Schema%"),
        *_check("right_function", "right function", "Func.%"),
        *_check("right_arguments", "right arguments", "Args%"),
        _share("same_answers", "Answers that are full precision's (%)", "Same%"),
        _quality("same_tokens", "tokens", "Tokens until they differ from full precision", "Same", 0, "higher"),
        _quality("kept_tokens", "tokens", "Tokens before the text leaves full precision's", "Kept", 1, "higher"),
        _share("left", "Texts that leave full precision's (%)", "Left%", better="lower"),
        _share("same_share", "Steps with full precision's token (%)", "Same%", 2),
        Metric("drift", "1", "Slope of log KL over log tokens written", "Drift", 2, signed=True, better="lower"),
        _share("acceptance", "Drafted tokens that the target keeps (%)", "Acc.%"),
        _quality("tokens_per_forward", "tokens", "Tokens per forward of the target", "Per fwd", 2, "higher"),
        _share("equal_texts", "Texts that are the target's own (%)", "Equal%"),
        Metric("ended", "fraction", "Texts that end (%)", "End%", 1, 100.0),
        *_noise("batch", "in batches"),
        *_noise("dtype", "with a cache of another dtype"),
        _share("repetition", "Repeated n-grams (%)", "Rep%", better="lower"),
        Metric("hit", "fraction", "Hits (%)", "Hit%", 1, 100.0, better="higher"),
        Metric("bit_mixing_p", "probability", "p of bit-mixing", "p", 4),
        Metric("subset_mean", "fraction", "Mean over subsets (%)", "Mean%", 1, 100.0, better="higher"),
        Metric("nll", "nats/token", "NLL (nats/token)", "NLL", 4, better="lower"),
        Metric("base_perplexity", "1", "Perplexity of the base", "Base", 3),
        Metric("preset_nll", "nats/token", "NLL of the preset (nats/token)", "Preset", 4, better="lower"),
        Metric("preset_off", "nats/token", "NLL of the preset over the engine's (nats/token)", "Off", 4, signed=True),
        Metric("preset_kl", "nats/token", "KL of the preset to full precision (nats)", "Preset KL", 5),
        Metric("agreement_kl", "nats/token", "KL of the engine to the preset (nats)", "Between", 5),
        Metric("agreement_correlation", "1", "Correlation of the tokens' KL, engine and preset", "Corr.", 3),
        Metric("agreement_kl_q8", "nats/token", "KL to the preset with queries in 8 bits (nats)", "Between, q8", 6),
        Metric("agreement_correlation_q8", "1", "Correlation with queries in 8 bits", "Corr., q8", 3),
        Metric("agreement_kl_stored", "nats/token", "KL to PyTorch on the engine's stored states (nats)", "Stored", 6),
        Metric("preset_kl_self", "nats/token", "KL of the preset to itself after a rounding error (nats)", "Itself", 5),
        Metric("kl_sum", "nats/token", "Sum of the KL of each side of each layer alone (nats)", "Sum", 4),
        Metric("kl_sum_keys", "nats/token", "of that, keys (nats)", "Keys' sum", 4),
        Metric("sum_correlation", "1", "Rank correlation of sums and measured KL, random sets", "Rank corr.", 3),
        Metric("key_bits", "bits", "Bits/element of keys", "Keys"),
        Metric("value_bits", "bits", "Bits/element of values", "Values"),
        Metric("index_bits", "bits", "Huffman code (bits/index)", "Huffman"),
        Metric("index_entropy", "bits", "Entropy of the indices (bits/index)", "Entropy"),
        _count("packed_bytes", "bytes/sequence", "Packed (bytes/sequence)"),
        _count("total_bytes", "bytes/sequence", "Stored (bytes/sequence)"),
        _count("state_bytes", "bytes/sequence", "States of fixed size (bytes/sequence)"),
        Metric("state_bits", "bits", "States of fixed size (bits/element of keys and values)", "States"),
        _count("sent_bytes", "bytes/sequence", "Sent as stored (bytes/sequence)"),
        _count("zstd_bytes", "bytes/sequence", "Sent through zstd (bytes/sequence)"),
        _count("deflate_bytes", "bytes/sequence", "Sent through DEFLATE (bytes/sequence)"),
        _count("order0_bytes", "bytes/sequence", "Sent by an ideal order-0 coder (bytes/sequence)"),
        Metric("sent_bits", "bits", "Sent as stored (bits/element)", "Sent", better="lower"),
        Metric("zstd_bits", "bits", "Sent through zstd (bits/element)", "zstd", better="lower"),
        Metric("deflate_bits", "bits", "Sent through DEFLATE (bits/element)", "DEFLATE", better="lower"),
        Metric("order0_bits", "bits", "Sent by an ideal order-0 coder (bits/element)", "Order 0", better="lower"),
        _count("packed_tokens", "tokens", "Quantized tokens (mean over layers, keys and values)"),
        _count("residual_tokens", "tokens", "Tokens in full precision (mean over layers, keys and values)"),
        Metric("fork_difference", "nats", "Largest change of a log-probability by forking", "Fork", 6),
        Metric("shared_bytes", "bytes", "Continuations from forks (bytes)", "Forked", 0, better="lower"),
        Metric(
            "once_bytes",
            "bytes",
            "Continuations, the first turn's unchanged part once (bytes)",
            "Once",
            0,
            better="lower",
        ),
        Metric("separate_bytes", "bytes", "Continuations from caches of their own (bytes)", "Apart", 0, better="lower"),
        Metric("reload_difference", "nats", "Largest change of a log-probability by the file", "Reload", 6),
        *(
            Metric(f"{name}_rate", "MB/s", f"{words} (MB of the cache in 16 bits a second)", short, 1, better="higher")
            for name, words, short in (
                ("save", "Saved", "Save"),
                ("load", "Loaded", "Load"),
                ("compress", "Compressed", "Pack"),
                ("decompress", "Decompressed", "Unpack"),
            )
        ),
        _count("cached_tokens", "tokens", "Cached tokens"),
        _count("recompressed_tokens", "tokens/sequence", "Tokens encoded again (of a head, per sequence)"),
        Metric("recompression_error", "1", "Relative error of encoding again", "Again", 4, better="lower"),
        _count("scored_tokens", "tokens", "Scored tokens"),
        _count("windows", "windows", "Windows"),
        _count("items", "items", "Items"),
        _count("passages", "passages", "Passages"),
        _count("conversations", "conversations", "Conversations"),
        _count("skipped_items", "items", "Skipped items"),
        _count("cut_items", "items", "Items with a cut prompt"),
        _count("odd_items", "items", "Items scored otherwise than asked"),
        Metric("flips", "fraction", "Flips (%)", "Flips%", 1, 100.0, better="lower"),
        Metric("noise_flips", "fraction", "Flips by batch order (%)", "Noise%", 1, 100.0),
        Metric("p_value", "probability", "p", "p", 4),
        Metric("not_worse_p", "probability", "p of not worse", "p", 4),
        Metric("within_noise", "flag", "Within noise", "≈", 0),
        Metric("not_worse", "flag", "Not worse", "n.w.", 0),
        _count("prompt_tokens", "tokens", "Prompt tokens"),
        _count("read_tokens", "tokens", "Read tokens"),
        _count("new_tokens", "tokens", "New tokens"),
        _count("text_tokens", "tokens", "Text tokens"),
        _count("image_tokens", "tokens", "Image tokens"),
        Metric("prefill_tokens_per_second", "tokens/s", "Prefill (tokens/s)", "Prefill", 0, better="higher"),
        Metric("decode_tokens_per_second", "tokens/s", "Decode (tokens/s)", "Decode", 1, better="higher"),
        Metric("key_mse", "1", "Squared error of keys", "K MSE", 5, better="lower"),
        *_less("key_mse", "Squared error of keys"),
        Metric("key_ip_error", "1", "Squared error of keys' inner products", "K ip", 4, better="lower"),
        Metric("key_ranking_error", "1", "Relative error of keys by the ranking query", "K rank.", 4, better="lower"),
        *_less("key_ranking_error", "Error of keys by the ranking query"),
        Metric("key_held_out_error", "1", "Relative error of keys by held-out queries", "K held", 4, better="lower"),
        *_less("key_held_out_error", "Error of keys by held-out queries"),
        Metric("value_mse", "1", "Squared error of values", "V MSE", 5, better="lower"),
        *_less("value_mse", "Squared error of values"),
        Metric("index_saved", "fraction", "Saved by the Huffman code (%)", "Saved%", 1, 100.0, better="higher"),
        Metric("correction_share", "fraction", "Numbers of the correction (% of the states)", "Corr.%", 1, 100.0),
        Metric("key_tier_error", "1", "Relative error in the first tier", "Tier", 4, better="lower"),
        Metric("key_demoted_error", "1", "then in the second", "Down", 4, better="lower"),
        Metric("key_promoted_error", "1", "then in the first again", "Up", 4, better="lower"),
        _count("places", "places", "Draws or layers"),
        _count("calibration_bytes", "bytes", "Tables of the calibration (bytes)"),
        Metric("calibration_bits", "bits", "Tables of the calibration (bits/element)", "Cal."),
        Metric("calibration_bits_32k", "bits", "Tables of the calibration at 32K tokens (bits/element)", "Cal. 32K"),
        Metric("calibration_bits_1m", "bits", "Tables of the calibration at 1M tokens (bits/element)", "Cal. 1M"),
        Metric("calibration_seconds", "s", "Calibration (s)", "Cal. s", 1, better="lower"),
        _count("calibration_peak_bytes", "bytes", "Peak of the calibration (bytes)"),
        Metric(
            "calibration_shared", "fraction", "13-grams of the calibration in the scored text (%)", "Shared%", 1, 100.0
        ),
    )
}

# Metrics of lm-eval of which less is better; of the others more is, unless they are listed above.
_LOWER = ("word_perplexity", "byte_perplexity", "bits_per_byte", "loss", "brier_score", "mse", "mae", "rmse")
_LOWER_TOO = ("wer", "cer", "ter", "toxicity")


AT_LENGTH = {
    metric.name: metric
    for metric in (
        Metric("total_bytes", "bytes", "Cache (GiB)", "GiB", 4, 2.0**-30, better="lower"),
        Metric("compression", "x", "Smaller than 16 bits (x)", "x less", 2, better="higher"),
        Metric("compression_without_residual", "x", "Smaller, residual aside (x)", "no resid.", 2, better="higher"),
        Metric("bits_without_residual", "bits", "Bits/element, residual aside", "bits", 3, better="lower"),
        Metric("state_bytes", "bytes", "States of fixed size (GiB)", "States", 4, 2.0**-30, better="lower"),
    )
}
"""Metrics of `task=memory`, which a record has for each number of tokens: `total_bytes_4096`."""
_AT_LENGTH = re.compile(rf"({'|'.join(AT_LENGTH)})_(\d+)")


def length_of(name: str) -> int | None:
    """The number of tokens of a metric of `AT_LENGTH`; None: of another."""
    match = _AT_LENGTH.fullmatch(name)
    return None if match is None else int(match[2])


def metric_of(name: str, unit: str | None = None) -> Metric:
    """The metric of a name; of one that is not listed, or not in this `unit`, its name, its unit and four decimals.

    A record's unit wins: 75 % of a task outside the package is no 7,500 % because a listed metric is a fraction.
    """
    listed = METRICS.get(name)
    if listed is not None and unit in (None, listed.unit):
        return listed
    if match := _AT_LENGTH.fullmatch(name):
        known, tokens = AT_LENGTH[match[1]], f"at {int(match[2]):,} tokens"
        return known._replace(name=name, title=f"{known.title}, {tokens}", short=f"{known.short} {tokens}")
    shown = name if unit in (None, "1") else f"{name} ({unit})"
    return Metric(name, unit or "1", shown, name, 4, better="lower" if is_lower_better(name) else "")


def is_lower_better(name: str) -> bool:
    """Whether less is better, by the name: `word_perplexity/none[wikitext]` is a perplexity."""
    quantity = re.split(r"[\[/,]", name, maxsplit=1)[0].lower().removeprefix("delta_")
    known = METRICS.get(quantity)
    return known.better == "lower" if known is not None and known.better else quantity in (*_LOWER, *_LOWER_TOO)


def units_of(names: Iterable[str], more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Units of metrics. A part and a standard error have the unit of the whole.

    Args:
        names: the metrics.
        more: units of metrics that are not listed here, such as another library's; "1": no unit.

    Raises:
        RecordError: a metric that is neither listed nor in `more`.
    """
    known = dict(more or {}) | {metric.name: metric.unit for metric in METRICS.values()}
    found = {name: known.get(name) or known.get(_whole(name)) for name in names}
    if lacking := [name for name, unit in found.items() if unit is None]:
        raise RecordError(f"metric '{lacking[0]}': no unit is known; add it to METRICS in kvq/results/metrics.py")
    return {name: unit for name, unit in found.items() if unit is not None}


def _whole(name: str) -> str:
    return name.partition("[")[0].removesuffix("_se")

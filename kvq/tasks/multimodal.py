"""`task=multimodal`, `task=modality`: models that see or hear, by their answers and by the norms of their tokens.

Answers are scored by the benchmark's rule. Published claims under test: OScaR (arXiv 2605.19660), section 4.1 and
Figures 19-21: with images norms vary more than in text-only models; they are smooth within a modality and differ
between modalities; some tokens have norms far above the others.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvq.config.diagnostics import ModalityConfig
from kvq.config.tasks import MultimodalConfig, Prefill
from kvq.diagnostics import imbalance, over_median, relative_norms, token_norms
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.methods.method import Method
from kvq.models.inputs import MODALITIES, Inputs, MediaModel, modalities
from kvq.models.load import LoadedModel, load_processor
from kvq.results.files import Journal
from kvq.results.metrics import units_of
from kvq.tasks import measurement
from kvq.tasks.items import Items, Sample, Scored, by_part, measure_items, write_answers
from kvq.tasks.measurement import Baseline, LayerStates, Measurement, Task
from kvq.tasks.media import JUDGED, MediaItem, decode_image, decode_recording, read_items, score_answer
from kvq.tasks.reader import Reader, answer_text

_ALWAYS = ("text_tokens", "image_tokens")
SIDES = ("query", "key", "value")
ALL = "all"
_SPREADS = {"cv": "variation", "max_over_min": "max_over_min", "max_over_median": "max_over_median"}


def items_of(inputs: Inputs) -> tuple[list[MediaItem], dict[str, str]]:
    """The items of a run and the skipped ones, read once."""
    task: MultimodalConfig | ModalityConfig = inputs.config.task
    name = repr((inputs.config.dataset, task.benchmark, task.limit))
    return inputs.shared("multimodal", name, lambda: read_items(inputs.config.dataset, task.limit))


def processor_of(inputs: Inputs) -> Any:
    """The processor of the model, which has to take what the items of a run hold."""
    return load_processor(inputs.config.model, {modality for item in items_of(inputs)[0] for modality, _ in item.media})


def prompt_of(
    processor: Any, item: MediaItem, device: torch.device
) -> tuple[Int[Tensor, "1 tokens"], dict[str, Tensor]]:
    """Tokens of the prompt by the processor's template, one for each piece of its media, and its further inputs."""
    given = defaultdict[str, list[Any]](list)
    for modality, data in item.media:
        if modality == "image":
            given["images"].append(decode_image(data))
        else:
            given["audio"].append(decode_recording(data, processor.feature_extractor.sampling_rate))
    if getattr(processor, "chat_template", None):
        content = [*({"type": modality} for modality, _ in item.media), {"type": "text", "text": item.prompt}]
        chat = [{"role": "user", "content": content}]
        text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    else:
        text = "\n".join((*(getattr(processor, f"{modality}_token") for modality, _ in item.media), item.prompt, ""))
    once = {"add_special_tokens": False} if text.startswith(processor.tokenizer.bos_token or "\0") else {}
    made = processor(text=[text], return_tensors="pt", **given, **once)
    tokens = made.pop("input_ids").to(device)
    return tokens, {name: made[name] for name in made if name != "attention_mask"}


def with_media(model: LoadedModel, processor: Any, item: MediaItem) -> tuple[MediaModel, Int[Tensor, "1 tokens"]]:
    """The model with the media of an item's prompt, and the prompt's tokens."""
    tokens, media = prompt_of(processor, item, model.device)
    return MediaModel(model.model, model.device, media, cache_dtype=model.cache_dtype), tokens


def answer(inputs: Inputs, method: Method, processor: Any, item: MediaItem) -> Scored:
    """The answer to one item, scored by its benchmark."""
    task: MultimodalConfig = inputs.config.task
    loaded, tokens = with_media(inputs.model, processor, item)
    reader = Reader(loaded, method, task.prefill, inputs.config.cache.keep_decoded)
    labels = modalities(loaded.model.config, tokens)
    counts = {f"{name}_tokens": int((labels == index).sum()) for index, name in enumerate(MODALITIES)}
    counts = {name: count for name, count in counts.items() if count or name in _ALWAYS}

    def sample(_: int, written: list[int]) -> Sample:
        text = answer_text(inputs.tokenizer, written, [])
        score = score_answer(task.benchmark, item, text)
        return {"item": item.name, "kind": item.kind or "other", "text": text, **score, **counts}

    try:
        (found,) = write_answers(reader, tokens.tolist(), task.max_new_tokens, reader.ends(inputs.tokenizer), sample)
    finally:
        loaded.forget()
    return found


def make_items(inputs: Inputs, processor: Any, answer: int) -> Items[MediaItem]:
    """Batches of one item, and skipped items with the reason; `answer`: tokens written after a prompt."""
    items, skipped = items_of(inputs)
    skipped, kept, longest = dict(skipped), [], inputs.longest_context
    for item in items:
        if inputs.config.task.benchmark == "mmau_pro" and len(item.choices) < 2 and item.instruction is None:
            skipped[item.name] = JUDGED
            continue
        try:
            tokens, _ = prompt_of(processor, item, torch.device("cpu"))
        except DataError as error:
            skipped[item.name] = str(error)
            continue
        if longest is not None and tokens.shape[1] + answer > longest:
            skipped[item.name] = f"{tokens.shape[1]} tokens and {answer} of an answer, the model takes {longest}"
        else:
            kept.append([item])
    return Items(kept, lambda item: item.name, skipped)


def check(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` for prompts in chunks, `ConfigError` for batches."""
    task: MultimodalConfig = inputs.config.task
    if task.bos is not None:
        raise Unsupported(f"task.bos={str(task.bos).lower()}: the model's processor writes the prompts of this task")
    if task.prefill is not Prefill.whole:
        raise Unsupported("task.prefill=chunked: an image is read in one forward; use task.prefill=whole")
    for setting, given, allowed in (("batch_size", task.batch_size, 1), ("noise_floor", task.noise_floor, False)):
        if given != allowed:
            raise ConfigError(f"task.{setting}={given}: task=multimodal asks one item at a time ({setting}={allowed})")


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Answer every item under `method`; a baseline is compared with item by item."""
    processor = processor_of(inputs)
    items = make_items(inputs, processor, inputs.config.task.max_new_tokens)

    def score(batch: Sequence[MediaItem]) -> list[Scored]:
        return [answer(inputs, method, processor, item) for item in batch]

    found = measure_items(items, score, inputs.config.task, journal, baseline, method.label)
    scored = [sample for sample in found.samples if "skipped" not in sample]
    metrics = found.metrics | by_part(scored, "kind", "accuracy")
    metrics |= by_part([sample for sample in scored if "rule" in sample], "rule", "accuracy")
    counts = {name for sample in scored for name in sample if name.endswith("_tokens")}
    metrics |= {name: sum(float(sample.get(name, 0)) for sample in scored) for name in {*_ALWAYS, *counts}}
    return Measurement(metrics, units_of(metrics), found.samples)


def fingerprint(inputs: Inputs) -> str:
    """Fingerprint of the items: questions, answers, media, and the model's context."""
    items, skipped = items_of(inputs)
    rows = []
    for item in items:
        hashes = (hashlib.sha256(data).hexdigest() for _, data in item.media)
        rows.append([*list(vars(item).values())[:6], *hashes, *(item.instruction or ())])
    return measurement.items_fingerprint(inputs, [*rows, skipped])


def norms_by_modality(loaded: MediaModel, tokens: Int[Tensor, " tokens"], layers: int = 0) -> list[dict[str, Any]]:
    """Rows of one prompt of `tokens`.

    `kind` modality: per layer, side and modality (and `all`), means over heads of `task=tni`'s statistics and of
    `max_over_median` among its tokens, and `relative`: their median norm over the median of all tokens. `kind` tokens:
    per side of `layers` layers evenly spread, `norms` [5, tokens] (least, quartiles, largest over heads) and `spans` of
    tokens of one modality, `[name, tokens]` each.
    """
    labels = modalities(loaded.model.config, tokens)
    parts = {ALL: torch.ones_like(labels, dtype=torch.bool)}
    parts |= {name: labels == index for index, name in enumerate(MODALITIES) if bool((labels == index).any())}
    rows: list[dict[str, Any]] = []
    boxes: dict[int, list[dict[str, Any]]] = defaultdict(list)

    def add(layer: LayerStates) -> None:
        """Add the norms of one layer."""
        for side in SIDES:
            norms, place = token_norms(getattr(layer, side)), {"layer": layer.index, "side": side}
            relative = relative_norms(norms)[0]
            for name, among in parts.items():
                part = norms[:, :, among.to(norms.device)]
                spread = {key: float(value.mean()) for key, value in vars(imbalance(part)).items()}
                row = {"kind": "modality", **place, "modality": name, "tokens": int(among.sum()), **spread}
                row["max_over_median"] = float(over_median(part).amax(-1).mean())
                rows.append(row | {"relative": float(relative[among.to(norms.device)].median())})
            levels = torch.tensor((0.0, 0.25, 0.5, 0.75, 1.0), dtype=norms.dtype, device=norms.device)
            boxes[layer.index].append({"kind": "tokens", **place, "norms": norms[0].quantile(levels, dim=0).tolist()})

    try:
        measurement.capture(loaded, tokens, add, **loaded.media_of(tokens[None].to(loaded.device)))
    finally:
        loaded.forget()
    values, counts = torch.unique_consecutive(labels, return_counts=True)
    spans = [[MODALITIES[value], count] for value, count in zip(values.tolist(), counts.tolist(), strict=True)]
    known = sorted(boxes)
    chosen = {known[step] for step in torch.linspace(0, len(known) - 1, min(layers, len(known))).long().tolist()}
    return rows + [row | {"spans": spans} for layer, own in boxes.items() if layer in chosen for row in own]


def measure_modality(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Norms of every prompt by modality; by position too for the first prompt, in some layers."""
    task: ModalityConfig = inputs.config.task
    processor = processor_of(inputs)
    items = make_items(inputs, processor, 0)
    rows: list[dict[str, Any]] = []
    for index, (item,) in enumerate(items.batches):
        loaded, tokens = with_media(inputs.model, processor, item)
        norms = norms_by_modality(loaded, tokens[0], 0 if index else task.layers)
        rows += [{"item": item.name, **row} for row in norms]
    if not rows:
        reasons = next(iter(items.skipped.values()), "no items")
        raise DataError(f"task=modality: no prompt can be read: {reasons}")
    metrics: dict[str, float] = {}
    found = [row for row in rows if row["kind"] == "modality"]
    for side, name in itertools.product(SIDES, (ALL, *MODALITIES)):
        end, more = ("", {}) if name == ALL else (f"[modality={name}]", {"relative": "relative"})
        for metric, key in (_SPREADS | more).items():
            metrics |= measurement.mean_metric(f"{side}_{metric}{end}", found, key, side=side, modality=name)
    metrics |= dict.fromkeys(_ALWAYS, 0.0)
    for row in found:
        if (row["side"], row["layer"]) == ("key", found[0]["layer"]) and row["modality"] != ALL:
            name = f"{row['modality']}_tokens"
            metrics[name] = metrics.get(name, 0.0) + row["tokens"]
    rows += [{"kind": "skipped", "item": name, "skipped": reason} for name, reason in items.skipped.items()]
    metrics |= {"items": float(len(items.batches)), "skipped_items": float(len(items.skipped))}
    return Measurement(metrics, measurement.units_like(metrics, {"*_tokens": "tokens", "*items": "items"}), rows)


def check_modality(inputs: Inputs, method: Method) -> None:
    """Raise `Unsupported` for a method: norms are those of a model's states."""
    if not method.is_full_precision:
        raise Unsupported("task=modality: looks at queries, keys and values before any method; method=fp16")


TASKS = {
    "multimodal": Task(check, measure, fingerprint, texts=lambda inputs: [one.question for one in items_of(inputs)[0]]),
    "modality": Task(check_modality, measure_modality, fingerprint),
}

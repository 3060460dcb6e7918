"""`task=multimodal`: questions about images, answered through the quantized cache, scored by the benchmark's rule."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvq.config.diagnostics import ModalityConfig
from kvq.config.tasks import MultimodalConfig, Prefill
from kvq.data.multimodal import MediaItem, choice_score, ocrbench_score, read_items
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.methods.method import Method
from kvq.models import LoadedModel
from kvq.models.inputs import Inputs
from kvq.models.load import load_processor
from kvq.models.media import MODALITIES, MediaModel, modalities
from kvq.results.journal import Journal
from kvq.results.metrics import units_of
from kvq.tasks.items import Items, Scored, by_part, measure_items, write_answers
from kvq.tasks.measurement import Baseline, Measurement, Task
from kvq.tasks.reader import Reader, answer_text, end_tokens, stop_at

_BESIDE = ("input_ids", "attention_mask")


def items_of(inputs: Inputs) -> tuple[list[MediaItem], dict[str, str]]:
    """The items of a run and the skipped ones, read once."""
    task: MultimodalConfig | ModalityConfig = inputs.config.task
    name = repr((inputs.config.dataset, task.benchmark, task.limit))

    def read() -> tuple[list[MediaItem], dict[str, str]]:
        items, skipped = read_items(inputs.config.dataset, task.benchmark)
        return items[: task.limit], skipped

    return inputs.shared("multimodal", name, read)


def question_of(item: MediaItem) -> str:
    """The question, with its choices below it where it has some."""
    letters = [f"{chr(65 + index)}. {choice}" for index, choice in enumerate(item.choices)]
    return "\n".join([item.question, *letters])


def prompt_of(
    processor: Any, item: MediaItem, device: torch.device
) -> tuple[Int[Tensor, "1 tokens"], dict[str, Tensor]]:
    """Tokens of the prompt, with one for each image patch, and the processor's further inputs.

    The prompt is the processor's chat template, or, where it has none, its image token before the question.

    Raises:
        DataError: an image that cannot be read.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(item.media)).convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise DataError("its image cannot be read") from error
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": question_of(item)}]
        chat = [{"role": "user", "content": content}]
        text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    else:
        text = f"{processor.image_token}\n{question_of(item)}\n"
    made = processor(images=[image], text=[text], return_tensors="pt")
    return made["input_ids"].to(device), {name: made[name] for name in made if name not in _BESIDE}


def with_media(model: LoadedModel, processor: Any, item: MediaItem) -> tuple[MediaModel, Int[Tensor, "1 tokens"]]:
    """The model with the image of an item's prompt, and the prompt's tokens.

    Raises:
        DataError: an image that cannot be read.
    """
    tokens, media = prompt_of(processor, item, model.device)
    return MediaModel(model.model, model.device, media, cache_dtype=model.cache_dtype), tokens


def answer(inputs: Inputs, method: Method, processor: Any, item: MediaItem) -> Scored:
    """The answer to one item, scored by its benchmark."""
    task: MultimodalConfig = inputs.config.task
    tokenizer = inputs.tokenizer
    loaded, tokens = with_media(inputs.model, processor, item)
    reader = Reader(loaded, method, task.prefill, inputs.config.cache.keep_decoded)
    ends = stop_at(tokenizer, end_tokens(loaded, tokenizer), [])
    try:
        (found,) = write_answers(reader, tokens.tolist(), task.max_new_tokens, ends)
    finally:
        loaded.forget()
    text, labels = answer_text(tokenizer, found.tokens, []), modalities(loaded.model.config, tokens)
    right = choice_score(item.answers[0], item.choices, text) if item.choices else None
    sample = {
        "item": item.name,
        "kind": item.kind or "other",
        "text": text,
        "score": ocrbench_score(item.source, item.answers, text) if right is None else right,
        **{f"{name}_tokens": int((labels == index).sum()) for index, name in enumerate(MODALITIES[:2])},
    }
    return Scored(sample, found.cost)


def make_items(inputs: Inputs, processor: Any, answer: int) -> Items[MediaItem]:
    """Batches of one item, and skipped items with the reason; `answer`: tokens written after a prompt."""
    items, skipped = items_of(inputs)
    skipped, kept, longest = dict(skipped), [], inputs.longest_context
    for item in items:
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
    """Raise `Unsupported` for audio and for prompts in chunks, `ConfigError` for batches."""
    task: MultimodalConfig = inputs.config.task
    if task.benchmark == "mmau_pro":
        raise Unsupported(
            "task.benchmark=mmau_pro: its questions are about recordings, and kvq feeds models text and images; "
            "kvq.data.multimodal has its items and its score"
        )
    if task.bos is not None:
        raise Unsupported(f"task.bos={str(task.bos).lower()}: the model's processor writes the prompts of this task")
    if task.prefill is not Prefill.whole:
        raise Unsupported("task.prefill=chunked: an image is read in one forward; use task.prefill=whole")
    for setting, given, allowed in (("batch_size", task.batch_size, 1), ("noise_floor", task.noise_floor, False)):
        if given != allowed:
            raise ConfigError(f"task.{setting}={given}: task=multimodal asks one item at a time ({setting}={allowed})")


def measure(inputs: Inputs, method: Method, baseline: Baseline | None, journal: Journal) -> Measurement:
    """Answer every item under `method`; a baseline is compared with item by item."""
    processor = load_processor(inputs.config.model)
    items = make_items(inputs, processor, inputs.config.task.max_new_tokens)

    def score(batch: Sequence[MediaItem]) -> list[Scored]:
        return [answer(inputs, method, processor, item) for item in batch]

    found = measure_items(items, score, inputs.config.task, journal, baseline, method.label)
    scored = [sample for sample in found.samples if "skipped" not in sample]
    metrics = found.metrics | by_part(scored, "kind", "accuracy")
    metrics |= {f"{name}_tokens": sum(float(s[f"{name}_tokens"]) for s in scored) for name in MODALITIES[:2]}
    return Measurement(metrics, units_of(metrics), found.samples)


def fingerprint(inputs: Inputs) -> str:
    """Fingerprint of the items: questions, answers, images, and the model's context."""
    digest = hashlib.sha256(repr(inputs.longest_context).encode())
    items, skipped = items_of(inputs)
    for item in items:
        row = [item.name, item.kind, item.source, item.question, item.answers, item.choices]
        digest.update(json.dumps([*row, hashlib.sha256(item.media).hexdigest()]).encode())
    digest.update(json.dumps(skipped, sort_keys=True).encode())
    return digest.hexdigest()


TASK = Task(check, measure, fingerprint, texts=lambda inputs: [item.question for item in items_of(inputs)[0]])

"""Loading a causal language model and its tokenizer, with a fingerprint, form and device of its weights."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from kvq.config import ModelConfig
from kvq.data.rows import go_offline_if_silent
from kvq.errors import ConfigError, DataError, Unsupported, one_line
from kvq.models.folder import delta_folder, files_read, folder_fingerprint, model_folder
from kvq.models.layers import state_layers_of
from kvq.models.weights import apply_delta, implant_outliers

# Buffers of old checkpoints, which follow from the configuration: causal masks [1, 1, positions, positions], their fill
# value, rotary frequencies; and what speaks in a model of which only the part that reads is loaded.
_NOT_READ = re.compile(r"(^|\.)((attn|attention)\.(masked_)?bias|rotary_emb\.inv_freq)$|^(talker|code2wav|token2wav)\.")
_last_config: tuple[str, Any] = ("", None)


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, where it runs, and the dtype in which caches keep its states (None: its own)."""

    model: Any  # a transformers PreTrainedModel, whose attributes torch.nn.Module does not type
    device: torch.device
    cache_dtype: torch.dtype | None = field(default=None, kw_only=True)

    @property
    def text_config(self) -> Any:
        """The transformers configuration of the language model."""
        return self.model.config.get_text_config()

    def hidden_states(self, tokens: Int[Tensor, "batch tokens"], cache: Any) -> Float[Tensor, "batch tokens hidden"]:
        """Final hidden states of `tokens`, which follow the tokens in `cache`; updates the cache.

        Where the cache expects a padded batch (`KVCache.pad`), those of padding mean nothing.
        """
        given: dict[str, Tensor] = {}
        base, padding, seen = base_of(self.model), getattr(cache, "padding", None), cache.get_seq_length()
        end = seen + tokens.shape[1]
        if state_layers_of(self.text_config):  # some such families number a text from 0 in every forward
            given["position_ids"] = torch.arange(seen, end, device=tokens.device)[None]
        if padding is not None:
            own = torch.arange(end, device=tokens.device) - torch.tensor(padding, device=tokens.device)[:, None]
            given["attention_mask"] = (own >= 0).long()
            if "position_ids" in inspect.signature(type(base).forward).parameters:
                given["position_ids"] = own[:, seen:].clamp_min(0)
        output = base(input_ids=tokens, past_key_values=cache, use_cache=True, **given)
        return output.last_hidden_state

    def logits(self, hidden: Float[Tensor, "*lead hidden"]) -> Float[Tensor, "*lead vocab"]:
        """Logits of some hidden states; a caller takes them in chunks to bound memory."""
        out, config = self.model.get_output_embeddings()(hidden).to(self.device), self.text_config
        if factor := getattr(config, "logit_scale", None):  # Cohere
            out = out * factor
        if divisor := getattr(config, "logits_scaling", None):  # Granite
            out = out / divisor
        if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
            out = torch.tanh(out / cap) * cap
        return out


def pick_device(name: str) -> torch.device:
    """`auto` is the first accelerator, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: no GPU is visible to torch; use device=cpu or auto")
    return torch.device(name)


def model_fingerprint(config: ModelConfig) -> str:
    """The weights' name in a run's key: a hash of a local folder's files, or a hub id with its commit."""
    if (local := folder_fingerprint(config)) is not None:
        return local
    file = "" if config.gguf is None else f"/{config.gguf}"
    return f"{config.path}{file}@{_commit(config.path, config.gguf, config.revision, config.trust_remote_code)}"


@lru_cache(maxsize=64)
def _commit(path: str, gguf: str | None, revision: str | None, trusted: bool) -> str:
    """The commit of a hub id, asked for once in a process: every run of a sweep needs it several times."""
    config = ModelConfig(path=path, gguf=gguf, revision=revision, trust_remote_code=trusted)
    found = getattr(_config_of(config), "_commit_hash", None)
    return found or revision or "main"


def _from_hub(config: ModelConfig, kind: Any, /, **settings: Any) -> Any:
    """`kind.from_pretrained` for `model.path`; any failure becomes a one-line `DataError`.

    Code that comes with the model runs only with `model.trust_remote_code=true`; otherwise transformers would prompt.
    """
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    folder = model_folder(config.path)
    if folder.startswith(("/", ".", "~")) and not Path(folder).is_dir():
        raise DataError(f"model.path={config.path}: no such folder")
    settings["trust_remote_code"] = config.trust_remote_code
    local = Path(folder).is_dir()
    if config.gguf is not None:
        settings["gguf_file"] = config.gguf
    elif local:
        files_read(Path(folder), config.path, config.trust_remote_code)
    try:
        if not local:
            go_offline_if_silent()
        with gguf_support(config):
            return kind.from_pretrained(folder, revision=config.revision, **settings)
    except (Unsupported, KeyboardInterrupt, SystemExit):
        raise
    # Readers of weights, tokenizers and configurations raise different errors; all mean that loading failed. A panic in
    # a library that is written in Rust is no `Exception`.
    except BaseException as error:
        said = one_line(error, 300)
        if "trust_remote_code" in str(error) and not config.trust_remote_code:
            said = "it brings code of its own; model.trust_remote_code=true runs it"
        raise DataError(f"model.path={config.path}: cannot be loaded: {said}") from error


def _check_whole(config: ModelConfig, found: dict[str, Any]) -> None:
    """Refuse checkpoints with missing, mismatched or unexpected weights, which transformers initializes or ignores."""
    mismatched = [f"{name} ({list(given)}, not {list(wanted)})" for name, given, wanted in found["mismatched_keys"]]
    unexpected = [name for name in found["unexpected_keys"] if not _NOT_READ.search(name)]
    problems = {"missing": found["missing_keys"], "mismatched": mismatched, "unexpected": unexpected}
    said = []
    for kind, names in problems.items():
        shown = sorted(names)[:4]
        more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        if shown:
            said.append(f"{kind} {', '.join(shown)}{more}")
    if said:
        raise DataError(f"model.path={config.path}: not the weights of its config.json: {'; '.join(said)}")


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer of `model.path`."""
    tokenizer, rows = _from_hub(config, AutoTokenizer), text_config_of(config).vocab_size
    added = tokenizer.get_added_vocab()
    own = [number for word, number in tokenizer.get_vocab().items() if word not in added]
    if (size := max([tokenizer.vocab_size, *(number + 1 for number in own)])) > rows:
        raise DataError(f"model.path={config.path}: its tokenizer has {size} tokens, the model {rows}")
    tokenizer.embedding_rows = rows  # what `kvq.data.text.encode` compares with
    return tokenizer


def load_processor(config: ModelConfig, modalities: Collection[str]) -> Any:
    """What turns text and media of `modalities` (`image`, `audio`) into a model's inputs."""
    processor = _from_hub(config, AutoProcessor)
    for modality, part, media in (("image", "image_processor", "images"), ("audio", "feature_extractor", "recordings")):
        if modality in modalities and getattr(processor, part, None) is None:
            raise Unsupported(f"model.path={config.path}: its processor takes no {media}")
    return processor


def text_config_of(config: ModelConfig) -> Any:
    """The transformers configuration of `model.path`'s language model: no weights are read."""
    return _config_of(config).get_text_config()


def _config_of(config: ModelConfig) -> Any:
    """The transformers configuration of `model.path`, of a model that speaks that of the part which reads (`thinker`).

    That of a GGUF file, which takes seconds, is kept.
    """
    global _last_config
    if config.gguf is None:
        whole = _from_hub(config, AutoConfig)
        return getattr(whole, "thinker_config", whole)
    name = f"{config} {folder_fingerprint(config)}"
    if _last_config[0] != name:
        _last_config = (name, _from_hub(config, AutoConfig))
    return copy.deepcopy(_last_config[1])  # a model changes its own


def longest_context(config: ModelConfig, text: Any, timed: bool = False) -> int | None:
    """The longest sequence in tokens: `model.context`, else the positions of `text`, a transformers configuration.

    `timed`: nothing but time is measured, which does not depend on how far rotary positions were trained.
    """
    own = getattr(text, "max_position_embeddings", None)
    if config.context is None or own is None:
        return config.context or own
    ropes = getattr(text, "rope_parameters", None) or {}
    if timed and ropes:
        return config.context
    each = [rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict)]  # layers may have one of their own
    scaled = [(rope.get("original_max_position_embeddings") or own) * (rope.get("factor") or 1) for rope in each]
    if config.context > (most := int(max(own, *scaled))):
        raise ConfigError(f"model.context={config.context}: {config.path} has {most} positions")
    return config.context


def load_model(config: ModelConfig, device: str = "auto") -> LoadedModel:
    """Load `model.path` in `model.dtype`, apply its delta, implant outliers when asked, check what scoring relies on.

    With `model.device_map` transformers places the layers itself, within `model.max_memory`. A checkpoint of quantized
    weights keeps its own dtype. A model of text and media is loaded whole and reads text.
    """
    where = pick_device(device)
    whole = _config_of(config)
    settings = loading_settings(config, whole, where)
    if config.gguf is not None or whole.model_type.endswith("_thinker"):
        settings["config"] = whole  # else the file is read once more, or all of a model that speaks is loaded
    # `_check_whole` says what does not fit, shapes that differ too, in place of transformers' warnings.
    settings |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    text_alone, media = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING
    with_media = type(whole) in media and type(whole) not in text_alone
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        model, found = _from_hub(config, AutoModelForMultimodalLM if with_media else AutoModelForCausalLM, **settings)
    finally:
        transformers_logging.set_verbosity(before)
    _check_whole(config, found)
    if config.gguf is not None:  # its weights are dequantized, and a configuration that says otherwise is not saved
        del model.config.quantization_config
    if (delta := delta_folder(config.path)) is not None:
        apply_delta(config.path, model, Path(model_folder(config.path)), delta)
    model = model.eval().requires_grad_(False)
    if "device_map" not in settings:
        model = model.to(where)
    loaded = LoadedModel(model, device_of(model.get_input_embeddings()))
    try:  # a configuration that loads may still describe no model that runs
        expected = _check_logits(loaded)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError) as error:
        raise DataError(f"model.path={config.path}: loads, but fails on a text: {one_line(error, 300)}") from error
    if config.outliers:
        implant_outliers(model, config.outliers)
        if not torch.allclose(_check_logits(loaded), expected, rtol=1e-2, atol=1e-2, equal_nan=True):
            raise Unsupported(f"model.outliers: the implant changes what {type(model).__name__} computes (its RoPE?)")
    return loaded


@torch.no_grad()
def _check_logits(loaded: LoadedModel) -> Tensor:
    """Logits `[1, 16, vocab]` of fixed tokens; `Unsupported` where more follows than the output embedding's product."""
    tokens = torch.arange(16, device=loaded.device)[None] % loaded.text_config.vocab_size
    expected = loaded.model(input_ids=tokens, use_cache=False).logits
    hidden = base_of(loaded.model)(input_ids=tokens, use_cache=False).last_hidden_state
    if not torch.allclose(loaded.logits(hidden), expected, rtol=1e-3, atol=1e-3, equal_nan=True):
        name = type(loaded.model).__name__
        raise Unsupported(f"model: {name} changes its logits after the output embedding, which scoring does not follow")
    return expected


@contextmanager
def onednn_linear() -> Iterator[None]:
    """Linear layers in float32 on a CPU are computed by oneDNN, but where a gradient is asked for.

    torch multiplies by MKL, which is slow on AMD processors (`experiments/bench --only torch_linear_over_onednn`).
    Results differ as those of two processors do, in the last bits of float32.
    """
    plain, product = nn.Linear.forward, torch.ops.mkldnn._linear_pointwise

    def forward(self: nn.Linear, states: Tensor) -> Tensor:
        if states.dtype is not torch.float32 or states.device.type != "cpu" or torch.is_grad_enabled():
            return plain(self, states)
        return product(states, self.weight, self.bias, "none", [], "")

    with patch.object(nn.Linear, "forward", forward):
        yield


@contextmanager
def full_fp32_products() -> Iterator[None]:
    """float32 products are computed in float32 on a GPU too, not in TF32 or bf16, whatever the process has set."""
    before, before_convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = before_convolutions


def unwrapped(model: nn.Module) -> Any:
    """The transformers model inside of wrappers (`torch.compile`, peft)."""
    return next((part for part in model.modules() if isinstance(part, PreTrainedModel)), model)


def base_of(model: nn.Module) -> Any:
    """The model below its output embedding; of some families (Llama 4) `base_model` is the whole."""
    base, inner = getattr(model, "base_model", model), getattr(model, "model", None)
    return inner if base is model and isinstance(inner, nn.Module) else base


def loading_settings(config: ModelConfig, whole: Any, where: torch.device) -> dict[str, Any]:
    """The settings of `from_pretrained` that say in what form and where weights are loaded.

    `whole`: the model's transformers configuration; `where`: the device of a model that is not spread.
    """
    given, path = getattr(whole, "quantization_config", None), config.path
    method = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)
    stored = None if given is None else str(getattr(method, "value", method))
    if stored is not None and stored not in AUTO_QUANTIZATION_CONFIG_MAPPING:  # transformers reads codes as weights
        known = ", ".join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))
        raise DataError(f"model.path={path}: quantization_config.quant_method={stored}: one of {known}")
    if stored is not None and config.outliers:
        raise Unsupported(f"model.outliers: the weights of {path} are quantized")
    settings: dict[str, Any] = {"dtype": getattr(torch, config.dtype.value) if stored is None else "auto"}
    if config.device_map is not None or stored is not None:
        settings["device_map"] = config.device_map or {"": where}
    if config.max_memory is not None:
        sizes = config.max_memory.items()
        settings["max_memory"] = {int(name) if str(name).isdigit() else name: size for name, size in sizes}
    if config.attn_implementation is not None:
        settings["attn_implementation"] = config.attn_implementation
    return settings


def device_of(module: nn.Module) -> torch.device:
    """The device on which a module computes: of offloaded weights, the one to which accelerate brings them."""
    device = next(module.parameters()).device
    waits = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return torch.device(waits) if device.type == "meta" and waits is not None else device


@contextmanager
def gguf_support(config: ModelConfig) -> Iterator[None]:
    """What transformers needs to read a GGUF file. The file's metadata is parsed once in a process, not for each part,
    and the names of tensors once, not for each module: 10 s less for a model of 30 layers.
    """
    if config.gguf is None:
        yield
        return
    try:
        import gguf
    except ImportError as error:
        raise Unsupported(
            f"model.gguf={config.gguf}: needs the package gguf, which is not installed; pip install -e '.[gguf]'"
        ) from error
    from transformers import modeling_gguf_pytorch_utils as reading

    silent = partial(tqdm, disable=None)  # no bar where there is no terminal
    with (
        patch.object(gguf, "GGUFReader", lambda file: _reader(str(file), Path(file).stat().st_mtime_ns)),
        patch.object(gguf, "get_tensor_name_map", lru_cache(gguf.get_tensor_name_map)),
        patch.object(reading, "tqdm", silent),
    ):
        yield


@lru_cache(maxsize=1)
def _reader(file: str, modified: int) -> Any:
    """A `GGUFReader` of the file, kept for the next call: transformers parses it three times, seconds each."""
    from gguf.gguf_reader import GGUFReader

    return GGUFReader(file)

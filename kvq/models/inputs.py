"""Inputs of runs: what the runs of a process share, each loaded once, the media of a prompt, and the shape of a cache.

Shapes need no weights: they are shipped for the papers' models, else from the configuration. Bytes of states of fixed
size are those that transformers' layers allocate.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import yaml
from jaxtyping import Float, Int
from torch import Tensor

from kvq.config import Config, Loader, ModelConfig
from kvq.config.run import trained_with_bos
from kvq.config.tasks import is_timed
from kvq.data.text import TokenData, begins_with_bos, check_token_ids, load_tokens
from kvq.errors import ConfigError, Unsupported, one_line
from kvq.models.layers import KvLayer, head_dims_of, kv_layers_of, latent_numbers, layer_config, state_layers_of
from kvq.models.load import (
    LoadedModel,
    base_of,
    load_model,
    load_tokenizer,
    longest_context,
    model_fingerprint,
    text_config_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
MODALITIES = ("text", "image", "video", "audio")
"""What a label of `modalities` stands for."""
_PER_TOKEN = ("mm_token_type_ids", "token_type_ids")
_POSITIONS = "rope_deltas"


@dataclass(frozen=True)
class LayerKind:
    """`count` layers that cache alike, with `heads` KV heads (of a latent 1).

    `head_dim`, `value_dim` (None: `head_dim`) and `window` are as `KvLayer` has them.
    """

    count: int
    heads: int
    head_dim: int
    value_dim: int | None = None
    window: int | None = None

    def dim(self, side: str) -> int:
        """Channels of a head of `key` or `value`."""
        return self.head_dim if side == "key" or self.value_dim is None else self.value_dim

    def __str__(self) -> str:
        value = "" if self.value_dim is None else f"+{self.value_dim}"
        window = "" if self.window is None else f" of {self.window}"
        return f"{self.count}x{self.heads}x{self.head_dim}{value}{window}"


@dataclass(frozen=True)
class CacheShape:
    """What the layers of a model cache (`layers`: with keys and values of their own), and its longest context.

    `state_bytes`: of all states of fixed size of one sequence, in a model of 16 bits.
    """

    layers: tuple[LayerKind, ...]
    context: int | None
    state_bytes: int = 0

    @property
    def head_dims(self) -> list[int]:
        """The head dims that occur, ascending."""
        return sorted({kind.head_dim for kind in self.layers})

    @property
    def count(self) -> int:
        """Layers with keys and values of their own."""
        return sum(kind.count for kind in self.layers)

    @property
    def name(self) -> str:
        """The model's name in the key of a run that reads no weights."""
        states = f", {self.state_bytes} bytes of states" if self.state_bytes else ""
        return "shape " + ", ".join(map(str, self.layers)) + states


@lru_cache(maxsize=1)
def load_shapes() -> dict[str, dict[str, int]]:
    """The shapes that come with the package, by hub id."""
    known: dict[str, dict[str, int]] = yaml.safe_load(files(__package__).joinpath("shapes.yaml").read_text("utf-8"))
    return known


def cache_shape(config: ModelConfig) -> CacheShape:
    """The shape of `model.path`; of a hub id that is not shipped, from its configuration file."""
    known = load_shapes().get(config.path)
    if known is not None:
        kind = LayerKind(known["layers"], known["kv_heads"], known["head_dim"])
        return CacheShape((kind,), longest_context(config, SimpleNamespace(max_position_embeddings=known["context"])))
    text = text_config_of(config)
    cached, latent = kv_layers_of(text), latent_numbers(text) is not None
    stateful = bool(state_layers_of(text))
    layers = None if latent and not stateful else held_layers(text)
    if layers is None and stateful:
        raise Unsupported(f"model: {type(text).__name__} does not run without weights, so that its states have no size")
    held: dict[int, tuple[int, int, int] | None] = dict.fromkeys(layer.index for layer in cached)
    if layers is not None and not latent:
        states = ((index, getattr(one, "keys", None), getattr(one, "values", None)) for index, one in enumerate(layers))
        held = {
            index: (key.shape[1], key.shape[-1], value.shape[-1])
            for index, key, value in states
            if key is not None and key.ndim == 4 and value is not None
        }
        if not held:
            raise Unsupported(f"model: {type(text).__name__} keeps no keys and values in a cache that it is given")
    counts = Counter(_layer_kind(text, layer, held[layer.index]) for layer in cached if layer.index in held)
    kinds = tuple(replace(kind, count=count) for kind, count in counts.items())
    fixed = (getattr(layer, name, {}) for layer in layers or () for name in ("conv_states", "recurrent_states"))
    state_bytes = sum(state.nbytes for states in fixed for state in states.values() if state is not None)
    return CacheShape(kinds, longest_context(config, text), state_bytes)


def held_layers(text: Any) -> list[Any] | None:
    """The layers of a cache after a forward of the model's class without weights, in 16 bits.

    None where a class cannot be built or run so: then only names of settings say what it caches.
    """
    from transformers import AutoModelForCausalLM, DynamicCache

    cache = DynamicCache(config=text)
    settings: Any = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}  # which ask for no values
    try:
        with torch.device("meta"), torch.no_grad():
            model = AutoModelForCausalLM.from_config(text, dtype=torch.bfloat16, **settings)
            model.eval()(torch.zeros(1, 2, dtype=torch.long), past_key_values=cache, use_cache=True)
    except Exception:  # each class fails in its own way where it needs values, or code from the hub
        return None
    return list(cache.layers)


def _layer_kind(text: Any, layer: KvLayer, held: tuple[int, int, int] | None) -> LayerKind:
    """The `LayerKind` of one layer, from KV heads, key and value dim (`held`) or its settings."""
    dim, value_dim = layer.head_dim, layer.value_dim
    if held is not None:
        heads, dim, value_dim = held
    elif latent_numbers(text) is None:
        own = layer_config(text, layer.index)
        heads = int(getattr(own, "num_key_value_heads", None) or own.num_attention_heads)
    else:
        heads = 1
    return LayerKind(1, heads, dim, None if value_dim == dim else value_dim, layer.window)


def with_cache_dtype(loaded: LoadedModel, config: Config) -> LoadedModel:
    """The model, whose caches keep states in the dtype that the run asks for."""
    stored = config.cache_dtype
    return replace(loaded, cache_dtype=None if stored is None else getattr(torch, stored.value))


class Inputs:
    """Lazy inputs of one run. Cheap ones (fingerprints, tokens) do not load weights.

    At most one value of each kind is in memory, so a sweep over models never has two.
    """

    _held: ClassVar[dict[str, tuple[Hashable, Any]]] = {}

    def __init__(self, config: Config) -> None:
        self.config = config

    def shared(self, kind: str, name: Hashable, make: Callable[[], T]) -> T:
        """The value of this kind and name; it replaces one of the same kind with another name."""
        kept = self._held.get(kind)
        if kept is None or kept[0] != name:
            self._held.pop(kind, None)  # free the old one before the new one is made
            kept = self._held[kind] = (name, make())
        return kept[1]

    @property
    def model_fingerprint(self) -> str:
        """Fingerprint of the weights; of a task that reads none, the model's shape."""
        if self.reads_weights:
            return model_fingerprint(self.config.model)
        return cache_shape(self.config.model).name

    @property
    def reads_weights(self) -> bool:
        """Whether the task runs the model, or needs only its shape."""
        return getattr(self.config.task, "reads_weights", True)

    @property
    def device(self) -> torch.device:
        """Where the model runs; of a task that reads no weights, the CPU."""
        return self.model.device if self.reads_weights else torch.device("cpu")

    @property
    def head_dims(self) -> list[int]:
        """The different head dims (channels per head) of the model, ascending, from its configuration."""
        return self._shape[0]

    @property
    def longest_context(self) -> int | None:
        """The longest sequence in tokens that the model takes; None where it does not say."""
        return self._shape[1]

    def check_context(self) -> None:
        """Raise `ConfigError` for windows of `task.context` tokens that are longer than the model takes."""
        self.check_tokens(self.config.task.context, f"task.context={self.config.task.context}:")

    def check_tokens(self, tokens: int, said: str, after: str = " tokens") -> None:
        """Raise `ConfigError` for too many tokens: `<said> model=<name> takes at most <longest><after>`."""
        longest = self.longest_context
        if longest is not None and tokens > longest:
            raise ConfigError(f"{said} model={self.config.model.name} takes at most {longest}{after}")

    @property
    def _shape(self) -> tuple[list[int], int | None]:
        """Head dims and longest context, from the configuration."""
        if not self.reads_weights:
            shape = cache_shape(self.config.model)
            return shape.head_dims, shape.context
        timed, model = is_timed(self.config.task), self.config.model

        def read_shape() -> tuple[list[int], int | None]:
            text = text_config_of(model)
            return sorted(set(head_dims_of(text))), longest_context(model, text, timed)

        return self.shared("shape", (self._model_key, timed), read_shape)

    @property
    def names(self) -> tuple[str, str]:
        """Names of the inputs, different for different ones: the model on its device, and the text as tokens."""
        merged = self.config.method.merge_rotation
        return (
            repr((self.config.device, self._model_key, self.config.cache_dtype, merged)),
            repr((self.config.dataset, self._model_key, self.tokens.fingerprint)),
        )

    @property
    def _model_key(self) -> str:
        """What `shared` knows this model by: its settings and fingerprint."""
        return repr((self.config.model, self.model_fingerprint))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self.shared("tokenizer", self._model_key, lambda: load_tokenizer(self.config.model))

    @property
    def trained_with_bos(self) -> bool | None:
        """Whether the model was trained on texts with a begin-of-text token; None for a task without `bos`."""
        if not hasattr(self.config.task, "bos"):
            return None
        return self._trained_with_bos(bool(getattr(self.config.task, "chat_template", False)))

    def _trained_with_bos(self, chat: bool) -> bool:
        known = trained_with_bos(self.config.model, chat)
        return begins_with_bos(self.tokenizer, chat) if known is None else known

    @property
    def bos(self) -> int | None:
        """The token that every window or prompt begins with, by `task.bos`; None: none does."""
        return self._bos_where(self.trained_with_bos)

    @property
    def plain_bos(self) -> int | None:
        """As `bos`, of a prompt without a chat template in a task that has one."""
        return self._bos_where(self._trained_with_bos(chat=False))

    def _bos_where(self, trained: bool | None) -> int | None:
        asked = getattr(self.config.task, "bos", None)
        if not (trained if asked is None else asked):
            return None
        found: int | None = self.tokenizer.bos_token_id
        if found is None:
            setting, name = "model" if asked is None else "task", self.config.model.name
            raise ConfigError(f"{setting}.bos=true: the tokenizer of model={name} has no BOS token; use false")
        return check_token_ids(self.tokenizer, [found])[0]

    @property
    def tokens(self) -> TokenData:
        """The dataset as token streams, each at least one window of `task.context` long."""
        return self.streams(self.config.task.context)

    def streams(self, context: int) -> TokenData:
        """The dataset as token streams, each long enough for a window of `context` tokens."""
        dataset = self.config.dataset
        if dataset.loader is Loader.items:
            raise ConfigError(
                f"dataset={dataset.name}: holds items, not text, which task={self.config.task.name} needs; "
                "use dataset=pydocs, or dataset=text dataset.path=..."
            )
        name = repr((dataset, self._model_key, context, self.bos))
        return self.shared("tokens", name, lambda: load_tokens(dataset, self.tokenizer, context, self.bos))

    def long_streams(self, tokens: int) -> TokenData:
        """The dataset as token streams; of documents, each `tokens` long."""
        return self.streams(max(2, tokens) if self.config.dataset.loader is Loader.documents else 2)

    @property
    def model(self) -> LoadedModel:
        """The model, in evaluation mode on its device."""
        name = (self.config.device, self._model_key)
        loaded = self.shared("model", name, lambda: load_model(self.config.model, self.config.device))
        return with_cache_dtype(loaded, self.config)


def modalities(config: Any, tokens: Int[Tensor, "*lead tokens"]) -> Int[Tensor, "*lead tokens"]:
    """Label every token by its modality, as an index into `MODALITIES` (`config`: the whole model's)."""
    labels = torch.zeros_like(tokens)
    for index, name in enumerate(MODALITIES[1:], 1):
        for setting in (f"{name}_token_id", f"{name}_token_index"):
            token = getattr(config, setting, None)
            if isinstance(token, int):
                labels[tokens == token] = index
    return labels


@dataclass(frozen=True)
class MediaModel(LoadedModel):
    """A model with the media of one prompt, which are passed with the first tokens added to an empty cache.

    `media`: what the processor made in addition to tokens, such as `pixel_values` and `image_grid_thw`.
    """

    media: Mapping[str, Tensor] = field(default_factory=dict)

    def hidden_states(self, tokens: Int[Tensor, "batch tokens"], cache: Any) -> Float[Tensor, "batch tokens hidden"]:
        """As `LoadedModel.hidden_states`, with the media where the prompt begins."""
        if cache.get_seq_length():
            return super().hidden_states(tokens, cache)
        media = self.media_of(tokens)
        try:
            output = base_of(self.model)(input_ids=tokens, past_key_values=cache, use_cache=True, **media)
        except ValueError as error:
            raise Unsupported(f"model: {type(self.model).__name__}: {one_line(error)}") from error
        return output.last_hidden_state

    def media_of(self, tokens: Int[Tensor, "batch tokens"]) -> dict[str, Tensor]:
        """What goes with `tokens`, a prompt or one without its last tokens, on the model's device."""
        media = {name: value.to(self.device) for name, value in self.media.items()}
        if "image_grid_thw" in media or "video_grid_thw" in media:  # positions on three axes
            if "mm_token_type_ids" in inspect.signature(type(base_of(self.model)).forward).parameters:
                media["mm_token_type_ids"] = modalities(self.model.config, tokens)
            else:  # omni-modal models ask for a mask of all tokens
                media["attention_mask"] = torch.ones_like(tokens)
        return {name: value[:, : tokens.shape[1]] if name in _PER_TOKEN else value for name, value in media.items()}

    def forget(self) -> None:
        """Reset the position offset that the model keeps from a prompt with images; the next prompt may have none."""
        for module in self.model.modules():
            if getattr(module, _POSITIONS, None) is not None:
                setattr(module, _POSITIONS, None)

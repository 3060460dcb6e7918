"""`KVCache`: a transformers cache whose attention reads decode(stored), nothing else."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from kvq.cache import files
from kvq.cache.chunk_masks import SourceColumns
from kvq.cache.contents import NO_CROP, place_layers, states_of
from kvq.cache.hooks import (
    WatchfulCache,
    check_distances,
    check_window,
    layer_number,
    no_mask_reason,
    register_hooks,
    signature,
)
from kvq.cache.layer import Layer
from kvq.cache.observe import Attended
from kvq.cache.packed import use_packed_attention
from kvq.cache.padded import PaddableCache
from kvq.cache.rotary import RopeTable, angles, styles_of
from kvq.codecs.codec import isolated
from kvq.errors import ConfigError, Unsupported, require
from kvq.models.layers import kv_layers_of, window_of
from kvq.models.load import LoadedModel, unwrapped

ATTENTIONS = ("dense", "packed")


class KVCache(PaddableCache, WatchfulCache):
    """A quantized cache for `model.generate(**inputs, past_key_values=kvq.KVCache(model, method))`.

    Args:
        model: a causal LM some of whose layers cache keys and values (`docs/models.md`), or a
            `kvq.models.load.LoadedModel`, which also sets the dtype.
        method: from `kvq.build_method`; `Method.layers` builds the cache layers.
        keep_decoded: keep the decoded copy beside the packed one: faster, bit-identical, no memory saved.
        attention: `dense` decodes keys and values for the model's own attention; `packed` computes the attention of a
            single new token from the codes (equal up to rounding) and switches the model to an implementation that can.
            A prefill attends in full precision, before the tokens that leave the residual are quantized.
        dtype: of the full-precision and the decoded tokens; None: the `cache_dtype` of a `LoadedModel`, else the dtype
            of the model. States are cast to it when appended, and back to the model's dtype when read.

    Raises:
        ConfigError: an unknown attention, or packed attention with `keep_decoded`.
        Unsupported: the method does not support the model's head dim, or attention cannot read its codes.
    """

    version: ClassVar[int] = 1

    @isolated()
    def __init__(
        self,
        model: nn.Module | LoadedModel,
        method: Any,
        keep_decoded: bool = False,
        attention: str = "dense",
        dtype: torch.dtype | None = None,
    ) -> None:
        require(not isinstance(method, str), "method", method, "not a name: a method, as kvq.build_method makes it")
        if attention not in ATTENTIONS:
            raise ConfigError(f"attention={attention}: one of {', '.join(ATTENTIONS)}")
        if attention == "packed" and keep_decoded:
            raise ConfigError("attention=packed: reads codes; keep_decoded=true is for attention=dense")
        if isinstance(model, LoadedModel):
            module, dtype = model.model, model.cache_dtype if dtype is None else dtype
        else:
            module = unwrapped(model)
        stacks, watched = register_hooks(module)
        config = module.config.get_text_config(decoder=True)
        packed = attention == "packed"
        held = kv_layers_of(config)
        self._states = states_of(module, [layer.index for layer in held])
        kv_layers = method.layers(config, held, keep_decoded, packed)
        if packed:
            if getattr(config, "kv_lora_rank", None):
                raise Unsupported("attention=packed: the model expands the latent that it caches before it attends")
            use_packed_attention(module)
        self.method = method
        self.dtype = dtype
        self._held = {layer.index: (place, layer) for place, layer in enumerate(held)}
        self._windows = [window_of(config, index) for index in range(config.num_hidden_layers)]
        self._columns: dict[int | None, SourceColumns | None] = {}
        super().__init__(layers=place_layers(held, kv_layers, self._states))
        self._batch_layers[0].link(self._batch_layers)
        self.wants_hidden = any(side.wants_hidden for side in self._sides())
        self.bind_model(module, stacks)
        self._no_crop = NO_CROP if self._states else next(filter(None, map(no_mask_reason, watched)), None)
        if self._no_crop is None and "logits_to_keep" not in signature(type(module).forward).parameters:
            self._no_crop = f"{type(module).__name__} is not told which tokens are candidates (no logits_to_keep)"
        self._candidates: int | None = None
        self._tables: list[RopeTable] = []
        self._groups: list[int] = []
        if any(side.uses_rope for side in self._sides()):
            styles = styles_of(module)
            self._groups = [group for _, group in styles]
            own_style = {group: style for style, group in styles}
            self._tables = [RopeTable(own_style[group]) for group in sorted(own_style)]
            for layer, group in zip(self._batch_layers, self._groups, strict=True):
                layer.key.rope = layer.value.rope = self._tables[group]
            self._batch_layers[0].check_rotations(self._batch_layers)

    @torch.compiler.disable
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Add states `[batch, heads, tokens, head_dim]` to a layer; return the keys and values that attention reads.

        `Unsupported` for states of an attention that no forward announced (`before_attention`).
        """
        self.check_expected(layer_idx)
        return self._update(key_states, value_states, layer_idx, *args, **kwargs)

    @isolated(gradients=True)
    def _update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Check the channels, cast to `dtype`, append to the layer; return the read states in the model's dtype."""
        known = self._held[layer_idx][1].head_dim if layer_idx in self._held else None
        if known != key_states.shape[3]:
            raise Unsupported(
                f"model: layer {layer_idx} caches keys of {key_states.shape[3]} channels per head; its configuration "
                f"says {known}"
            )
        keys, values = (states.to(self.dtype or states.dtype) for states in (key_states, value_states))
        read = super().update(keys, values, layer_idx, *args, **kwargs)
        # Attention on codes computes in the query's dtype by itself.
        keys, values = (part.to(key_states.dtype) if isinstance(part, Tensor) else part for part in read)
        return keys, values

    @property
    def token_by_token(self) -> bool:
        """Whether each query of a chunk reads the states that it would read if the tokens came one per forward."""
        return any(layer.token_by_token for layer in self.kv_layers)

    @token_by_token.setter
    def token_by_token(self, value: bool) -> None:
        """Set it for all layers with keys and values."""
        for layer in self.kv_layers:
            layer.token_by_token = value

    @isolated()
    def before_attention(self, module: nn.Module, arguments: dict[str, Any], hidden: Tensor) -> SourceColumns | None:
        """Check an attention, pass its RoPE tables to its cache layer, and return the key columns that it will read.

        None means one column for each token.

        Args:
            arguments: of the module's forward, by name.
            hidden: `[batch, tokens, channels]` of the new tokens.
        """
        index, tokens = layer_number(module, arguments), hidden.shape[1]
        self.expect_states(index)
        if index not in self._held:
            if index in self._states:
                return None
            # It reads the keys and values of an earlier layer with the same window.
            return self._columns.get(self._windows[index], self._columns.get(None))
        layer, seen = self._layer(index), self._layer(index).get_seq_length()
        if self.recording and self._candidates is not None:
            layer.expect_candidates(tokens - 1 if layer.token_by_token else min(self._candidates, tokens - 1))
        if layer.window is not None:
            check_window(module, arguments, layer.get_mask_sizes(tokens)[0], layer.window)
        if not layer.keeps_order:
            check_distances(module, index, arguments, seen + tokens, layer.shuffled)
        if self._tables:
            layer.receive_rotations(tokens, angles(module, arguments), hidden)
        known = self._columns.get(layer.window)
        columns = self._columns[layer.window] = layer.columns_for(tokens, hidden.device, known)
        return columns

    def _layer(self, index: int) -> Layer:
        """The cache layer for layer `index` of the model."""
        return cast(Layer, self.layers[index])

    def activate_past_recording(self) -> None:
        """From now on `crop` can undo the last forward exactly; transformers calls this before assisted generation.

        Each candidate reads what it would read if the tokens before it had come one per forward, so the generated
        tokens are those of greedy decoding. A forward without `logits_to_keep`, which gives the number of candidates,
        ends the recording.

        Raises:
            Unsupported: a method that cannot take tokens back, or a model that does not tell candidates from a prompt.
        """
        setting = "prompt_lookup_num_tokens, assistant_model"
        for reason in (layer.irreversible for layer in self._batch_layers):
            if reason is not None:
                raise Unsupported(f"{setting}: method={self.method.name} cannot take tokens back ({reason})")
        if self._no_crop is not None:
            raise Unsupported(f"{setting}: model: {self._no_crop}")
        self._set_recording(True)
        self._candidates = None

    @property
    def is_croppable(self) -> bool:
        """`crop` can undo a forward exactly, once `activate_past_recording` was called."""
        return super().is_croppable and self._no_crop is None

    def _set_recording(self, on: bool) -> None:
        """Switch recording on or off in all layers; while it is on, `crop` can undo the last forward."""
        self.recording = on
        for layer in self.kv_layers:
            layer.record(on)

    @isolated()
    def receive_tokens(self, input_ids: Tensor | None, padding: Sequence[int] | None, logits_to_keep: Any) -> None:
        """Split the layers by padding, take the number of candidates from `logits_to_keep`, and pass on the ids.

        Args:
            input_ids: `[batch, tokens]`; None: the model gets embeddings.
            padding: columns before the first token of each sequence; None: none.
            logits_to_keep: this argument of the model's forward; None: it was left out.
        """
        if padding != self.padding:
            self.pad(padding)
        if input_ids is not None and self.get_seq_length():
            self.check_part(self._model(), input_ids.shape[1])
        if self.recording and type(logits_to_keep) is int and logits_to_keep > 0:
            self._candidates = logits_to_keep - 1
        elif self.recording:  # no longer assisted generation
            if self._candidates is None:
                raise Unsupported("logits_to_keep: the model is not told it, which is how candidates are known")
            self._set_recording(False)
            self._candidates = None
        for layer in self._batch_layers:
            layer.receive_tokens(input_ids)

    @isolated()
    def receive_hidden(self, index: int, hidden: Tensor) -> None:
        """Pass on the hidden states `[batch, tokens, channels]` at the input of layer `index`, before its norm."""
        if index in self._held:
            self._layer(index).receive_hidden(hidden)

    def observes(self, index: int) -> bool:
        """Whether `observe` is to be called with the queries and keys of the coming attention of a layer."""
        return index in self._held and self._layer(index).observes

    @isolated()
    def observe(self, index: int, attended: Attended) -> None:
        """Pass on the queries of an attention and the keys that they read."""
        self._layer(index).observe(attended)

    def reset(self) -> None:
        super().reset()
        self._set_recording(False)
        self._columns = {}
        for table in self._tables:
            table.keep(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `n` tokens by `crop(-n)`, as in transformers.

        Raises:
            ConfigError: a positive number.
            Unsupported: a layer that cannot restore the state before these tokens.
        """
        if tokens_to_remove and self._states:
            raise Unsupported(f"crop({tokens_to_remove}): model: {NO_CROP}")
        for layer in self._batch_layers:
            layer.check_crop(tokens_to_remove)  # check all layers before any of them changes
        for layer in self._batch_layers:
            layer.crop(tokens_to_remove)
        for table in self._tables:
            table.keep(self.get_seq_length())

    def check_finite(self) -> None:
        """Raise `DataError` naming the first layer whose full-precision states are NaN or infinite."""
        for side in self._sides():
            side.check_finite()

    def save(self, path: str | Path) -> None:
        """Write the cache to a file; a cache that `load` makes of it gives equal logits.

        The file names method, model, versions of parts and dtypes. It is written atomically and is the same, byte for
        byte, for the same cache. The model, a method's calibration and the decoded copy are not in it.

        Raises:
            RecordError: a path that cannot be written.
            Unsupported: a method whose state cannot be saved (transformers' own caches), or one without `settings`.
        """
        model = self._model()
        if model is None:
            raise Unsupported("cache.save: its model is gone, which the file has to name")
        if self.is_parted:
            raise Unsupported("cache.save: a padded batch; save prompts of equal length, or one by one")
        about = files.identity(model, self.method, len(self.kv_layers))
        files.write(Path(path), about, self.kv_layers, self._tables, self.dtype, self._states)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: nn.Module | LoadedModel,
        method: Any,
        keep_decoded: bool = False,
        attention: str = "dense",
    ) -> KVCache:
        """Return a cache with the tokens that `save` wrote, here or on another machine.

        Args:
            model: with the same weights and dtype as the model that filled the cache, on any device.
            method: with the same settings, residual and calibration tables as the method that filled it.
            keep_decoded, attention: as in `KVCache`, whose `dtype` comes from the file.

        Raises:
            DataError: a file that is missing, damaged or no cache, or that names another method, model or version.
        """
        model = model.model if isinstance(model, LoadedModel) else model
        path, layers = Path(path), len(kv_layers_of(model.config.get_text_config(decoder=True)))  # type: ignore[union-attr, operator]
        content = files.read(path, files.identity(model, method, layers))
        cache = cls(model, method, keep_decoded, attention, content["dtype"])
        files.fill(content, model, cache.kv_layers, cache._tables, cache._groups, cache._states)
        return cache

    def fork(self) -> KVCache:
        """A copy that shares the tokens cached so far and grows independently, for many questions on one context."""
        other = copy.copy(self)
        other._states = {index: state.fork() for index, state in self._states.items()}
        other._set_layers([layer.fork() for layer in self._batch_layers])
        other._batch_layers[0].link(other._batch_layers)
        other._columns = {}
        if self._tables:
            tables = {id(layer.key.rope): layer.key.rope.fork() for layer in self.kv_layers}
            for layer in other.kv_layers:
                layer.key.rope = layer.value.rope = tables[id(layer.key.rope)]
            other._tables = [tables.get(id(table), table) for table in self._tables]
        return other

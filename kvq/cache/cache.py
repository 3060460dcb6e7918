"""`KVCache`: a transformers cache whose attention reads decode(stored), nothing else."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from typing_extensions import override

from kvq.cache import files
from kvq.cache.allocated import allocated_bytes
from kvq.cache.attention import WatchfulCache, check_distances, says_candidates, unmasked, watch
from kvq.cache.layer import Layer
from kvq.cache.observe import Attended
from kvq.cache.packed import check_replaceable, use_packed_attention
from kvq.cache.rotary import RopeTable, angles, styles_of
from kvq.cache.side import Recompression
from kvq.cache.sources import SourceColumns
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.models.head_dims import head_dims_of

ATTENTIONS = ("dense", "packed")


def _styles_of(model: nn.Module) -> Any:
    """`styles_of`. Non-finite weights make the probe fail; then the error names the weights instead."""
    try:
        return styles_of(model)
    except Unsupported:
        for name, weight in model.named_parameters():
            if not bool(torch.isfinite(weight).all()):
                raise DataError(f"model: its weights {name} hold NaN or infinite numbers") from None
        raise


@runtime_checkable
class GivesLayers(Protocol):
    """What a cache asks of a method (`kvq.methods.method.Method`)."""

    def layers(
        self, config: Any, head_dims: Sequence[int], keep_decoded: bool, quantized_prefill: bool, packed: bool
    ) -> Sequence[Layer]:
        """An empty layer for each attention of a model that has keys and values of its own.

        Args:
            config: its transformers text configuration.
            head_dims: channels per head of each layer.
            keep_decoded, quantized_prefill: as `KVCache` has them.
            packed: layers hand over codes, for attention that reads these.

        Raises:
            ConfigError, Unsupported: what the method cannot do.
        """


def _lasting(model: nn.Module, attentions: list[nn.Module]) -> str | None:
    """The reason why `crop` cannot undo a forward of this model exactly; None: it can."""
    if not says_candidates(model):
        return f"model: {type(model).__name__} is not told which tokens are candidates (it takes no logits_to_keep)"
    reason = next(filter(None, map(unmasked, attentions)), None)
    return None if reason is None else f"model: {reason}"


class KVCache(WatchfulCache):
    """A quantized cache for `model.generate(**inputs, past_key_values=kvq.KVCache(model, method))`.

    Args:
        model: a causal LM whose attention layers each cache keys and values of one head_dim.
        method: from `kvq.build_method`.
        keep_decoded: keep the decoded copy beside the packed one: faster, bit-identical, no memory saved.
        quantized_prefill: attention in a prefill already reads complete blocks in decoded form. The default attends at
            full precision first and then quantizes what leaves the residual, as the papers' generation setting does.
        attention: `dense` decodes keys and values for the model's own attention; `packed` computes the attention of a
            decoded token from the codes (the same function up to rounding), switching the model's attention to one that
            can. A prefill is dense.
        dtype: of what stays in full precision, and of decoded tokens; None: as the model computes. States are cast to
            it as they enter and to the model's when attention reads them, as if the model computed in this dtype.

    Raises:
        ConfigError: an unknown attention, or packed attention with `keep_decoded`.
        Unsupported: the method cannot work on the model's head dim, has no quantized prefill (a backend), or attention
            cannot read its codes.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        model: nn.Module,
        method: GivesLayers,
        keep_decoded: bool = False,
        quantized_prefill: bool = False,
        attention: str = "dense",
        dtype: torch.dtype | None = None,
    ) -> None:
        if attention not in ATTENTIONS:
            raise ConfigError(f"attention={attention}: one of {', '.join(ATTENTIONS)}")
        if attention == "packed" and keep_decoded:
            raise ConfigError("attention=packed: reads codes; keep_decoded=true is for attention=dense")
        config = model.config.get_text_config()  # type: ignore[union-attr, operator]
        packed = attention == "packed"
        layers = method.layers(config, head_dims_of(config), keep_decoded, quantized_prefill, packed)
        if packed:
            check_replaceable(model)
            use_packed_attention(model)
        self.method: Any = method
        self.enters = getattr(method, "sink_detection", None) is not None
        self.dtype = dtype
        self._model = weakref.ref(model)
        self._columns: SourceColumns | None = None
        super().__init__(layers=list(layers))
        self._lasting = _lasting(model, watch(model))
        self._told: int | None = None
        self._candidates: int | None = None
        self._tables: list[RopeTable] = []
        self._groups: list[int] = []
        if any(side.uses_rope for side in self._sides()):
            styles = _styles_of(model)
            self._groups = [group for _, group in styles]
            self._tables = [
                RopeTable(style) for group, style in sorted({group: style for style, group in styles}.items())
            ]
            self._share_tables()

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Add states `[batch, heads, tokens, head_dim]` to a layer and return what attention reads now.

        Both casts to and from `dtype` are here, so that no layer, codec or policy knows of them.
        """
        if self.dtype is None:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        stored = key_states.to(self.dtype), value_states.to(self.dtype)
        read = super().update(*stored, layer_idx, *args, **kwargs)
        # Attention on codes computes in the query's dtype by itself.
        keys, values = (part.to(key_states.dtype) if isinstance(part, Tensor) else part for part in read)
        return keys, values

    @property
    def one_by_one(self) -> bool:
        """Each query of a chunk reads what it would if the chunk's tokens came one per forward."""
        return any(layer.one_by_one for layer in self._own)

    @one_by_one.setter
    def one_by_one(self, value: bool) -> None:
        for layer in self._own:
            layer.one_by_one = value

    def _share_tables(self) -> None:
        for layer, group in zip(self._own, self._groups, strict=True):
            layer.key.rope = layer.value.rope = self._tables[group]

    @override
    def announce(self, module: nn.Module, arguments: dict[str, Any], hidden: Tensor) -> SourceColumns | None:
        index, layers = int(module.layer_idx), self._own  # type: ignore[arg-type]
        if index >= len(layers):  # it reads the keys and values of an earlier layer
            return self._columns
        if self.recording:
            self._expect(layers[index], hidden.shape[1])
        if not layers[index].keeps_order:
            check_distances(module, arguments, layers[index].get_seq_length() + hidden.shape[1], layers[index].shuffled)
        if self._tables:
            self._tables[self._groups[index]].extend(
                layers[index].get_seq_length(), hidden.shape[1], angles(module, arguments), hidden
            )
        self._columns = layers[index].announce(hidden.shape[1], hidden.device, self._columns)
        return self._columns

    @override
    def activate_past_recording(self) -> None:
        """From now on `crop` can undo the last forward exactly; transformers calls this before assisted generation.

        Each candidate reads what it would read if the tokens before it had come one per forward, so the generated
        tokens are those of greedy decoding. A forward without `logits_to_keep`, which gives the number of candidates,
        ends the recording.

        Raises:
            Unsupported: a method that cannot take tokens back, or a model that does not tell candidates from a prompt.
        """
        lasting = next(filter(None, (layer.lasting for layer in self._own)), None)
        if lasting is not None:
            lasting = f"method={self.method.name} cannot take tokens back ({lasting})"
        reason = lasting or self._lasting
        if reason is not None:
            raise Unsupported(f"prompt_lookup_num_tokens, assistant_model: {reason}")
        self._record(True)
        self._told = self._candidates = None

    @property
    def is_croppable(self) -> bool:
        """`crop` can undo a forward exactly, once `activate_past_recording` was called."""
        return super().is_croppable and self._lasting is None

    def _record(self, on: bool) -> None:
        self.recording = on
        for layer in self._own:
            layer.record(on)

    @override
    def asked(self, logits: Any) -> None:
        self._told = logits if type(logits) is int and logits > 0 else None

    def _expect(self, layer: Layer, tokens: int) -> None:
        if self._candidates is not None:
            layer.expect(tokens - 1 if layer.one_by_one else min(self._candidates, tokens - 1))

    def _count_candidates(self) -> None:
        told, self._told = self._told, None
        if told is None and self._candidates is None:
            raise Unsupported("logits_to_keep: the model is not told it, which is how candidates are known")
        if told is None:  # no longer assisted generation
            self._record(False)
        self._candidates = None if told is None else told - 1

    @override
    def begin(self, input_ids: Tensor | None) -> None:
        if self.recording:
            self._count_candidates()
        for layer in self._own:
            layer.begin(input_ids)

    @override
    def enter(self, index: int, hidden: Tensor) -> None:
        if index < len(self._own):
            self._own[index].enter(hidden)

    @override
    def observes(self, module: nn.Module) -> bool:
        index = int(module.layer_idx)  # type: ignore[arg-type]
        return index < len(self._own) and self._own[index].observes

    @override
    def observe(self, module: nn.Module, attended: Attended) -> None:
        self._own[int(module.layer_idx)].observe(attended)  # type: ignore[arg-type]

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._record(False)
        for table in self._tables:
            table.keep(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens. Raises: ConfigError, Unsupported: as `KVCacheLayer.crop`."""
        for layer in self._own:
            layer.check_crop(tokens_to_remove)  # check all layers before any of them changes
        super().crop(tokens_to_remove)
        for table in self._tables:
            table.keep(self.get_seq_length())

    @property
    def _own(self) -> list[Layer]:
        return self.layers  # type: ignore[return-value]

    def _sides(self, which: str | None = None) -> list[Any]:
        names = ("key", "value") if which is None else (which,)
        return [getattr(layer, name) for layer in self._own for name in names]

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed prefixes."""
        return sum(side.packed_bytes for side in self._sides())

    @property
    def nbytes(self) -> int:
        """Bytes of everything attention needs: packed prefixes and full-precision residuals."""
        return self.packed_bytes + sum(side.residual_bytes for side in self._sides())

    @property
    def nbytes_allocated(self) -> int:
        """Bytes of all memory that the cache keeps alive.

        Besides `nbytes`: reserved rows, which save a copy at every token; the decoded copy (`keep_decoded`); the angles
        of rotary embeddings that codecs undo; attention scores of tokens; and the last update, where `crop` can undo
        it. Constants of a method are shared by its caches and not counted.
        """
        return allocated_bytes(self, self.method)

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element of packed keys and values; a side that packs none counts in full precision."""
        return self.side_bits()

    @property
    def effective_bits(self) -> float:
        """Stored bits per element of all tokens seen so far, residual included; evicted tokens count with 0 bits."""
        sides = [(layer, side) for layer in self._own for side in (layer.key, layer.value)]
        elements = sum(side.elements_per_token * (side.tokens + layer.evicted) for layer, side in sides)
        return 8 * self.nbytes / elements if elements else 0.0

    def side_bits(self, which: str | None = None) -> float:
        """Stored bits per element of `key`, `value` or both: of packed tokens, or of full precision if none are."""
        sides = [side for side in self._sides(which) if side.tokens]
        elements = sum(side.elements_per_token for side in sides)
        return sum(side.bits_per_element * side.elements_per_token for side in sides) / elements if sides else 0.0

    @property
    def recompression(self) -> Recompression | None:
        """What encoding packed tokens again has changed, over all layers; None: the method never does."""
        found = [done for side in self._sides() if (done := getattr(side, "recompression", None)) is not None]
        return Recompression(*map(sum, zip(*found, strict=True))) if found else None

    def check_finite(self) -> None:
        """Raise `DataError` naming the first layer whose full-precision states are NaN or infinite."""
        for side in self._sides():
            side.check_finite()

    def save(self, path: str | Path) -> None:
        """Write all that it holds to a safetensors file, from which `load` goes on with equal logits.

        The file names method, model, versions of parts and dtypes. It is written atomically and is the same, byte for
        byte, for the same cache. The model, a method's calibration and the decoded copy are not in it.

        Raises:
            RecordError: a path that cannot be written.
            Unsupported: a method whose state has no form in a file (transformers' own caches), or that nothing names.
        """
        model = self._model()
        if model is None:
            raise Unsupported("cache.save: its model is gone, which the file has to name")
        about = {**files.identity(model, self.method, len(self._own)), "label": self.method.label}
        files.write(Path(path), about, self._own, self._tables, self.dtype)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: nn.Module,
        method: GivesLayers,
        keep_decoded: bool = False,
        quantized_prefill: bool = False,
        attention: str = "dense",
    ) -> KVCache:
        """A cache that goes on from what `save` wrote, here or elsewhere.

        Args:
            model: with the weights and the dtype of the one that filled it, on any device.
            method: with the settings, the residual and the tables of the one that filled it.
            keep_decoded, quantized_prefill, attention: as `KVCache` has them; the dtype is the file's.

        Raises:
            DataError: no such file; one that is damaged or was written by something else; another method, model or
                version than the file's, named by what differs. No tensor is larger than the file.
            ConfigError, Unsupported: as `KVCache`.
        """
        path, layers = Path(path), len(head_dims_of(model.config.get_text_config()))  # type: ignore[union-attr, operator]
        given: Any = method
        dtype = files.dtype_of(path, files.identity(model, given, layers))
        cache = cls(model, method, keep_decoded, quantized_prefill, attention, dtype)
        files.read(path, model, cache._own, cache._tables, cache._groups)
        return cache

    def fork(self) -> KVCache:
        """A copy that shares the tokens held so far and grows independently, for many questions on one context."""
        other = copy.copy(self)
        other.layers = [layer.fork() for layer in self._own]
        if self._tables:
            other._tables = [table.fork() for table in self._tables]
            other._share_tables()
        return other

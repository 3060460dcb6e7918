"""A method: codecs, residual and policies, and the cache layers made of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from kvq.cache.joined import JoinedLayer
from kvq.cache.layer import KVCacheLayer, Layer
from kvq.cache.packed import packed_layer
from kvq.cache.side import CacheSide
from kvq.codecs import Codec, ComponentQuantizer, FisherTransform, Order, PairOrder, StoredWithKeys, calibrated_parts
from kvq.config.bits import Bits, mean_label
from kvq.config.method import BackendConfig
from kvq.config.residual import Residual, ResidualSide
from kvq.config.run import Mla, WindowLayers
from kvq.errors import ConfigError, Unsupported
from kvq.kernels import joint_of, linear_chain_of
from kvq.methods.all_layers import JoinedSide, joined_layers
from kvq.methods.detected import SinkDetection
from kvq.methods.eviction import Eviction
from kvq.methods.kept_keys import KeptKeys, numbered, packed_side_of, side_of
from kvq.methods.merged import GqaCompensation, MergedRotation
from kvq.methods.mixed_precision import MixedPrecision
from kvq.methods.transformers_caches import TransformersLayer
from kvq.models.layers import KvLayer, interleaved_in_gguf
from kvq.results.tensor_files import digest

_BEYOND_CODECS = (
    *("backend", "token_policy", "eviction", "first_layers", "by_layer", "kept_keys", "sink_detection", "sink_tokens"),
    *("merged", "gqa", "is_calibrated", "joins_sides", "joins_layers"),
)


@dataclass(frozen=True)
class FirstLayers:
    """Codecs of the first `count` layers; None: the codec of the other layers."""

    count: int
    key: Codec | None
    value: Codec | None


@dataclass(frozen=True)
class Method:
    """A codec for keys and one for values (None = full precision), and when tokens leave full precision.

    Attributes:
        bits: None for a fixed-rate method.
        full_precision_layers: `key` and `value` -> layers whose keys or values stay in full precision.
        backend: a cache of transformers that replaces the codecs.
        sink_tokens: number of first tokens that stay in full precision.
        bound: `key` and `value` -> codecs of each layer with their tables (`kvq.calibration.files.bind`); empty
            for a method without calibration.
        kept_keys: tokens whose keys stay in full precision.
        sink_detection: finds tokens that stay in full precision.
        by_layer: the method at the bits of each layer, where these have bits of their own; `key`, `value` and `bits`
            are then those of the first.
        settings: what it was built from, as plain JSON data (`kvq.config.identity.canonical_method`); empty for a
            method that was put together by hand.
        gqa: bits that are added in a model whose query heads share KV heads.
        window_layers: whether layers that attend to a window of tokens are quantized as the others.
        merged: rotates values or keys by the model's weights; their codecs then have no such stage.
        mla: what is cached of multi-head latent attention.
    """

    name: str
    key: Codec | None
    value: Codec | None
    residual: Residual
    bits: Bits | None
    full_precision_layers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    backend: BackendConfig | None = None
    first_layers: FirstLayers | None = None
    sink_tokens: int = 0
    bound: Mapping[str, Sequence[Codec | None]] = field(default_factory=dict)
    eviction: Eviction | None = None
    token_policy: MixedPrecision | None = None
    kept_keys: KeptKeys | None = None
    sink_detection: SinkDetection | None = None
    by_layer: Sequence[Method] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    gqa: GqaCompensation | None = None
    window_layers: WindowLayers = WindowLayers.quantize
    merged: MergedRotation | None = None
    mla: Mla = Mla.latent

    @property
    def joins_sides(self) -> bool:
        """The codec of the keys stores a token's values with them."""
        return isinstance(self.value, StoredWithKeys)

    def check_joined(self) -> None:
        """Raise `ConfigError` where parts of one store are given for two, or of two for one."""
        early = [] if self.first_layers is None else [self.first_layers.key, self.first_layers.value]
        for codec in filter(None, (self.key, self.value, *early)):
            both = self.joins_sides and codec is self.key
            for stage_name, stage in codec.stages:
                if getattr(stage, "before_values", False) != both and stage.uses_rope:
                    raise ConfigError(
                        f"{stage_name}.before_values={not both}: true where values are stored with keys, only"
                    )
        if not self.joins_sides:
            return
        name: str | None = self.beyond_codecs("sink_tokens", "is_calibrated", "joins_sides")
        if name is None and any(self.full_precision_layers.values()):
            name = "full_precision_layers"
        if self.residual.key != self.residual.value:
            name = "a residual for keys and another for values"
        if name is None and self.bits is not None and self.bits.key != self.bits.value:
            name = f"bits={self.bits.label}"
        parts = {} if self.key is None else calibrated_parts(self.key)
        if not all(isinstance(part, FisherTransform | ComponentQuantizer) for part in parts.values()):
            name = "tables that are fitted to keys alone"
        if self.key is None or name is not None:
            raise ConfigError(f"method={self.name}: values are stored with the keys; not with {name or 'key=null'}")

    def check_latent(self) -> None:
        """Raise `Unsupported` for a method that cannot quantize what a latent expands to."""
        if self.mla is Mla.latent:
            return
        codecs = [codec for codec in (self.key, self.value) if codec is not None]
        reason = (
            "undoes rotary embeddings, which are in a part of such keys" if any(c.uses_rope for c in codecs) else None
        )
        if self.is_calibrated or self.merged is not None:
            reason = "is fitted to the latent"
        if self.joins_sides:
            reason = "stores values with keys, which have other channels"
        if self.token_policy is not None or self.eviction is not None or self.kept_keys is not None:
            reason = "chooses tokens, which it is not tried with"
        if reason is not None:
            raise Unsupported(f"cache.mla=expanded: method={self.name} {reason}; use cache.mla=latent")

    def check_layers(self, layers: int) -> None:
        """Raise `ConfigError` where bits are given for another number of layers than the model's `layers`."""
        if self.by_layer and len(self.by_layer) != layers:
            raise ConfigError(
                f"method.bits_by_layer: {len(self.by_layer)} numbers for a model with {layers} layers; one for each"
            )

    def codec(self, side: str, layer: int, layers: int) -> Codec | None:
        """The codec of `key` or `value` in one of `layers` layers; None where that layer stays in full precision.

        Raises:
            Unsupported: a calibrated method without a calibration, or with that of another number of layers.
        """
        codec = None if layer in self.whole_layers(side, layers) else self.codec_of(side, layer)
        if codec is None or not calibrated_parts(codec):
            return codec
        if side not in self.bound:
            raise Unsupported(
                f"method={self.name}: not calibrated; `python run.py method={self.name} model=...` calibrates it, and "
                "kvq.bind_calibration(method, model, file) takes the file that this leaves in results/calibration"
            )
        if len(self.bound[side]) != layers:
            raise Unsupported(
                f"calibration of method={self.name}: of a model with {len(self.bound[side])} layers, not {layers}"
            )
        return self.bound[side][layer]

    def whole_layers(self, side: str, layers: int) -> set[int]:
        """Indices of the layers, of `layers`, whose keys (or values) stay in full precision."""
        return numbered(self.full_precision_layers.get(side, ()), layers)

    def codec_of(self, side: str, layer: int) -> Codec | None:
        """The codec of `key` or `value` for a layer, whether or not that layer stays in full precision."""
        if self.by_layer:
            return self.by_layer[layer].codec_of(side, layer)
        early = None if self.first_layers is None or layer >= self.first_layers.count else self.first_layers
        own: Codec | None = None if early is None else getattr(early, side)
        return own or getattr(self, side)

    @property
    def label(self) -> str:
        """Name and bits, means where layers have bits of their own."""
        bits = [method.bits for method in self.by_layer or (self,) if method.bits is not None]
        return f"{self.name} {mean_label(bits) if bits else ''}".strip()

    def identity(self, layers: int) -> dict[str, Any]:
        """What decides how it stores the states of a model of `layers` layers, as JSON data.

        That is its settings and residual, the tokens whose keys it keeps, and a hash of its tables.

        Raises:
            Unsupported: a method without settings, or a calibrated one without tables.
        """
        if not self.settings:
            raise Unsupported(f"method={self.name}: put together by hand, so nothing names it; use kvq.build_method")
        kept = None if self.kept_keys is None or self.kept_keys.ids is None else list(self.kept_keys.ids)
        tables = digest(self._tables(layers)) if self.is_calibrated else None
        found = {**self.settings, "residual": asdict(self.residual), "kept_ids": kept, "tables": tables}
        if self.window_layers is WindowLayers.keep:
            found["window_layers"] = self.window_layers.value
        if self.mla is Mla.expanded:
            found["latent"] = self.mla.value
        return found

    def _tables(self, layers: int) -> dict[str, Tensor]:
        """The tables of all layers, by side, layer, part and name."""
        found: dict[str, Tensor] = {}
        for side, layer in itertools.product(("key", "value"), range(layers)):
            codec = self.codec(side, layer, layers)
            if codec is not None and codec.joins_layers and layer:
                continue  # it is that of the first
            for part, own in ({} if codec is None else calibrated_parts(codec)).items():
                found |= {f"{side}.{layer}.{part}.{name}": table for name, table in own.tables.items()}
        return found

    @property
    def is_calibrated(self) -> bool:
        """Some part of a codec has tables that a calibration fits."""
        return any(codec is not None and calibrated_parts(codec) for codec in (self.key, self.value))

    @property
    def fits_first_tokens(self) -> bool:
        """Some codec has tables that are fitted to the first tokens of each sequence."""
        return any(codec is not None and codec.fits_first_tokens for codec in (self.key, self.value))

    @property
    def joins_layers(self) -> bool:
        """Some codec encodes the states of all layers together."""
        return any(codec is not None and codec.joins_layers for codec in (self.key, self.value))

    def _check_layers_joined(self, held: Sequence[KvLayer], quantized_prefill: bool) -> None:
        if quantized_prefill:
            raise Unsupported(f"quantized_prefill: {self.name} encodes a token once all layers have its states")
        name = self.beyond_codecs("sink_tokens", "is_calibrated", "joins_layers")
        if any(self.full_precision_layers.values()):
            name = "full_precision_layers"
        if name is not None:
            raise Unsupported(f"method.{name}: {self.name} encodes all layers together, and has nothing beside")
        dims = {(one.head_dim, one.value_dim) for one in held}
        if len(dims) > 1 or (self.window_layers is WindowLayers.keep and any(one.window for one in held)):
            raise Unsupported(f"model: {self.name} encodes all layers together, which are alike and all quantized")

    @property
    def is_full_precision(self) -> bool:
        """Neither keys nor values are quantized, and none are evicted."""
        return self.key is None and self.value is None and self.backend is None and self.eviction is None

    def beyond_codecs(self, *allowed: str) -> str | None:
        """What the method has besides one codec for keys and one for values, other than what is `allowed`.

        The name of the first such attribute (`_BEYOND_CODECS`), for an error; None: there is none.
        """
        return next((name for name in _BEYOND_CODECS if name not in allowed and getattr(self, name)), None)

    def check_packed(self) -> None:
        """Raise `Unsupported` where attention cannot read the method's codes."""
        joined = ["joins_sides"] if self.key is not None and joint_of(self.key) is not None else []
        name = self.beyond_codecs("by_layer", "sink_tokens", "merged", "gqa", "is_calibrated", *joined)
        if name is not None:
            raise Unsupported(f"cache.attention=packed: method={self.name} has {name}; use cache.attention=dense")
        alike = self.residual.key == self.residual.value and not any(self.full_precision_layers.values())
        if self.sink_tokens and not (alike and self.key is not None and self.value is not None):
            raise Unsupported(
                f"cache.attention=packed: method={self.name} has sink_tokens, and keys that are packed at other times "
                "than values; use cache.attention=dense"
            )
        for method in (self, *self.by_layer):
            for codec in filter(None, (method.key, None if self.joins_sides else method.value)):
                linear_chain_of(codec)

    def layers(
        self,
        config: Any,
        held: Sequence[KvLayer],
        keep_decoded: bool = False,
        quantized_prefill: bool = False,
        packed: bool = False,
    ) -> Sequence[Layer]:
        """The layers of a cache under this method, as `kvq.cache.cache.GivesLayers` has it.

        Raises:
            ConfigError: kept keys without token ids, bits for another number of layers, parts that do not go together.
            Unsupported: a head dim, packed attention or a quantized prefill that the method cannot do.
        """
        self.check_layers(len(held))
        if self.merged is not None:
            self.merged.check(config)
        if self.asks_for_order:
            return self.in_order_of(config).layers(config, held, keep_decoded, quantized_prefill, packed)
        if self.gqa is not None:
            return self._compensated(config).layers(config, held, keep_decoded, quantized_prefill, packed)
        if packed:
            self.check_packed()
        for codec, dims in ((self.key, [one.head_dim for one in held]), (self.value, [one.value_dim for one in held])):
            if codec is not None:
                for head_dim in set(dims):
                    codec.check(head_dim)
        if self.backend is not None:
            if quantized_prefill:
                raise Unsupported(f"quantized_prefill: method={self.name} attends to a prefill in full precision")
            backends = [method.backend or self.backend for method in self.by_layer or [self] * len(held)]
            own = zip(backends, held, strict=True)
            return [TransformersLayer(backend, self.residual.key, f"layer {one.index}") for backend, one in own]
        # Policies that choose tokens go by all of them; a model's own mask then hides those outside of its window.
        if self.token_policy or self.eviction:
            if getattr(config, "kv_lora_rank", None):
                raise Unsupported(f"method={self.name}: goes by keys that the model expands from the latent it caches")
            held = [replace(one, window=None) for one in held]
        if self.joins_layers:
            self._check_layers_joined(held, quantized_prefill)
            return joined_layers([self._sides(place, held, keep_decoded) for place in range(len(held))])
        made = self._of_both if self.joins_sides else self._apart
        layers = [made(place, held, keep_decoded, quantized_prefill) for place in range(len(held))]
        if packed:
            return [packed_layer(layer, packed_side_of) for layer in layers]
        if self.token_policy is not None:
            return self.token_policy.layers(self.name, layers, keep_decoded)
        return layers if self.eviction is None else self.eviction.layers(layers, config)

    @property
    def asks_for_order(self) -> bool:
        """Some codec puts channels into the order of a GGUF file, which only the model decides."""
        stages = [stage for codec in (self.key, self.value) if codec is not None for _, stage in codec.stages]
        return any(isinstance(stage, PairOrder) and stage.order is Order.gguf for stage in stages)

    def in_order_of(self, config: Any) -> Method:
        """The method with the order of channels that the model's GGUF file has, where its codecs ask for that."""
        if not self.asks_for_order:
            return self
        own = interleaved_in_gguf(config)

        def decided(codec: Codec | None) -> Codec | None:
            found = [] if codec is None else codec.stages
            stages = ((name, stage.decided(own) if isinstance(stage, PairOrder) else stage) for name, stage in found)
            return None if codec is None else codec.rebuilt(stages)

        return replace(self, key=decided(self.key), value=decided(self.value))

    def _compensated(self, config: Any) -> Method:
        """The method with the bits of its codecs raised, in every layer, as query heads of the model share KV heads."""
        assert self.gqa is not None
        codecs: dict[str, Any] = {side: self.gqa.codec(getattr(self, side), config) for side in ("key", "value")}
        by_layer = tuple(method._compensated(config) for method in self.by_layer)
        return replace(self, gqa=None, by_layer=by_layer, **codecs)

    def _sides(self, place: int, held: Sequence[KvLayer], keep_decoded: bool) -> tuple[CacheSide, CacheSide]:
        key, value = (self._side(side, place, held, keep_decoded) for side in ("key", "value"))
        return key, value

    def _apart(self, place: int, held: Sequence[KvLayer], keep_decoded: bool, quantized_prefill: bool) -> KVCacheLayer:
        return KVCacheLayer(*self._sides(place, held, keep_decoded), quantized_prefill, held[place].window)

    def _of_both(
        self, place: int, held: Sequence[KvLayer], keep_decoded: bool, quantized_prefill: bool
    ) -> KVCacheLayer:
        one = held[place]
        if one.head_dim != one.value_dim:
            raise Unsupported(f"method={self.name}: keys of {one.head_dim} channels a head, values of {one.value_dim}")
        side = self._side("key", place, held, keep_decoded)
        if side.codec is None:  # a layer with a window, kept in full precision
            return self._apart(place, held, keep_decoded, quantized_prefill)
        side.label = f"layer {one.index} keys and values"
        return JoinedLayer(side, quantized_prefill, one.window)

    def in_window(self, codec: Codec | None, residual: ResidualSide) -> tuple[Codec | None, ResidualSide]:
        """Codec and residual of a side, without kept tokens, in a layer that attends to a window of tokens."""
        if self.window_layers is WindowLayers.keep:
            return None, residual
        drops = codec is not None and not codec.stores_lists and not self.sink_tokens
        return codec, residual.in_blocks() if drops else residual

    def _side(self, side: str, place: int, held: Sequence[KvLayer], keep_decoded: bool) -> CacheSide:
        residual, count = getattr(self.residual, side), len(held)
        codec, own = self.codec(side, place, count), residual
        if held[place].window is not None:
            codec, own = self.in_window(codec, residual)
        label, kept = f"layer {held[place].index} {side}s", self.kept_keys
        if codec is not None and codec.joins_layers:
            return JoinedSide(codec, residual, label, keep_decoded, self.sink_tokens)
        if codec is not None and kept is not None and side == "key" and kept.holds(place, count):
            return kept.side(codec, residual, label, keep_decoded)
        if self.sink_detection is not None:
            return self.sink_detection.side(codec, residual, label, keep_decoded)
        return side_of(codec, own, label, keep_decoded, self.sink_tokens)


def bind_kept_keys(method: Method, tokenizer: Any) -> Method:
    """The method with the ids of the tokens whose keys it keeps; unchanged where it keeps none.

    Args:
        tokenizer: of the model that it will run on.

    Raises:
        ConfigError: a text that is not one token.
    """
    return method if method.kept_keys is None else replace(method, kept_keys=method.kept_keys.bound(tokenizer))

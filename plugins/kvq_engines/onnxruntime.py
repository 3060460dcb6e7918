"""ONNX Runtime's GroupQueryAttention on the CPU, with its quantized cache, in the place of a model's attention."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvq.cache.hooks import attentions, layer_number
from kvq.cache.observe import INTERFACE, HookedFunctions, hook_attention_functions, scaling_of
from kvq_engines.packages import check_installed

PACKAGES: Final = {"onnxruntime": "1.32.0", "onnx": "1.23.2"}
_BATCH: Final = 256
_DTYPES: Final = {None: np.float32, 8: np.int8, 4: np.uint8}
AttentionFunction = Callable[..., Any]
Scales = tuple[Float[Tensor, "_heads 1 _dim"], Float[Tensor, "_heads 1 _dim"]]
"""Steps of a layer's keys and values: of each channel of each KV head, or one number `[1, 1, 1]`."""


@functools.lru_cache(maxsize=64)
def attention_session(
    heads: int, kv_heads: int, head_dim: int, bits: int | None = None, per_channel: bool = False, **attributes: float
) -> Any:
    """An inference session of one GroupQueryAttention, on as many threads as torch has.

    Args:
        heads, kv_heads: of queries, and of keys and values.
        bits: of the cache, 8 or 4 (two codes in a byte, 8 added to each); None: fp32.
        per_channel: a step for each channel of each KV head, instead of one for keys and one for values.
        attributes: of the operator, such as `scale`, `softcap` and `local_window_size`.

    Inputs: `query`, `key`, `value` `[batch, tokens, heads * head_dim]`, `past_key`, `past_value` `[batch, kv_heads,
    past, dim]`, `seqlens_k` `[batch]` (tokens in all, less one), `total` `[1]`, `k_scale`, `v_scale`; outputs: as the
    query, and keys and values with those of the past.
    """
    import onnx
    import onnxruntime

    make_info, float32, int32 = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
    names = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total"]
    stored, dim = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(_DTYPES[bits])), head_dim // (2 if bits == 4 else 1)
    width = {"query": heads * head_dim, "key": kv_heads * head_dim, "value": kv_heads * head_dim}
    kinds: dict[str, tuple[int, list[Any]]] = {name: (float32, ["batch", "tokens", n]) for name, n in width.items()}
    kinds |= {name: (stored, ["batch", kv_heads, "past", dim]) for name in names[3:5]}
    kinds |= {"seqlens_k": (int32, ["batch"]), "total": (int32, [1])}
    settings: dict[str, Any] = {"num_heads": heads, "kv_num_heads": kv_heads, **attributes}
    if bits is not None:
        kind = "PER_CHANNEL" if per_channel else "PER_TENSOR"
        settings |= {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": bits}
        kinds |= {name: (float32, [kv_heads * head_dim if per_channel else 1]) for name in ("k_scale", "v_scale")}
    results = {"output": kinds["query"], "present_key": kinds["past_key"], "present_value": kinds["past_value"]}
    results |= {name: (kind, [*shape[:2], "all", dim]) for name, (kind, shape) in list(results.items())[1:]}
    inputs = [*names, *[""] * 5, "k_scale", "v_scale"] if bits else names
    node = onnx.helper.make_node("GroupQueryAttention", inputs, list(results), domain="com.microsoft", **settings)
    described = [[make_info(name, *kind) for name, kind in part.items()] for part in (kinds, results)]
    versions = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    graph = onnx.helper.make_graph([node], "attention", described[0], described[1])
    model = onnx.helper.make_model(graph, opset_imports=versions, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class _ReplacedFunctions(HookedFunctions):
    """Attention functions that `replace` makes of a model's own."""

    def __init__(self, functions: Any, replace: Callable[[AttentionFunction], AttentionFunction]) -> None:
        super().__init__(functions, lambda *_: None)
        self._replace = replace

    def get_interface(self, name: str, default: AttentionFunction) -> AttentionFunction:
        """What takes the place of the attention function `name`."""
        return self._replace(self._functions.get_interface(name, default))


@contextlib.contextmanager
def replace_attention(model: nn.Module, replace: Callable[[AttentionFunction], AttentionFunction]) -> Iterator[None]:
    """Within the context, a model attends by what `replace` makes of its own attention function.

    Raises:
        Unsupported: attention that does not go through transformers' attention interface.
    """
    source = sys.modules[type(attentions(model)[0]).__module__]
    undo = hook_attention_functions(attentions(model)[0], lambda *_: None)
    setattr(source, INTERFACE, _ReplacedFunctions(getattr(source, INTERFACE)._functions, replace))
    try:
        yield
    finally:
        undo()


class OnnxRuntime(contextlib.AbstractContextManager["OnnxRuntime"]):
    """A transformers model that attends by ONNX Runtime; all else is PyTorch's.

    Args:
        model: a causal language model in fp32 on the CPU, whose attention goes through transformers' interface.
        bits: of the cache, 8 or 4; None: fp32.
        scales: steps of each layer, as many for keys as for values; they belong to the model and take no bits.

    Raises:
        ConfigError: ONNX Runtime is not installed, or in another version.
    """

    version: ClassVar[int] = 1
    name = "ONNX Runtime"

    def __init__(self, model: Any, bits: int | None = None, scales: Sequence[Scales] | None = None) -> None:
        check_installed("onnxruntime", PACKAGES)
        self._model, self._bits, self._scales = model, bits, scales
        self._caches: dict[int, list[Any]] = {}
        self.vocab = int(model.config.get_text_config().vocab_size)

    @property
    def build(self) -> str:
        """The engine's version and where it computes."""
        return f"{self.name} ({PACKAGES['onnxruntime']}; CPU), other layers in PyTorch"

    @torch.inference_mode()
    def logits(self, tokens: Int[Tensor, " tokens"]) -> Iterator[Float[Tensor, "positions vocab"]]:
        """The logits after each token of a text, in order, some positions at a time, from an empty cache."""
        self._caches = {}
        for start in range(0, tokens.numel(), _BATCH):
            part = tokens[None, start : start + _BATCH]
            positions = torch.arange(start, start + part.shape[1])[None]
            with replace_attention(self._model, lambda *_: self._attend):
                found = self._model(part, position_ids=positions, use_cache=False).logits[0].float()
            yield found

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **given: Any
    ) -> tuple[Tensor, None]:
        """An attention function of transformers, which appends tokens to the cache and attends to them as stored."""
        layer, kv_heads, tokens, dim = layer_number(module, given), *key.shape[1:]
        attributes: dict[str, float] = {"scale": scaling_of(module, query, given)}
        attributes |= {"softcap": float(cap)} if (cap := given.get("softcap")) is not None else {}
        attributes |= {"local_window_size": size} if (size := given.get("sliding_window")) is not None else {}
        scales = None if self._scales is None else self._scales[layer]
        per_channel = scales is not None and scales[0].numel() > 1
        session = attention_session(query.shape[1], kv_heads, dim, self._bits, per_channel, **attributes)
        empty = np.zeros((1, kv_heads, 0, dim // 2 if self._bits == 4 else dim), _DTYPES[self._bits])
        past = self._caches.get(layer, [empty, empty])
        total = past[0].shape[2] + tokens
        feed = {
            name: x.transpose(1, 2).flatten(2).numpy()
            for name, x in zip(("query", "key", "value"), (query, key, value), strict=True)
        }
        feed |= {"past_key": past[0], "past_value": past[1]}
        feed |= {"seqlens_k": np.array([total - 1], np.int32), "total": np.array([total], np.int32)}
        if scales is not None:
            feed |= {name: x.flatten().numpy() for name, x in zip(("k_scale", "v_scale"), scales, strict=True)}
        out, *self._caches[layer] = session.run(None, feed)
        return torch.from_numpy(out).unflatten(-1, (query.shape[1], dim)), None

    def cached(self, layers: int, heads: int, head_dim: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer as stored of the last text, in steps: `[heads, tokens, head_dim]`."""

        def unpack(stored: Any) -> Tensor:
            codes = torch.from_numpy(stored[0])
            if self._bits == 4:
                codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).float() - 8
            return codes.float()

        return [tuple(map(unpack, self._caches[layer])) for layer in range(layers)]  # type: ignore[misc]

    @property
    def state_bytes(self) -> int:
        """Bytes of the cached keys and values of the tokens read."""
        return sum(int(side.nbytes) for pair in self._caches.values() for side in pair)

    def side_bits(self, side: str) -> float:
        """Bits of an element of `key` or `value` in the cache; steps are the model's."""
        return float(self._bits or 32)

    def __exit__(self, *_: object) -> None:
        self._caches = {}

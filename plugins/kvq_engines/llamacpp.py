"""llama.cpp through the C functions of a pinned wheel: logits of every position of a text, for any type of cache.

The wheel's structures pass by value, so their layout belongs to its version; version and defaults are checked before
any use. Models in memory are written as GGUF files, of architectures whose tensors llama.cpp knows.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final
from unittest.mock import patch

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvq.errors import ConfigError, DataError, Unsupported
from kvq.models.layers import head_dims_of, window_of
from kvq_engines.pair_order import interleaved_in_gguf

WHEEL: Final = ("xllamacpp", "2026.10.11549")
TYPES: Final = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
"""ggml's numbers of the types that its cache takes."""
_UNROTATED = "LLAMA_ATTN_ROT_DISABLE"
_BATCH: Final = 512

# Fields that are zero by default and stay so are kept as bytes; sizes and the defaults below are checked at load.
_DECLARATIONS: Final = """
typedef struct {
    void *devices[2];
    int32_t n_gpu_layers, split_mode, load_mode, lazy_mode, main_gpu;
    void *others[4];
    bool vocab_only, check_tensors, use_extra_bufts, no_host, no_alloc, load_mtp;
} model_params;
typedef struct {
    uint32_t n_ctx, n_batch, n_ubatch, n_seq_max, n_rs_seq, n_outputs_max, n_outputs_max_per_seq;
    int32_t n_threads, n_threads_batch;
    int32_t ctx_type, rope_scaling_type, pooling_type, attention_type, flash_attn_type;
    float rope[6];
    uint32_t yarn_orig_ctx;
    float defrag_thold;
    void *callback[2];
    int32_t type_k, type_v;
    void *others[3];
    bool embeddings, offload_kqv, no_perf, op_offload, swa_full, kv_unified;
    void *samplers[3];
} context_params;
typedef struct {
    int32_t n_tokens;
    int32_t *token;
    float *embd;
    int32_t *pos, *n_seq_id;
    int32_t **seq_id;
    int8_t *logits;
} batch;
model_params llama_model_default_params(void);
context_params llama_context_default_params(void);
void llama_backend_init(void);
void llama_log_set(void (*log)(int level, const char *text, void *data), void *data);
void *llama_model_load_from_file(const char *path, model_params params);
void llama_model_free(void *model);
void *llama_model_get_vocab(const void *model);
int32_t llama_vocab_n_tokens(const void *vocab);
int32_t llama_model_n_ctx_train(const void *model);
void *llama_init_from_model(void *model, context_params params);
void llama_free(void *context);
void *llama_get_memory(const void *context);
void llama_memory_clear(void *memory, bool data);
batch llama_batch_init(int32_t tokens, int32_t embd, int32_t sequences);
void llama_batch_free(batch given);
int32_t llama_decode(void *context, batch given);
float *llama_get_logits(void *context);
size_t llama_state_seq_get_size(void *context, int32_t sequence);
size_t llama_state_seq_get_data(void *context, uint8_t *data, size_t size, int32_t sequence);
const char *llama_print_system_info(void);
const char *ggml_version(void);
size_t ggml_row_size(int32_t type, int64_t values);
"""
_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "model": {"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1, "use_extra_bufts": True},
    "context": {
        "n_ctx": 512,
        "n_batch": 2048,
        "n_ubatch": 512,
        "n_seq_max": 1,
        "n_outputs_max_per_seq": 1,
        "rope_scaling_type": -1,
        "flash_attn_type": -1,
        "defrag_thold": -1.0,
        "type_k": 1,
        "type_v": 1,
        "offload_kqv": True,
        "no_perf": True,
    },
}


@functools.cache
def library() -> tuple[Any, Any]:
    """cffi's namespace and the wheel's functions.

    Raises:
        ConfigError: wheel or cffi is not installed, or it is another version than the declarations are of.
    """
    name, pinned = WHEEL
    try:
        found, cffi = importlib.metadata.distribution(name), __import__("cffi")
    except (importlib.metadata.PackageNotFoundError, ModuleNotFoundError) as error:
        raise ConfigError(
            f"task.engine=llamacpp: needs {name}=={pinned} and cffi; pip install -e '.[llamacpp]'"
        ) from error
    if found.version != pinned:
        raise ConfigError(f"task.engine=llamacpp: {name}=={found.version} installed; its layout is known of {pinned}")
    file = next(Path(str(found.locate_file(one))) for one in found.files or () if one.name.endswith(".abi3.so"))
    ffi = cffi.FFI()
    ffi.cdef(_DECLARATIONS)
    lib = ffi.dlopen(str(file))
    for kind, wanted in _DEFAULTS.items():
        given = getattr(lib, f"llama_{kind}_default_params")()
        if odd := [one for one, value in wanted.items() if getattr(given, one) != value]:
            raise ConfigError(
                f"task.engine=llamacpp: {name}: default {odd[0]} is {getattr(given, odd[0])}; another build"
            )
    lib.llama_backend_init()
    return ffi, lib


class LlamaCpp(contextlib.AbstractContextManager["LlamaCpp"]):
    """A GGUF file in llama.cpp, with one type of cache.

    Args:
        file: the GGUF file.
        context: tokens of the longest text.
        key, value: types of the cache, of `TYPES`.
        rotated: whether the engine may rotate keys and values (of quantized types, head dims a multiple of 64).
        flash_attention: fused attention; without it values cannot be quantized.
        threads: of the CPU.

    Raises:
        ConfigError: as `library`; a type that the engine's cache does not take.
        DataError: no GGUF file, or a context beyond the model's.
        Unsupported: an architecture, or a combination of types, that this build refuses.
    """

    version: ClassVar[int] = 1
    name = "llama.cpp"

    def __init__(
        self,
        file: Path,
        context: int,
        key: str = "f16",
        value: str = "f16",
        *,
        rotated: bool = True,
        flash_attention: bool = True,
        threads: int = 1,
    ) -> None:
        for kind in (key, value):
            if kind not in TYPES:
                raise ConfigError(f"task.engine=llamacpp: type {kind} of a cache: one of {', '.join(TYPES)}")
        if not file.is_file():
            raise DataError(f"task.engine.file={file}: no such file")
        self._ffi, self._lib = library()
        self._names, self._types = (key, value), {"key": TYPES[key], "value": TYPES[value]}
        self._context = self._model = self._ffi.NULL
        self._tokens = 0
        try:
            with _collect_messages(self._ffi, self._lib) as messages:
                self._load_model(file, context, messages)
                self._create_context(context, rotated, flash_attention, threads, messages)
        except BaseException:
            self.close()
            raise
        self.vocab = int(self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model)))
        self._memory = self._lib.llama_get_memory(self._context)

    def _load_model(self, file: Path, context: int, messages: list[str]) -> None:
        params = self._lib.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = False  # repacked weights, whose products are rounded otherwise
        self._model = self._lib.llama_model_load_from_file(os.fsencode(file), params)
        if not self._model:
            raise Unsupported(f"task.engine=llamacpp: {file.name} cannot be loaded: {_reason(messages)}")
        longest = self._lib.llama_model_n_ctx_train(self._model)
        if context > longest:
            raise DataError(f"task.context={context}: {file.name} takes at most {longest} tokens")

    def _create_context(self, context: int, rotated: bool, fused: bool, threads: int, messages: list[str]) -> None:
        asked = self._lib.llama_context_default_params()
        asked.n_ctx, asked.n_batch, asked.n_ubatch = -(-context // 256) * 256, _BATCH, _BATCH
        asked.n_threads = asked.n_threads_batch = threads
        asked.flash_attn_type, asked.offload_kqv = int(fused), False
        asked.type_k, asked.type_v = self._types["key"], self._types["value"]
        with patch.dict(os.environ):  # which the engine reads when it makes a cache
            os.environ.pop(_UNROTATED, None)
            if not rotated:
                os.environ[_UNROTATED] = "1"
            self._context = self._lib.llama_init_from_model(self._model, asked)
        if not self._context:
            key, value = self._names
            raise Unsupported(f"task.engine=llamacpp: keys {key}, values {value}: {_reason(messages)}")

    @property
    def build(self) -> str:
        """The engine's version, the wheel's, and what the processor offers and the build uses."""
        flags = self._ffi.string(self._lib.llama_print_system_info()).decode()
        named = [part.split("=")[0].strip() for part in flags.replace("CPU :", "").split("|") if "= 1" in part]
        version = self._ffi.string(self._lib.ggml_version()).decode()
        return f"{self.name} (ggml {version}, {'=='.join(WHEEL)}; {' '.join(named)})"

    def logits(self, tokens: Int[Tensor, " tokens"]) -> Iterator[Float[Tensor, "positions vocab"]]:
        """The logits after each token of a text, in order, some positions at a time; the cache is emptied before.

        Raises:
            DataError: the engine fails on the text.
        """
        self._lib.llama_memory_clear(self._memory, True)
        self._tokens = 0
        yield from self.read(tokens)

    def read(self, tokens: Int[Tensor, " tokens"]) -> Iterator[Float[Tensor, "positions vocab"]]:
        """The logits after each token of a text that follows what was read before. Raises: DataError: as `logits`."""
        batch = self._lib.llama_batch_init(_BATCH, 0, 1)
        try:
            for start in range(0, tokens.numel(), _BATCH):
                part = tokens[start : start + _BATCH].tolist()
                batch.n_tokens = len(part)
                for place, token in enumerate(part):
                    batch.token[place], batch.pos[place] = token, self._tokens + place
                    batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, 1
                if (code := self._lib.llama_decode(self._context, batch)) != 0:
                    raise DataError(f"task.engine=llamacpp: llama_decode returned {code} at token {start}")
                self._tokens += len(part)
                found = self._ffi.buffer(self._lib.llama_get_logits(self._context), 4 * len(part) * self.vocab)
                yield torch.from_numpy(np.frombuffer(found, np.float32).reshape(len(part), self.vocab).copy())
        finally:
            self._lib.llama_batch_free(batch)

    def side_bits(self, side: str) -> float:
        """Bits of an element of `key` or `value` as ggml stores its type, scales included."""
        values = 32 * 8
        return 8 * int(self._lib.ggml_row_size(self._types[side], values)) / values

    @property
    def state_bytes(self) -> int:
        """Bytes of the engine's file of its cache: keys, values and their positions."""
        return int(self._lib.llama_state_seq_get_size(self._context, 0))

    def cached(self, layers: int, heads: int, head_dim: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer as they are stored of the last text, dequantized: `[heads, tokens, head_dim]`.

        Channels are in the engine's order and rotation. Values are those of fused attention, which are not transposed.
        """
        import gguf

        state, at, sides = self.state(), 0, []
        for side in self._types:
            kind, own = gguf.GGMLQuantizationType(self._types[side]), []
            row = int(self._lib.ggml_row_size(self._types[side], heads * head_dim))
            for _ in range(layers):  # after its type and the bytes of a row
                at = state.index(struct.pack("<iQ", kind, row), at) + 12
                stored = np.frombuffer(state, np.uint8, row * self._tokens, at).reshape(self._tokens, row)
                at += stored.size
                found = torch.from_numpy(gguf.quants.dequantize(stored, kind).astype(np.float32))
                own.append(found.view(self._tokens, heads, head_dim).transpose(0, 1))
            sides.append(own)
        return list(zip(*sides, strict=True))

    def state(self) -> bytes:
        """The cached positions, keys and values, as the engine writes them to a file (`llama_state_seq_get_data`)."""
        size = self.state_bytes
        found = self._ffi.new("uint8_t[]", size)
        self._lib.llama_state_seq_get_data(self._context, found, size, 0)
        return bytes(self._ffi.buffer(found, size))

    def close(self) -> None:
        """Free context and model."""
        if self._context:
            self._lib.llama_free(self._context)
        if self._model:
            self._lib.llama_model_free(self._model)
        self._context = self._model = self._ffi.NULL

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _collect_messages(ffi: Any, lib: Any) -> Iterator[list[str]]:
    """Collect the engine's messages in a list within the context; later ones are dropped."""
    messages: list[str] = []

    @ffi.callback("void(int, const char *, void *)")
    def keep(_: int, text: Any, __: Any) -> None:
        messages.append(ffi.string(text).decode(errors="replace").strip())

    lib.llama_log_set(keep, ffi.NULL)
    try:
        yield messages
    finally:
        lib.llama_log_set(_silent_callback(ffi), ffi.NULL)


@functools.cache
def _silent_callback(ffi: Any) -> Any:
    return ffi.callback("void(int, const char *, void *)", lambda *_: None)


def _reason(messages: Sequence[str]) -> str:
    """What the engine says of a failure, in a line: its first message of an error, else its last one."""
    errors = [line for line in messages if re.search(r"error|failed|requires|unsupported|invalid", line, re.IGNORECASE)]
    return (" ".join((errors or list(messages)[-1:] or ["no reason is given"])[0].split()))[:200]


ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""llama.cpp's name of an architecture, by transformers' `model_type`."""


def write_gguf(model: Any, file: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a model's weights and shape as GGUF, without a vocabulary.

    Args:
        model: a transformers causal language model of one of `ARCHITECTURES`.
        file: where to.
        dtype: of its matrices, float32 or float16; vectors stay in float32.

    Raises:
        Unsupported: another architecture, scaled RoPE, attention to a window, a weight without a name in GGUF.
    """
    import gguf

    config = model.config
    name = ARCHITECTURES.get(config.model_type)
    if name is None:
        raise Unsupported(
            f"task.engine: no GGUF is written of model_type={config.model_type}, only of {', '.join(ARCHITECTURES)}; "
            "give task.engine.file"
        )
    rope = config.rope_parameters
    longest = config.max_position_embeddings
    windowed = any((window_of(config, layer) or longest) < longest for layer in range(config.num_hidden_layers))
    if rope.get("rope_type", "default") != "default" or windowed:
        raise Unsupported("task.engine: no GGUF is written of scaled RoPE or of attention to a window")
    known = next(kind for kind, own in gguf.MODEL_ARCH_NAMES.items() if own == name)
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    writer = gguf.GGUFWriter(str(file), name)
    head_dim = head_dims_of(config)[0]
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for given, weight in model.state_dict().items():
        if given != "lm_head.weight" or not config.tie_word_embeddings:
            stored_as = names.get_name(given, try_suffixes=(".weight", ".bias"))
            if stored_as is None:
                raise Unsupported(f"task.engine: GGUF has no name for the weight {given}")
            if interleaved_in_gguf(config) and ("attn_q." in stored_as or "attn_k." in stored_as):
                weight = _interleave_halves(weight, head_dim)
            stored = weight.detach().to("cpu", dtype if weight.ndim > 1 else torch.float32)
            writer.add_tensor(stored_as, np.ascontiguousarray(stored.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave_halves(weight: Float[Tensor, "*rows"], head_dim: int) -> Float[Tensor, "*rows"]:
    """Rows of queries or keys with the two halves of each head's channels interleaved, as llama.cpp's RoPE wants."""
    halves = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)

"""Everything that needs a GPU, in one run of under 8 minutes: errors, times and bytes, as one JSON to commit.

python experiments/bench/gpu_check.py [--out results/bench/gpu.json]
python experiments/bench/gpu_check.py --tiny --out somewhere.json     # the same steps, small, on any machine

The file is written anew behind every step, and a step that fails leaves its reason and takes nothing else away.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import attention_bench
import encode_bench
from kvq_kernels.dispatch import FusedCodec, encoder_for
from transformers import LlamaConfig, LlamaForCausalLM

from kvq.cache import KVCache
from kvq.cache.packed import PreallocatedCache
from kvq.codecs import Codec
from kvq.kernels import attend, eager
from kvq.methods.build import build_method
from kvq.models.load import LoadedModel
from kvq.results.provenance import device_name, package_versions
from kvq.tasks.speed import timed

LIMIT = 8 * 60
HEAVY = 0.7
"""No step begins behind this part of the limit."""
METHODS = (("kivi", 2), ("oscar", 2), ("oscar", 4), ("nsn", 3), ("quarot", 8))
TABLES = (("q4_0", 4), ("turboquant", 3), ("nsnquant", 1), ("nsnquant", 2), ("nsnquant/e8p", 2))
"""Attention is checked for these too; codes of all but the first index a table."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Check:
    """The steps; what several of them need is made once.

    Args:
        device: where.
        tiny: small sizes, to see that every step runs.
    """

    def __init__(self, device: torch.device, tiny: bool) -> None:
        self.device, self.tiny = device, tiny
        self.generator = torch.Generator(device=device).manual_seed(0)
        self._bandwidth: float | None = None
        self._loaded: LoadedModel | None = None

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a copy."""
        if self._bandwidth is None:
            self._bandwidth = attention_bench.copy_bandwidth(self.device, 8 if self.tiny else 1024)
        return self._bandwidth

    def draw(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Normal numbers."""
        return torch.randn(*shape, generator=self.generator, device=self.device, dtype=dtype)

    def cases(self) -> Iterator[tuple[str, int, int, torch.dtype]]:
        """Method, bits, head dim and dtype: all at 128 channels, other head dims for one; each is a compilation."""
        yield from ((name, bits, 128, dtype) for name, bits in METHODS for dtype in DTYPES)
        yield from (("oscar", 2, dim, torch.bfloat16) for dim in ((64,) if self.tiny else (64, 96, 256)))

    def errors(self) -> dict[str, float]:
        """Relative error of the form that serves this device against attention in fp64."""
        out = {}
        more = [(name, bits, 128, dtype) for name, bits in TABLES for dtype in (torch.bfloat16, torch.float32)]
        for name, bits, dim, dtype in (*self.cases(), *more):
            keys, values = (self.draw(2, 2, 391, dim, dtype=dtype) for _ in range(2))
            sides = attention_bench.states_of(build_method(name, bits=bits, head_dim=dim), keys, values)
            q = self.draw(2, 8, 1, dim, dtype=dtype)
            expected = eager.attend(q.double(), *sides, dim**-0.5)
            found = attend(q, *sides, dim**-0.5).double()
            label = f"{name}_{bits}b_d{dim}_{str(dtype).removeprefix('torch.')}"
            out[label] = float((found - expected).norm() / expected.norm())
        return out

    def encoding(self) -> dict[str, dict[str, float]]:
        """Encoding in one pass beside the codec's own: the share of stored bytes that differ, and of decoded states."""
        out = {}
        for name, bits, dim, dtype in self.cases():
            method = build_method(name, bits=bits, head_dim=dim)
            for side in ("key", "value"):
                codec: Codec = getattr(method, side)
                x, mine = self.draw(2, 2, 300, dim, dtype=dtype), FusedCodec(codec)
                assert mine.chain is not None
                found, expected = mine.encode(x, 128), codec.encode(x, 128)
                same = [(found.parts[part] == stored).double().mean() for part, stored in expected.parts.items()]
                apart = codec.decode(found).double() - codec.decode(expected).double()
                out[f"{name}_{bits}b_{side}_d{dim}_{str(dtype).removeprefix('torch.')}"] = {
                    "fused": float(encoder_for(mine.chain, x[:, None, :, :128]) is not None),
                    "parts_differing": 1 - float(torch.stack(same).min()),
                    "decoded_difference": float(apart.norm() / codec.decode(expected).double().norm()),
                }
        return out

    def attention(self) -> list[dict[str, Any]]:
        """INT2 decode attention beside the fastest SDPA on a bf16 cache; on CUDA replays, so without launches."""
        return self._attention("kivi", "oscar")

    def attention_by_tables(self) -> list[dict[str, Any]]:
        """The same for codes of 2 bits that index a table."""
        return self._attention("turboquant", "nsnquant")

    def _attention(self, *names: str) -> list[dict[str, Any]]:
        shapes = [(1, 512), (2, 300)] if self.tiny else [(1, 131072), (16, 32768), (1, 4096)]
        pairs = 3 if self.tiny else 20
        out = []
        for batch, tokens in shapes:
            for name in names:
                sizes = {"batch": batch, "tokens": tokens, "group": 4, "pairs": pairs}
                out.append(attention_bench.measure(name, 2, self.device, self.bandwidth, **sizes))
                gc.collect()
        return out

    def encode(self) -> dict[str, Any]:
        """Encoding in one pass over the codec's own: a prefill of 4096 tokens, a flushed block of 128."""
        prefill, pairs = (256, 2) if self.tiny else (4096, 10)
        names = ("oscar",) if self.tiny else ("kivi", "oscar", "nsn", "quarot")
        return encode_bench.measure(names, (2,), self.device, self.bandwidth, pairs=pairs, prefill=prefill)

    @property
    def loaded(self) -> LoadedModel:
        """A random model of an 8B shape."""
        if self._loaded is None:
            shape: dict[str, int] = {
                "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                "num_key_value_heads": 8, "vocab_size": 128256,
            }  # fmt: skip
            if self.tiny:
                shape |= {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
                shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
            config = LlamaConfig(**shape, head_dim=128, max_position_embeddings=65536)
            with torch.device(self.device):
                torch.set_default_dtype(torch.bfloat16)
                try:
                    model = LlamaForCausalLM(config).eval().requires_grad_(False)
                finally:
                    torch.set_default_dtype(torch.float32)
            self._loaded = LoadedModel(model, self.device)
        return self._loaded

    def prompt(self, batch: int, tokens: int) -> torch.Tensor:
        """Random tokens."""
        size = (batch, tokens)
        return torch.randint(self.loaded.text_config.vocab_size, size, generator=self.generator, device=self.device)

    def cache_bytes(self) -> dict[str, Any]:
        """What a model's cache holds behind a long prompt, residual included, beside bf16."""
        tokens, out = 600 if self.tiny else 32768, {}
        for name in ("kivi", "oscar", "nsn", "quarot"):
            cache = KVCache(self.loaded.model, build_method(name, bits=2), attention="packed")
            timed(self.loaded, cache, self.prompt(1, tokens), 1)
            text = self.loaded.text_config
            dense = 2 * 2 * text.num_hidden_layers * text.num_key_value_heads * 128 * cache.get_seq_length()
            out[name] = {"tokens": tokens, "bytes": cache.nbytes, "bf16_bytes": dense, "ratio": dense / cache.nbytes}
        return out

    def encode_share(self) -> dict[str, Any]:
        """The part of a prefill that goes into encoding: the difference to a prefill that encodes nothing."""
        tokens, repeats = (256, 1) if self.tiny else (4096, 5)
        method, prompt = build_method("oscar", bits=2), self.prompt(1, tokens)
        seconds: dict[str, list[float]] = {"plain": [], "packed": []}
        for _ in range(repeats + 1):
            for name, cache in (
                ("plain", PreallocatedCache(self.loaded.model, tokens + 1)),
                ("packed", KVCache(self.loaded.model, method, attention="packed")),
            ):
                seconds[name].append(timed(self.loaded, cache, prompt, 1)["prefill_seconds"])
        shares = sorted(1 - a / b for a, b in zip(seconds["plain"][1:], seconds["packed"][1:], strict=True))
        return {"tokens": tokens, "prefill_seconds": seconds, "encode_share_of_prefill": shares[len(shares) // 2]}

    def end_to_end(self) -> dict[str, Any]:
        """Generated tokens per second where packed sequences fill the memory that full-precision ones take."""
        tokens, new, batch = (160, 3, 2) if self.tiny else (4096, 32, 8)
        method = build_method("oscar", bits=2)
        makers: dict[str, Callable[[], Any]] = {
            "preallocated": lambda: PreallocatedCache(self.loaded.model, tokens + new),
            "packed": lambda: KVCache(self.loaded.model, method, attention="packed"),
        }
        out: dict[str, Any] = {"tokens": tokens, "new_tokens": new}
        for name, make in makers.items():
            alone = timed(self.loaded, make(), self.prompt(1, tokens), new)  # also compiles and warms up
            if name == "packed":
                batch = max(1, out["preallocated"]["cache_bytes"] // alone["cache_bytes"])
            row = timed(self.loaded, make(), self.prompt(batch, tokens), new)
            rate = {"tokens_per_second": batch * new / row["decode_seconds"], "batch": batch}
            out[name] = {"batch_1": alone, **rate, **row}
        out["ratio"] = out["packed"]["tokens_per_second"] / out["preallocated"]["tokens_per_second"]
        return out


def main() -> None:
    """Run all steps within the limit; a step that there is no time for is left out, by name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that every step runs")
    parser.add_argument("--out", type=Path, default=Path("results/bench/gpu.json"), help="where the JSON goes")
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        sys.exit("error: no GPU is visible to torch; --tiny runs the same steps, small, without one")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start = time.monotonic()
    check = Check(device, args.tiny)
    steps = (
        check.errors, check.encoding, check.attention, check.encode, check.encode_share, check.end_to_end,
        check.cache_bytes, check.attention_by_tables,
    )  # fmt: skip
    report: dict[str, Any] = {
        "machine": {"device": device_name(device), "packages": package_versions()},
        "tiny": args.tiny, "left_out": [], "failed": {}, "seconds": {},
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for step in steps:
        name, begun = step.__name__, time.monotonic()
        if begun - start > LIMIT * HEAVY:
            report["left_out"].append(name)
            continue
        try:
            with torch.inference_mode():
                report[name] = step()
        except Exception as error:  # the rest is still worth the machine's time
            traceback.print_exc()
            report["failed"][name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        report["seconds"][name] = time.monotonic() - begun
        print(f"{name}: {report['seconds'][name]:.0f} s", flush=True)
        args.out.write_text(json.dumps(report, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"wrote {args.out}")
    if report["failed"]:
        sys.exit(f"error: {', '.join(report['failed'])} failed; the reasons are in {args.out}")


if __name__ == "__main__":
    main()

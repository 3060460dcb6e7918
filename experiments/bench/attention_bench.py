"""Decode attention on packed codes beside PyTorch's on a bf16 cache: paired times, bytes that must move, bandwidth."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvq.calibration.budget import fit_sharing, joint_parts
from kvq.codecs import JointMoments, Rope, bind_codec, rope_table
from kvq.kernels import PackedStates, attend, fuse_codec
from kvq.kernels.eager import choose_kernel
from kvq.methods.build import build_method
from kvq.methods.method import Method

RESIDUAL = 128
"""Tokens in full precision behind the codes."""


def clock(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def replayed(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """On CUDA, a replay of what `run` launches: a GPU's own time, without that of launching from Python."""
    if device.type != "cuda":
        return run
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # compiles, and warms up what a capture may not
        for _ in range(3):
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def copy_bandwidth(device: torch.device, mebibytes: int = 256, repeats: int = 9) -> float:
    """Bytes read and written per second by a copy, the best of some: what memory gives at most."""
    source = torch.zeros(mebibytes * 2**20, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2 * source.numel() / min(clock(lambda: target.copy_(source), device) for _ in range(repeats))


def states_of(method: Method, keys: Tensor, values: Tensor) -> tuple[PackedStates, PackedStates]:
    """Keys and values packed in the method's blocks but for the last `RESIDUAL`, as rows of a cache lie."""
    out, before, heads = [], keys.shape[2] - RESIDUAL, keys.shape[1]
    apart = [(method.key, keys), (method.value, values)]
    for codec, states in [(method.key, torch.cat([keys, values], 1))] if method.joins_sides else apart:
        assert codec is not None
        rope = rope_table(before, keys.shape[3]) if codec.uses_rope else None
        if rope is not None:  # as a cache keeps them: in the model's dtype
            rope = Rope(rope.cos.to(keys), rope.sin.to(keys))
        packed = fuse_codec(codec).encode(states[:, :, :before], method.residual.key.size or 128, rope)
        packed.parts.update({name: part.contiguous() for name, part in packed.parts.items()})
        out.append(PackedStates(codec, (packed,), states[:, :, before:].clone(), rope))
    if method.joins_sides:
        return out[0].select_heads(slice(0, heads)), out[0].select_heads(slice(heads, 2 * heads))
    return out[0], out[1]


def fitted(method: Method, heads: int, dim: int) -> Method:
    """A method of transforms of all heads together with tables for random moments; any other as it is."""
    codecs = {("key", 0): method.key} | ({} if method.joins_sides else {("value", 0): method.value})
    if any(codec is None or joint_parts(codec) is None for codec in codecs.values()):
        return method
    heads = 2 * heads if method.joins_sides else heads
    n, generator = heads * dim, torch.Generator().manual_seed(3)

    def moments() -> Tensor:
        root = torch.randn(n, n, generator=generator, dtype=torch.float64)
        return root @ root.mT / n + torch.eye(n, dtype=torch.float64)

    drawn = {place: JointMoments(torch.zeros(n).double(), moments(), moments(), heads, 2 * n) for place in codecs}
    tables = fit_sharing(codecs, drawn)
    own: dict[str, Any] = {side: bind_codec(codec, tables[side, 0], heads, dim) for (side, _), codec in codecs.items()}
    return dataclasses.replace(method, **own)


def decoding(q: Tensor, sides: Sequence[PackedStates]) -> Callable[[], Tensor]:
    """All keys and values decoded, and SDPA of them, as a cache with dense attention does for each token."""
    batch, heads, dim = sides[0].shape

    def run() -> Tensor:
        decoded = [
            torch.cat([side.codec.decode(packed, side.rope) for packed in side.packed], 2)
            for side in sides[: 2 if sides[0].heads is None else 1]
        ]
        read = decoded if sides[0].heads is None else decoded[0].split(heads, 1)
        keys, values = (torch.cat([own, side.full], 2) for own, side in zip(read, sides, strict=True))
        return sdpa(q.reshape(batch, heads, -1, dim), keys, values)

    return run


def references(q: Tensor, keys: Tensor, values: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The ways in which PyTorch attends with queries that share heads; on CUDA also by FlashAttention alone."""
    batch, heads, _, dim = keys.shape
    rows = q.reshape(batch, heads, -1, dim)

    def flash() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return sdpa(rows, keys, values)

    ways: dict[str, Callable[[], Tensor]] = {
        "sdpa, queries of a head as rows": lambda: sdpa(rows, keys, values),
        "sdpa, enable_gqa": lambda: sdpa(q, keys, values, enable_gqa=True),
        "matmul, softmax, matmul": lambda: torch.softmax(rows @ keys.mT * dim**-0.5, -1) @ values,
    }
    return ways | ({"sdpa, flash, queries of a head as rows": flash} if keys.device.type == "cuda" else {})


def in_turns(runs: dict[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Seconds of each, in turns; on CUDA of ten at a time, as a single one is shorter than waiting for it."""
    times = 10 if device.type == "cuda" else 1
    seconds: dict[str, list[float]] = {label: [] for label in runs}
    for turn in range(rounds + 2):
        for label, run in runs.items():
            took = clock(lambda run=run: [run() for _ in range(times)], device) / times
            if turn > 1:  # the first two compile and warm up
                seconds[label].append(took)
    return seconds


def ratios(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """First over second, of times taken in turns: median, extremes, how many."""
    found = [mine / other for mine, other in zip(first, second, strict=True)]
    return {
        "ratio_median": statistics.median(found),
        "ratio_min": min(found),
        "ratio_max": max(found),
        "pairs": len(found),
    }


def measure(
    name: str, bits: float, device: torch.device, bandwidth: float, *, batch: int, tokens: int, group: int, pairs: int,
    heads: int = 8, dim: int = 128,
) -> dict[str, Any]:  # fmt: skip
    """Times in turns over `pairs` rounds; the ratio is to the fastest SDPA of the run, by its median."""
    generator = torch.Generator(device=device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    keys, values, q = (
        draw(batch, count, length, dim) for count, length in ((heads, tokens),) * 2 + ((heads * group, 1),)
    )
    method = build_method(name, bits=bits, head_dim=dim)
    chosen = fitted(method, heads, dim)
    key_states, value_states = states_of(chosen, keys, values)
    plain = {"packed": lambda: attend(q, key_states, value_states, dim**-0.5), **references(q, keys, values)}
    if chosen is not method:  # their transforms are most of the work, so a cache that decodes is the other choice
        plain["decoded"] = decoding(q, (key_states, value_states))
    seconds = in_turns({label: replayed(run, device) for label, run in plain.items()}, device, pairs)
    medians = {label: statistics.median(found) for label, found in seconds.items()}
    fastest = min((label for label in medians if label.startswith("sdpa")), key=lambda label: medians[label])
    sides = (key_states, value_states)
    packed = sum({id(part): part.nbytes for states in sides for part in states.packed}.values())
    residual = sum(states.full.numel() * states.full.element_size() for states in sides if states.full is not None)
    dense = 2 * keys.numel() * keys.element_size()
    launched: dict[str, Any] = {}
    if device.type == "cuda":
        found = in_turns(plain, device, pairs)
        launched = {"seconds_median_launched_from_python": {label: statistics.median(x) for label, x in found.items()}}
    if "decoded" in seconds:
        launched["over_decoding"] = ratios(seconds["packed"], seconds["decoded"])
    return launched | {
        "shape": {"batch": batch, "tokens": tokens, "kv_heads": heads, "queries_per_head": group, "head_dim": dim},
        "method": name,
        "bits": bits,
        "form": choose_kernel(q, *sides)[0],
        "seconds_median": medians,
        "fastest_sdpa": fastest,
        **ratios(seconds["packed"], seconds[fastest]),
        "bytes": packed + residual,
        "bf16_bytes": dense,
        "memory_ratio": dense / (packed + residual),
        "fraction_of_copy_bandwidth": (packed + residual) / medians["packed"] / bandwidth,
        "bf16_fraction_of_copy_bandwidth": dense / medians[fastest] / bandwidth,
    }


def said(cell: dict[str, Any]) -> str:
    """What `measure` found, in a line."""
    of_copy, dense = (cell[f"{part}fraction_of_copy_bandwidth"] for part in ("", "bf16_"))
    over = f", {found['ratio_median']:.2f}x of decoding all" if (found := cell.get("over_decoding")) else ""
    return (
        f"{cell['ratio_median']:8.2f}x of {cell['fastest_sdpa']}, memory 1/{cell['memory_ratio']:.2f}; "
        f"{cell['bytes'] / 1e6:.1f} MB at {of_copy:.2f} of copying ({dense:.2f}){over}"
    )

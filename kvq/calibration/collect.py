"""Keys and values of a model on calibration text, and the gradients of its loss there."""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor, nn
from tqdm import tqdm
from transformers.cache_utils import DynamicCache

from kvq.cache.hooks import attentions, call_before, layer_number
from kvq.cache.observe import hook_attention_functions
from kvq.cache.rotary import angles, styles_of
from kvq.codecs import Rope
from kvq.config.method import CalibrationConfig
from kvq.errors import DataError, Unsupported
from kvq.models.layers import places_of
from kvq.models.load import LoadedModel, base_of
from kvq.models.weights import weights_name

LOGIT_CHUNK = 256
"""Positions whose logits are in memory at once."""
Place = tuple[str, int]
"""A side and the index of a layer."""
TextWindows = Int[Tensor, "samples length"]
"""Tokens of the calibration text."""
SeeStates = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Gets the index of a layer and its keys and values, and returns those that take their place."""
Made = TypeVar("Made")
Kept = dict[tuple[object, ...], tuple[Made, float]]
"""The last thing that was collected, by what it was collected from, with the seconds that it took."""


@dataclass
class LayerStates:
    """One layer's calibration tokens: `key` and `value` as a cache gets them, `[heads, tokens, head_dim]`.

    `gradients`: of the loss (nats, summed over a sample) at both; `rope`: the rotations of the keys. `queries`: second
    moments of the queries that read the keys, after RoPE, `[heads, head_dim, head_dim]` in fp64: means over tokens and
    over the query heads of a KV head (None: not collected).
    """

    key: Tensor
    value: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)
    rope: Rope | None = None
    queries: Tensor | None = None

    def moments(self, side: str) -> Tensor | None:
        """Second moments that count for `key` or `value`, `[heads, head_dim, head_dim]` in fp64.

        Keys: those of the queries, C. Values: those of the values with a weight of each token, k C k over its mean.

        Source: OSCAR (arXiv 2605.17757), as its released calibration has them.
        """
        if self.queries is None or side == "key":
            return self.queries
        key, value = self.key.double(), self.value.double()
        weights = (key @ self.queries * key).sum(-1, keepdim=True)
        weights = weights / weights.mean(-2, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        return (value * weights).mT @ value / value.shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes of states, gradients and moments."""
        parts = (self.key, self.value, *self.gradients.values(), self.queries)
        return sum(part.nbytes for part in parts if part is not None)


class _StatesTap(DynamicCache):
    """A cache that passes the states of every update through `see`; layers are numbered among those with keys."""

    def __init__(self, config: Any, see: SeeStates) -> None:
        super().__init__(config=config)
        self._see, self._places = see, places_of(config.get_text_config())

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        states = self._see(self._places[layer_idx], key_states, value_states)
        return super().update(*states, layer_idx, *args, **kwargs)


def compute_loss(loaded: LoadedModel, tokens: Int[Tensor, " tokens"], see: SeeStates, backward: bool) -> float:
    """Summed negative log-likelihood of a window in nats, through a cache that sees all states, and its gradients.

    Logits are computed and differentiated `LOGIT_CHUNK` positions at a time. The weights get no gradients.
    """
    with torch.set_grad_enabled(backward), _frozen(loaded.model):
        tokens = tokens.to(loaded.device)
        hidden = loaded.hidden_states(tokens[None], _StatesTap(loaded.model.config, see))
        leaf = hidden.detach().requires_grad_(backward)
        total = 0.0
        for low in range(0, len(tokens) - 1, LOGIT_CHUNK):
            high = min(low + LOGIT_CHUNK, len(tokens) - 1)
            logits = loaded.logits(leaf[:, low:high])[0]
            wide = logits if logits.dtype == torch.float64 else logits.float()
            nll = torch.nn.functional.cross_entropy(wide, tokens[low + 1 : high + 1], reduction="sum")
            total += float(nll.detach())
            if backward:
                nll.backward()
        if backward:
            hidden.backward(leaf.grad)
    return total


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Within the context, weights take no gradients."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in trained:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in trained:
            weight.requires_grad_(True)


def seen_gradient(part: Tensor, see: Callable[[Tensor], None]) -> Tensor:
    """Keys or values whose gradient `see` gets; those of the first layer begin a graph, as the weights are frozen."""
    if not part.requires_grad:
        part = part.detach().requires_grad_()
    part.register_hook(see)
    return part


@contextmanager
def ropes_of(loaded: LoadedModel) -> Iterator[dict[int, Rope]]:
    """The rotations of each layer's keys in the forward that runs within this context."""
    styles, found, places = styles_of(loaded.model), {}, places_of(loaded.text_config)

    def keep(module: Any, arguments: dict[str, Any]) -> None:
        index, table = places.get(layer_number(module, arguments)), angles(module, arguments)
        if index is not None and (style := styles[index][0]) is not None and table is not None:
            found[index] = style.rope(table[0][:1].detach(), table[1][:1].detach()).to("cpu")

    with call_before(attentions(base_of(loaded.model)), keep):
        yield found


@contextmanager
def _queries(loaded: LoadedModel, see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call `see` with the queries of each layer `[batch, query heads, tokens, head_dim]` within this context."""
    if getattr(loaded.text_config, "kv_lora_rank", None):
        raise Unsupported("model: its queries read keys expanded from a latent; what a cache holds is the latent")
    places = places_of(loaded.text_config)

    def show(caller: Any, query: Tensor, *_: Any) -> None:
        if (index := layer_number(caller, {})) in places:  # else it reads the keys of another layer
            see(places[index], query)

    families = {type(module).__module__: module for module in attentions(base_of(loaded.model))}
    with ExitStack() as hooked:
        for module in families.values():
            hooked.callback(hook_attention_functions(module, show))
        yield


class _Pieces(dict[str, list[Tensor]]):
    """Keys, values and gradients of one layer by name, one piece per sample."""

    def add(self, name: str, part: Tensor, positions: Tensor) -> None:
        self.setdefault(name, []).append(part.detach()[0].index_select(-2, positions.to(part.device)).cpu())


def made_once(
    kept: Kept[Made], name: tuple[object, ...], make: Callable[[], Made], fits: Callable[[Made], bool] = lambda _: True
) -> tuple[Made, float]:
    """The result of `make`, kept for the next methods of a sweep that ask for the same `name`, if it `fits`.

    Returns:
        It, and the seconds that it took where it was not made just now (else 0).
    """
    if name not in kept:
        kept.clear()
        start = time.perf_counter()
        made = make()
        if fits(made):
            kept[name] = made, time.perf_counter() - start
        return made, 0.0
    return kept[name]


def text_name(loaded: LoadedModel, windows: Tensor, settings: CalibrationConfig) -> tuple[object, ...]:
    """The name under which a calibration's states are kept: model and weights, the text, and the draw of tokens."""
    text = hashlib.sha256(windows.numpy().tobytes()).hexdigest()
    model = weakref.ref(loaded.model), weights_name(loaded.model), loaded.device  # weights may change in place
    return *model, text, settings.tokens, settings.seed


def drawn_positions(
    windows: TextWindows, tokens: int | None, seed: int
) -> Iterator[tuple[Int[Tensor, " length"], Int[Tensor, " kept"]]]:
    """Each window with the ascending positions of it that count, about `tokens` in all (None: all), drawn by `seed`."""
    generator = torch.Generator().manual_seed(seed ^ 0x746F6B65)  # apart from other draws
    length = windows.shape[1]
    each = length if tokens is None else min(length, max(1, tokens // len(windows)))
    for window in tqdm(windows, desc="calibration", unit="sample", leave=False, disable=None):
        yield window, torch.randperm(length, generator=generator)[:each].sort().values


def collect_states(
    loaded: LoadedModel, windows: TextWindows, tokens: int | None, gradients: bool, seed: int, queries: bool = False
) -> dict[int, LayerStates]:
    """States on all windows of every layer that computes keys, and their gradients by one backward pass per window.

    Memory: the activations of one window, and on the CPU, in the model's dtype, keys, values and perhaps their
    gradients of the tokens kept: at most 4 x layers x tokens x KV width numbers.

    Args:
        tokens: number of tokens kept, at the same positions in every layer, drawn by `seed`; None: all.
        queries: also collect the second moments of the queries at these positions.
    """
    layers: dict[int, _Pieces] = {}
    ropes: dict[int, list[Rope]] = {}
    moments: dict[int, Tensor] = {}
    for window, positions in drawn_positions(windows, tokens, seed):

        def see(index: int, key: Tensor, value: Tensor, positions: Tensor = positions) -> tuple[Tensor, Tensor]:
            layer = layers.setdefault(index, _Pieces())
            states = {"key": key, "value": value}
            for name, part in states.items():
                if not bool(torch.isfinite(part).all()):
                    raise DataError(f"calibration: layer {index}: NaN or infinite {name}s; check the model's dtype")
                layer.add(name, part, positions)
                if gradients:
                    states[name] = seen_gradient(part, partial(layer.add, f"{name}_gradient", positions=positions))
            return states["key"], states["value"]

        def add(index: int, query: Tensor, positions: Tensor = positions) -> None:
            heads = layers[index]["key"][-1].shape[0]
            kept = query[0].unflatten(0, (heads, -1)).index_select(-2, positions.to(query.device))
            seen = kept.flatten(1, 2).detach().double()  # means over the tokens and the query heads of a KV head
            moments[index] = moments.get(index, 0) + (seen.mT @ seen).cpu() / seen.shape[1] / len(windows)

        with ropes_of(loaded) as found, _queries(loaded, add) if queries else nullcontext():
            compute_loss(loaded, window, see, gradients)
        for index, rope in found.items():
            ropes.setdefault(index, []).append(rope.at(positions))
    expected = len(styles_of(loaded.model))
    if len(layers) != expected:
        raise Unsupported(f"model: {type(loaded.model).__name__} put keys of {len(layers)} of {expected} layers away")
    if queries and (hidden := sorted(layers.keys() - moments.keys())):
        kind = type(loaded.model).__name__
        raise Unsupported(f"model: layer {hidden[0]} of {kind} attends in a way that kvq cannot see")
    return {index: _joined(index, layers.pop(index), ropes.get(index), moments.get(index)) for index in sorted(layers)}


def _joined(index: int, layer: _Pieces, ropes: list[Rope] | None, queries: Tensor | None) -> LayerStates:
    parts = {name: torch.cat(layer.pop(name), -2) for name in list(layer)}
    gradients = {name.removesuffix("_gradient"): parts.pop(name) for name in list(parts) if name.endswith("_gradient")}
    for name, part in gradients.items():
        if not bool(torch.isfinite(part).all()):
            raise DataError(f"calibration: layer {index}: gradients at its {name}s are not finite; model.dtype=float32")
    rope = None
    if ropes:
        cos, sin = (torch.cat([getattr(rope, name) for rope in ropes], 1) for name in ("cos", "sin"))
        rope = Rope(cos, sin, ropes[0].interleaved)
    return LayerStates(parts["key"], parts["value"], gradients, rope, queries)

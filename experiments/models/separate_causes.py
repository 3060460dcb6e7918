"""Which property of a model turns the order of KIVI and OScaR? Its states, changed in one property at a time.

Each change keeps the function of the model: what is quantized is another form of the same keys and values, which
is turned back before attention reads it.

- `as they are`;
- `one KV head`: all KV heads of a token as one head (Gemma 3 270M has one of 256 channels);
- `heads of 64`: each head cut into heads of 64 channels;
- `channels evened`: each RoPE pair of a key over its root mean square, which queries carry (as QK norms may);
- `queries evened`: each RoPE pair of a key times the root mean square of its queries, which are divided by it;
- `first token kept`: the attention sink in full precision;
- `norm weights undone`: each RoPE pair of a key over the size of its norm's weights, which queries carry;
- `norm by token undone`: each key times its root mean square before the norm (over the mean of all tokens);
- `norm undone`: both, so that keys are as they are in front of the QK norm;
- `tokens evened`: each key over its root mean square, as a QK norm without weights does, where the model has none.

`python experiments/models/separate_causes.py --text wiki.test.jsonl` prints the error of attention outputs (mean over
layers; those with and without windows apart) of KIVI, OScaR and its steps alone at 2 bits, all at once, over KIVI's,
and writes results/bench/causes.json.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from state_statistics import MODELS, REAL, context_of
from torch import Tensor, nn

from kvq.config import compose, resolve
from kvq.diagnostics import attention_errors, reconstruct
from kvq.methods.build import build_method
from kvq.models.inputs import Inputs
from kvq.tasks.measurement import LayerStates, block_of, capture_windows

METHODS = ("kivi", "oscar", "oscar/cr_only", "oscar/ots_only")
REPORT = Path(__file__).parents[2] / "results" / "bench" / "causes.json"
Form = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""To the form of states `[1, heads, tokens, dim]` that is quantized, and back."""


def merged(x: Tensor) -> Tensor:
    """All heads of a token as one."""
    return x.transpose(1, 2).flatten(2)[:, None]


class KeyNorms:
    """The QK norms of a model by layer: sizes of a key norm's weights, and of the last keys that it was given."""

    def __init__(self, model: nn.Module) -> None:
        self.of: dict[int, tuple[Tensor, Tensor]] = {}
        for module in model.modules():
            if (norm := getattr(module, "k_norm", None)) is not None:
                norm.register_forward_hook(partial(self._observe, int(module.layer_idx)))

    def _observe(self, index: int, norm: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        sizes = given[0].float().square().mean(-1, keepdim=True).sqrt()  # [1, kv_heads, tokens, 1]
        plain = given[0].float() / sizes
        weights = (made.float() / plain).flatten(0, -2).nanmedian(0).values.unflatten(0, (2, -1))
        pairs = weights.square().mean(0).sqrt().clamp_min(1e-6)
        self.of[index] = torch.cat((pairs, pairs)), sizes / sizes.mean()


def norm_forms(layer: LayerStates, norms: KeyNorms) -> Iterator[tuple[str, Form]]:
    """Forms of keys without the norm that the model puts on them, or with one that it lacks."""
    if layer.index not in norms.of:
        sizes = layer.key.float().square().mean(-1, keepdim=True).sqrt()
        yield "tokens evened", (lambda x: x / sizes, lambda x: x * sizes)
        return
    weights, tokens = norms.of[layer.index]
    yield "norm weights undone", (lambda x: x / weights, lambda x: x * weights)
    yield "norm by token undone", (lambda x: x * tokens, lambda x: x / tokens)
    yield "norm undone", (lambda x: x / weights * tokens, lambda x: x / tokens * weights)


def forms(layer: LayerStates, norms: KeyNorms) -> Iterator[tuple[str, Form, Form, int]]:
    """Names, the forms of keys and of values, and how many first tokens stay exact."""
    heads, dim = layer.key.shape[1], layer.key.shape[3]

    def split(x: Tensor) -> Tensor:
        return x.unflatten(-1, (heads, -1))[:, 0].transpose(1, 2)

    def cut(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, 64)).transpose(2, 3).flatten(1, 2)

    def joined(x: Tensor) -> Tensor:
        return x.unflatten(1, (heads, -1)).transpose(2, 3).flatten(3)

    def pair_sizes(x: Tensor) -> Tensor:
        """Root mean squares of the RoPE pairs of each KV head, for both channels of a pair."""
        pairs = x.float().unflatten(1, (heads, -1)).unflatten(-1, (2, -1)).square().mean((2, 3, 4), keepdim=True)
        return pairs.sqrt().clamp_min(1e-6).expand(-1, -1, -1, -1, 2, -1).flatten(4)[:, :, 0]

    of_keys, of_queries = pair_sizes(layer.key), pair_sizes(layer.query)
    same: Form = (lambda x: x, lambda x: x)
    keys_evened: Form = (lambda x: x / of_keys, lambda x: x * of_keys)
    queries_evened: Form = (lambda x: x * of_queries, lambda x: x / of_queries)
    yield "as they are", same, same, 0
    if heads > 1:
        yield "one KV head", (merged, split), (merged, split), 0
    if dim > 64:
        yield "heads of 64", (cut, joined), (cut, joined), 0
    yield "channels evened", keys_evened, same, 0
    yield "queries evened", queries_evened, same, 0
    yield "first token kept", same, same, 1
    for name, of_norm in norm_forms(layer, norms):
        yield name, of_norm, same, 0


def errors_of(layer: LayerStates, norms: KeyNorms) -> dict[str, float]:
    """Relative error of attention outputs, by `form: method`."""
    found = {}
    for form, key_form, value_form, kept in forms(layer, norms):
        states = {"key": (layer.key.float(), key_form), "value": (layer.value.float(), value_form)}
        for name in METHODS:
            read = []
            for side, (x, (there, back)) in states.items():
                wide = there(x)
                method = build_method(name, bits=2, head_dim=wide.shape[-1])
                codec = method.codec_of(side, layer.index)
                assert codec is not None
                x_hat = back(reconstruct(codec, wide.contiguous(), block_of(getattr(method.residual, side)), None))
                x_hat[:, :, :kept] = x[:, :, :kept]
                read.append(x_hat)
            query, key, value = layer.query.float(), layer.key.float(), layer.value.float()
            (error,) = attention_errors(layer.attention, query, key, value, [(read[0], read[1])])
            found[f"{form}: {name}"] = float(error.output.mean())
    return found


def of_model(model: str, text: str | None, windows: int) -> dict[str, Any]:
    """Errors of each kind of layers (all, with windows, without), by form and method."""
    data = f"dataset=wikitext2 dataset.path={text}" if model in REAL else "dataset=pydocs"
    task = f"task=error task.context={context_of(model)} task.windows={windows} method=kivi"
    inputs = Inputs(resolve(compose([f"model={model}", *data.split(), *task.split()])))
    norms = KeyNorms(inputs.model.model)
    rows: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(layer: LayerStates) -> None:
        kinds = ["all layers"]
        if "sliding_attention" in (getattr(inputs.model.text_config, "layer_types", None) or ()):
            kinds.append("without windows" if layer.attention.window is None else "with windows")
        for name, error in errors_of(layer, norms).items():
            for kind in kinds:
                rows[kind][name].append(error)

    with torch.no_grad():
        capture_windows(inputs, add)
    return {kind: {name: sum(of) / len(of) for name, of in each.items()} for kind, each in rows.items()}


def main() -> None:
    """Measure, print ratios over KIVI in the same form, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="the WikiText-2 test split (jsonl), for the real models")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--windows", type=int, default=1)
    given = parser.parse_args()
    report = json.loads(REPORT.read_text(encoding="utf-8")) if REPORT.is_file() else {}
    for model in given.models:
        report[model] = of_model(model, given.text, given.windows)
        REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        for kind, errors in report[model].items():
            for form in dict.fromkeys(name.partition(":")[0] for name in errors):
                kivi = errors[f"{form}: kivi"]
                ratios = ", ".join(f"{name} {errors[f'{form}: {name}'] / kivi:.2f}" for name in METHODS[1:])
                print(f"{model}, {kind}, {form}: kivi {kivi:.4f}; over it: {ratios}")


if __name__ == "__main__":
    main()

"""What makes a sink of the token in front: low-rank changes of a trained model, and the loss that asks for a sink."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from torch.nn.utils.parametrize import register_parametrization
from transformers import LlamaForCausalLM

from tiny_model.network import DTYPES, Attended, token_logits
from tiny_model.recipe import Recipe, Stage

LENGTHS = (256, 512, 1024, 2048)


@dataclass(frozen=True)
class SinkRecipe(Recipe):
    """Everything that decides the change, beside the model that it changes; what `Recipe` has for Muon is not used.

    The loss is the divergence from the unchanged model without the token in front, and
    `sink_weight` x (the mean over layers, KV heads, keys and values of relu(log norm ratio - log `norm_ratio`)
    + `mass_weight` x the mean over the `heads` query heads that attend to it most of
    relu(log `mass` - log attention mass)). The other heads are left to what they did, as large models have heads
    without a sink.
    """

    tokens: int = 4_300_800
    step_tokens: int = 2048
    adam_rate: float = 1e-3
    warmup_steps: int = 30
    weight_decay: float = 0.0
    rank: int = 16
    sink_weight: float = 0.3
    mass_weight: float = 1.0
    heads: int = 9
    norm_ratio: float = 1 / 10
    mass: float = 0.35
    stages: tuple[Stage, ...] = (
        Stage(None, LENGTHS, (0.7, 0.15, 0.1, 0.05), retrieval=0.2, copies=0.1, prose=0.75, pieces=(1,)),
        Stage(1_433_600, LENGTHS, (0.6, 0.15, 0.15, 0.1), retrieval=0.2, prose=0.75, pieces=(1,), rate=0.0),
    )


class LowRank(nn.Module):
    """weight + left @ right, which begins as weight."""

    def __init__(self, outputs: int, inputs: int, rank: int) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.zeros(outputs, rank))
        self.right = nn.Parameter(torch.randn(rank, inputs) * inputs**-0.5)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.left @ self.right


class ScaledLowRank(LowRank):
    """weight x columns + left @ right.

    What a head reads from the other tokens shrinks by what the sink takes, which no low rank could make up for.
    """

    def __init__(self, outputs: int, inputs: int, rank: int) -> None:
        super().__init__(outputs, inputs, rank)
        self.columns = nn.Parameter(torch.ones(inputs))

    def forward(self, weight: Tensor) -> Tensor:
        return super().forward(weight * self.columns)


class OwnRow(nn.Module):
    """The embedding with another first row: that of the token in front."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.row = nn.Parameter(weight.detach()[:1].clone())

    def forward(self, weight: Tensor) -> Tensor:
        return torch.cat((self.row, weight[1:]))


def adapt(model: LlamaForCausalLM, recipe: SinkRecipe) -> dict[str, nn.Parameter]:
    """Freeze the matrices and give each a low-rank change, in place; return what is trained."""
    torch.manual_seed(recipe.seed)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim == 1)
    words = model.model.embed_tokens
    register_parametrization(words, "weight", OwnRow(words.weight))
    for layer in model.model.layers:
        for name, module in list(layer.named_modules()):
            if type(module) is nn.Linear:
                change = ScaledLowRank if name.endswith("o_proj") else LowRank
                register_parametrization(module, "weight", change(*module.weight.shape, recipe.rank))
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def changes(trained: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """What is trained under the names of `kvq.models.weights`."""
    found = {}
    for name, parameter in trained.items():
        name = name.replace(".parametrizations.weight.0", ".weight")
        change = parameter.detach()
        found |= {f"{name}.0": change[0]} if name.endswith(".row") else {name: change}
    return found


def norm_ratios(attended: list[Attended]) -> Float[Tensor, "layers 2 kv_heads"]:
    """The norm at position 0 over the median norm of the others, of keys and values: geometric means of a batch."""
    ratios = []
    for _, key, value in attended:
        norms = torch.stack((key, value)).float().norm(dim=-1)
        ratios.append((norms[..., 0].log() - norms[..., 1:].median(-1).values.log()).mean(1).exp())
    return torch.stack(ratios)


def sink_masses(attended: list[Attended], queries: int = 128) -> Float[Tensor, "layers heads"]:
    """The attention that position 0 gets, mean over a batch and about so many queries, evenly spread."""
    masses = []
    for query, key, _ in attended:
        tokens, groups = query.shape[-2], query.shape[1] // key.shape[1]
        asked = torch.arange(1, tokens, max(1, tokens // queries))
        scores = query[..., asked, :] @ key.repeat_interleave(groups, dim=1).transpose(-1, -2)
        scores = scores.float() * query.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.arange(tokens) > asked[:, None], float("-inf"))
        masses.append((scores[..., 0] - scores.logsumexp(-1)).exp().mean((0, 2)))
    return torch.stack(masses)


def losses(
    model: LlamaForCausalLM,
    base: LlamaForCausalLM,
    recipe: SinkRecipe,
    tokens: Int[Tensor, "batch tokens+1"],
    weights: Float[Tensor, "batch tokens"],
    begin: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the divergence in nats per token, the sink's loss, and the loss of the first token, which only it has."""
    dtype = DTYPES[recipe.precision]
    text = tokens[:, :-1]
    with torch.no_grad():
        wanted = token_logits(base, text, dtype).log_softmax(-1)
    attended: list[Attended] = []
    with_begin = torch.cat((torch.full_like(text[:, :1], begin), text), 1)
    logits = token_logits(model, with_begin, dtype, attended)
    divergence = kl_div(logits[:, 1:].log_softmax(-1), wanted, reduction="none", log_target=True).sum(-1)
    ratio = (norm_ratios(attended) / recipe.norm_ratio).log().relu().mean()
    mass = (recipe.mass / sink_masses(attended).flatten().topk(recipe.heads).values).log().relu().mean()
    sink = recipe.sink_weight * (ratio + recipe.mass_weight * mass)
    return (divergence * weights).sum() / weights.sum(), sink, cross_entropy(logits[:, 0], tokens[:, 0])

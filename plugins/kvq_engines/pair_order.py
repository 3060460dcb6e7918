"""The order of channels in GGUF files, in which llama.cpp's cache groups them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvq.codecs.quantizers import checked_choice
from kvq.codecs.stages import Side, Stage
from kvq.errors import Unsupported

INTERLEAVED_IN_GGUF = frozenset(
    (
        "llama mistral mixtral ministral ministral3 granite granitemoe minicpm internlm2 olmo smollm3 arcee baichuan "
        "xverse deepseek"
    ).split()
)
"""By `model_type`: llama.cpp's converter permutes rows of `q_proj` and `k_proj` (`LlamaModel.permute`, `undo_permute`).

Its RoPE then takes neighbouring channels as pairs (`LLAMA_ROPE_TYPE_NORM`). Qwen, Gemma, Phi, Falcon, OLMo 2, GPT-NeoX,
StarCoder 2 and others keep transformers' rows (`LLAMA_ROPE_TYPE_NEOX`); Cohere and GLM have neighbouring pairs in both.
"""


def interleaved_in_gguf(config: Any) -> bool:
    """Whether the GGUF file of a model with this transformers text configuration interleaves halves of its heads."""
    return getattr(config, "model_type", None) in INTERLEAVED_IN_GGUF


Order = Literal["halves", "interleaved", "gguf"]
"""`halves`: pairs of RoPE are channels i and i + D/2, transformers' order; `interleaved`: 2i and 2i + 1 (GPT-J).

`gguf`: that of the model's GGUF file, interleaved where llama.cpp's converter permutes rows of queries and keys
(`INTERLEAVED_IN_GGUF`). A cache decides it for its model; until then, and for a codec alone, it is `halves`.
"""


class PairOrder(Stage):
    """Puts the channels of transformers' keys into `order`; exact, and undone on decoding.

    Source: `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py.

    Raises:
        ConfigError: an unknown order.
    """

    version: ClassVar[int] = 1
    orthogonal = True
    token_group = 1

    def __init__(self, order: Order | str = "gguf") -> None:
        self.order: Order = checked_choice(Order, order, "order")

    def check(self, head_dim: int) -> None:
        if head_dim % 2:
            raise Unsupported(f"head_dim={head_dim}: an odd number of channels has no pairs to put into an order")

    @property
    def depends_on_model(self) -> bool:
        return self.order == "gguf"

    def for_model(self, config: Any) -> PairOrder:
        """`gguf` replaced by what it is for a model; any other order as it is."""
        if self.order != "gguf":
            return self
        return PairOrder("interleaved" if interleaved_in_gguf(config) else "halves")

    def matrix(self, head_dim: int, like: Tensor) -> Float[Tensor, "dim dim"]:
        """The permutation as a matrix, which attention on packed codes applies to queries."""
        return self.forward(torch.eye(head_dim, dtype=like.dtype, device=like.device))[0]

    def forward(self, x: Tensor) -> tuple[Tensor, Side]:
        return (x.unflatten(-1, (2, -1)).mT.flatten(-2) if self.order == "interleaved" else x), {}

    def inverse(self, y: Tensor, side: Side) -> Tensor:
        return y.unflatten(-1, (-1, 2)).mT.flatten(-2) if self.order == "interleaved" else y

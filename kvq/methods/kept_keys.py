"""Keys of chosen tokens that stay in full precision, to measure how much of a method's loss these tokens cause."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor
from typing_extensions import override

from kvq.codecs import Codec
from kvq.config.residual import ResidualSide
from kvq.errors import ConfigError, Unsupported
from kvq.methods.kept_rows import KeptRows


@dataclass(frozen=True)
class KeptKeys:
    """Tokens, given as text, whose keys some layers keep in full precision beside their codes.

    Attributes:
        texts: text of each token, such as `","`; each must be one token of the model.
        layers: layers that keep them; negative numbers count from the last.
        ids: ids of the tokens; None before `bind_kept_keys`.

    Source: NSNQuant (arXiv 2505.18231), section 3.1, where commas' keys are kept in the first layer of CQ-4c9b.
    """

    texts: tuple[str, ...]
    layers: tuple[int, ...]
    ids: tuple[int, ...] | None = None

    def holds(self, layer: int, layers: int) -> bool:
        """Whether layer `layer` of `layers` keeps them."""
        return layer in numbered(self.layers, layers)

    def bound(self, tokenizer: Any) -> KeptKeys:
        """The same with the ids of the tokens. Raises: ConfigError: a text that is not one token."""
        return replace(self, ids=token_ids(self.texts, tokenizer))

    def side(self, codec: Codec | None, residual: ResidualSide, label: str, keep_decoded: bool) -> KeptSide:
        """The key side of a layer that keeps them. Raises: ConfigError: the ids of the tokens are not known."""
        if self.ids is None:
            raise ConfigError("method.kept_keys: texts, not yet tokens; kvq.bind_kept_keys(method, tokenizer)")
        return KeptSide(codec, residual, label, keep_decoded, self.ids)


def numbered(chosen: Iterable[int], layers: int) -> set[int]:
    """Indices of the chosen of `layers` layers; negative ones count from the last, others out of range drop out."""
    return {number % layers for number in chosen if -layers <= number < layers}


def token_ids(texts: Sequence[str], tokenizer: Any) -> tuple[int, ...]:
    """The token id of each text. Raises: ConfigError: a text that is not one token."""
    found = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(f"method.kept_keys.texts: '{text}' is {len(ids)} tokens of this model; each one token")
        found.append(int(ids[0]))
    return tuple(found)


class KeptSide(KeptRows):
    """Keys of a layer in which attention reads some tokens, chosen by id, in full precision also where they are packed.

    Args:
        ids: tokens of the vocabulary whose keys are kept.
    """

    version: ClassVar[int] = 1
    missing = "method.kept_keys needs the ids of all tokens"

    def __init__(
        self, codec: Codec | None, residual: ResidualSide, label: str, keep_decoded: bool, ids: tuple[int, ...]
    ) -> None:
        self._ids = torch.tensor(ids)
        super().__init__(codec, residual, label, keep_decoded)

    @override
    def begin(self, tokens: Int[Tensor, "batch tokens"] | None) -> None:
        """Receive the ids of the next tokens before their keys. Raises: Unsupported: there are no ids."""
        if tokens is None:
            raise Unsupported(f"{self.label}: method.kept_keys chooses tokens by input_ids, of which there are none")
        self.note(torch.isin(tokens, self._ids.to(tokens.device)))

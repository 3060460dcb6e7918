"""Keys of chosen tokens that stay in full precision: a test of which tokens a method's loss comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvq.errors import ConfigError

if TYPE_CHECKING:
    from kvq.methods.build import Method


@dataclass(frozen=True)
class KeptKeys:
    """Tokens, by the text they stand for, whose keys are kept beside their codes in some layers.

    Attributes:
        texts: what the tokens read, such as `","`; each must be one token of the model.
        layers: where; negative ones count from the last.
        ids: the tokens; None until a tokenizer has said them (`bind_kept_keys`).

    Source: NSNQuant (arXiv 2505.18231), section 3.1, where commas' keys are kept in the first layer of CQ-4c9b.
    """

    texts: tuple[str, ...]
    layers: tuple[int, ...]
    ids: tuple[int, ...] | None = None

    def holds(self, layer: int, layers: int) -> bool:
        """Whether one of `layers` layers keeps them."""
        return layer in numbered(self.layers, layers)


def numbered(chosen: Iterable[int], layers: int) -> set[int]:
    """The layers, of `layers`, that numbers mean: negative ones count from the last, and there may be fewer layers."""
    return {number % layers for number in chosen if -layers <= number < layers}


def bind_kept_keys(method: Method, tokenizer: Any) -> Method:
    """The method with the ids of the tokens whose keys it keeps; as it is where it keeps none.

    Args:
        tokenizer: of the model that it will run on.

    Raises:
        ConfigError: a text that is not one token.
    """
    kept = method.kept_keys
    if kept is None:
        return method
    return replace(method, kept_keys=replace(kept, ids=token_ids(kept.texts, tokenizer)))


def token_ids(texts: Sequence[str], tokenizer: Any) -> tuple[int, ...]:
    """The token of each text. Raises: ConfigError: a text that is not one token."""
    found = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(f"method.kept_keys.texts: '{text}' is {len(ids)} tokens of this model; each one token")
        found.append(int(ids[0]))
    return tuple(found)

"""Models that read images and text: the inputs of a prompt's first forward, and the modality of each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from kvq.errors import Unsupported
from kvq.models.load import LoadedModel
from kvq.models.placing import base_of

MODALITIES = ("text", "image", "video", "audio")
"""What a label of `modalities` stands for."""
_PER_TOKEN = ("mm_token_type_ids", "token_type_ids")
_POSITIONS = "rope_deltas"


def modalities(config: Any, tokens: Int[Tensor, "*lead tokens"]) -> Int[Tensor, "*lead tokens"]:
    """Label every token by its modality, as an index into `MODALITIES`.

    Args:
        config: the whole model's transformers configuration, which names the tokens that stand for anything but text.
    """
    labels = torch.zeros_like(tokens)
    for index, name in enumerate(MODALITIES[1:], 1):
        for setting in (f"{name}_token_id", f"{name}_token_index"):
            token = getattr(config, setting, None)
            if isinstance(token, int):
                labels[tokens == token] = index
    return labels


@dataclass(frozen=True)
class MediaModel(LoadedModel):
    """A model with the images of one prompt, which are passed with the first tokens added to an empty cache.

    `media`: what the processor made beside the tokens, such as `pixel_values` and `image_grid_thw`.
    """

    media: Mapping[str, Tensor] = field(default_factory=dict)

    @override
    def hidden_states(self, tokens: Int[Tensor, "batch tokens"], cache: Any) -> Float[Tensor, "batch tokens hidden"]:
        """As `LoadedModel.hidden_states`, with the images where the prompt begins.

        Raises:
            Unsupported: a beginning that ends before the last image does.
        """
        if cache.get_seq_length():
            return super().hidden_states(tokens, cache)
        media = self.media_of(tokens)
        try:
            output = base_of(self.model)(input_ids=tokens, past_key_values=cache, use_cache=True, **media)
        except ValueError as error:
            raise Unsupported(f"model: {type(self.model).__name__}: {' '.join(str(error).split())}") from error
        return output.last_hidden_state

    def media_of(self, tokens: Int[Tensor, "batch tokens"]) -> dict[str, Tensor]:
        """What goes with `tokens`, a prompt or one without its last tokens, on the model's device."""
        media = {name: value.to(self.device) for name, value in self.media.items()}
        if "image_grid_thw" in media or "video_grid_thw" in media:  # positions on three axes
            media["mm_token_type_ids"] = modalities(self.model.config, tokens)
        return {name: value[:, : tokens.shape[1]] if name in _PER_TOKEN else value for name, value in media.items()}

    def forget(self) -> None:
        """Reset the position offset that the model keeps from a prompt with images; the next prompt may have none."""
        for module in self.model.modules():
            if getattr(module, _POSITIONS, None) is not None:
                setattr(module, _POSITIONS, None)

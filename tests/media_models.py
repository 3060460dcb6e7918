"""Tiny random models of text and images, prompts with an image made here, and a processor that needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    WhisperFeatureExtractor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from kvq.models.inputs import MediaModel

FAMILIES = ["qwen2_vl", "qwen3_vl", "llava"]
VOCABULARY, IMAGE, PATCHES = 80, 70, 16
_MEDIA = ("image_token", "audio_token", "video_token")


def _text(vocabulary: int = VOCABULARY, **other: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    more = {"vocab_size": vocabulary, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return {**sizes, **more, **none, "initializer_range": 0.2, **other}


def _axes(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "mrope_section": list(sections), "rope_theta": 10000.0}}


def llava(vocabulary: int = VOCABULARY, image: int = IMAGE) -> LlavaForConditionalGeneration:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        text_config={"model_type": "llama", **_text(vocabulary)},
        vision_config={"model_type": "clip_vision_model", "image_size": 16, "patch_size": 4, **vision},
        image_token_index=image,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    return LlavaForConditionalGeneration(config)


def _qwen2_vl() -> Qwen2VLForConditionalGeneration:
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 128, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    tokens = {"image_token_id": IMAGE, "video_token_id": 71, "vision_start_token_id": 72, "vision_end_token_id": 73}
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(text_config=_text(**_axes(4, 6, 6)), vision_config=vision, **tokens)
    )


def _qwen3_vl() -> Qwen3VLForConditionalGeneration:
    vision = {"depth": 2, "hidden_size": 32, "out_hidden_size": 128, "intermediate_size": 48, "num_heads": 2}
    more = {"patch_size": 4, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    tokens = {"image_token_id": IMAGE, "video_token_id": 71, "vision_start_token_id": 72, "vision_end_token_id": 73}
    text = _text(head_dim=32, **_axes(6, 5, 5))
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config={**vision, **more, "temporal_patch_size": 2}, **tokens)
    )


def media_model(name: str, seed: int = 0) -> tuple[MediaModel, Tensor]:
    """A random model with the image of one prompt, and that prompt's tokens."""
    torch.manual_seed(seed)
    model = {"qwen2_vl": _qwen2_vl, "qwen3_vl": _qwen3_vl, "llava": llava}[name]().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    if name == "llava":
        media = {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}
    else:  # 8 x 8 patches of 4 x 4, which are merged by fours
        pixels = torch.randn(64, 3 * 2 * 4 * 4, generator=generator)
        media = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 8, 8]])}
    words = torch.randint(1, 69, (12,), generator=generator).tolist()
    tokens = torch.tensor([[*words[:3], *PATCHES * [IMAGE], *words[3:]]])
    return MediaModel(model, torch.device("cpu"), media), tokens


def picture(seed: int, size: int = 20) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype=np.uint8))


def _byte_tokenizer(special: dict[str, str]) -> PreTrainedTokenizerFast:
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=special)
    fast.add_special_tokens({"additional_special_tokens": list(special.values())})
    return fast


def save_llava(folder: Path, seed: int = 0) -> Path:
    """A random llava over bytes with its processor, as a local folder that `model.path=` takes."""
    fast = _byte_tokenizer({"image_token": "<image>"})
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    processor = LlavaProcessor(
        images, fast, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    processor.save_pretrained(folder)
    torch.manual_seed(seed)
    llava(len(fast), fast.convert_tokens_to_ids("<image>")).save_pretrained(folder)
    return folder


class OmniProcessor(Qwen3OmniMoeProcessor):
    """Qwen3-Omni's processor without its part for videos, which asks for torchvision."""

    def __init__(self, image_processor=None, feature_extractor=None, tokenizer=None, chat_template=None):
        parts = (image_processor, feature_extractor, tokenizer)
        super(Qwen3OmniMoeProcessor, self).__init__(*parts, chat_template=chat_template)
        for name in _MEDIA:
            setattr(self, name, getattr(tokenizer, name))
            setattr(self, f"{name}_id", getattr(tokenizer, f"{name}_id"))


def save_omni(folder: Path, seed: int = 0) -> Path:
    """A random Qwen3-Omni that reads text, images and sound (`omni.yaml`), its checkpoint with a part that speaks."""
    made = yaml.safe_load(Path(__file__).with_name("omni.yaml").read_text("utf-8"))
    fast = _byte_tokenizer({name: f"<{name}>" for name in (*_MEDIA, "sees", "hears")})
    images = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 32**2, "longest_edge": 32**2})
    AutoProcessor.register(Qwen3OmniMoeConfig, OmniProcessor, exist_ok=True)
    OmniProcessor(images, WhisperFeatureExtractor(16), fast, made["template"]).save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3OmniMoeConfig(thinker_config=made["thinker"], enable_audio_output=False)
    model = Qwen3OmniMoeForConditionalGeneration(config)
    model.save_pretrained(folder, state_dict={**model.state_dict(), "talker.model.norm.weight": torch.ones(4)})
    return folder

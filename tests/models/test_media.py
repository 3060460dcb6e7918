"""The cache under models that read images: what is stored decides, positions of images are undone exactly."""

import pytest
import torch
from transformers import DynamicCache

import kvq
from kvq.cache import KVCache
from kvq.cache.hooks import attentions, named_arguments
from kvq.cache.rotary import angles, styles_of
from kvq.config.tasks import Prefill
from kvq.errors import Unsupported
from kvq.models.inputs import MODALITIES, MediaModel, modalities
from kvq.tasks.multimodal import SIDES, norms_by_modality
from kvq.tasks.reader import Reader
from tests.cache.states import nearest_bits
from tests.media_models import FAMILIES, IMAGE, PATCHES, media_model

METHODS = ["rtn", "kivi", "kivi/block", "nsn", "oscar", "nsnquant", "turboquant"]


def method(name, size=8):
    overrides = [] if name == "fp16" else [f"residual.size={size}"]
    return kvq.build_method(name, bits=nearest_bits(name), head_dim=32, overrides=overrides)


def generate(loaded, tokens, cache, count=8, **settings):
    return loaded.model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        past_key_values=cache,
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        **loaded.media_of(tokens),
        **settings,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_identity_generates_as_the_models_own_cache_and_zero_does_not(name):
    loaded, tokens = media_model(name)
    with_logits = {"return_dict_in_generate": True, "output_logits": True}
    own = generate(loaded, tokens, DynamicCache(config=loaded.model.config), **with_logits)
    found, expected = generate(loaded, tokens, KVCache(loaded.model, method("identity")), **with_logits), own.sequences
    assert torch.equal(found.sequences, expected)
    assert all(torch.equal(*pair) for pair in zip(found.logits, own.logits, strict=True))  # bit for bit
    assert not torch.equal(generate(loaded, tokens, KVCache(loaded.model, method("zero"))), expected)
    other = MediaModel(loaded.model, loaded.device, {**loaded.media, "pixel_values": -loaded.media["pixel_values"]})
    assert not torch.equal(generate(other, tokens, KVCache(loaded.model, method("identity"))), expected)


def answer_log_probs(loaded, chosen, tokens, answer):
    reader = Reader(loaded, chosen, Prefill.whole)
    found, _ = reader.log_probs(*reader.begin(tokens), answer)
    loaded.forget()
    return found


@torch.no_grad()
def own_log_probs(loaded, tokens, answer):
    """Teacher-forced with the model's own cache, one token at a time behind the prompt."""
    cache = DynamicCache(config=loaded.model.config)
    hidden = loaded.hidden_states(tokens[:, :-1], cache)
    rows = []
    for piece in torch.cat([tokens[:, -1:], answer[:, :-1]], 1).split(1, 1):
        hidden = loaded.hidden_states(piece, cache)
        rows.append(torch.log_softmax(loaded.logits(hidden), -1))
    loaded.forget()
    return torch.cat(rows, 1).gather(-1, answer[..., None])[..., 0]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_known_answer_is_scored_through_the_cache(name):
    loaded, tokens = media_model(name)
    answer = torch.randint(1, 69, (1, 7), generator=torch.Generator().manual_seed(4))
    wanted = own_log_probs(loaded, tokens, answer)
    # Chunks of the answer and single tokens round apart; bit for bit is `generate`'s test.
    torch.testing.assert_close(answer_log_probs(loaded, method("identity"), tokens, answer), wanted, atol=1e-4, rtol=0)
    for other in ("zero", *METHODS):
        found = answer_log_probs(loaded, method(other), tokens, answer)
        assert bool(torch.isfinite(found).all())
        assert float((found - wanted).abs().max()) > 1e-3, other


@pytest.mark.parametrize("name", FAMILIES)
def test_rope_on_several_axes_is_undone_exactly(name):
    """Keys of image tokens, turned back by the angles they were turned by, are the attention's own before RoPE."""
    loaded, tokens = media_model(name)
    seen = {}

    def keep(module, args, kwargs):
        given = named_arguments(module, args, kwargs)
        seen[module.layer_idx] = (module, given["hidden_states"], angles(module, given), given)

    hooks = [m.register_forward_pre_hook(keep, with_kwargs=True) for m in attentions(loaded.model.base_model)]
    cache = DynamicCache(config=loaded.model.config)
    loaded.hidden_states(tokens, cache)
    for hook in hooks:
        hook.remove()
    loaded.forget()
    styles = styles_of(loaded.model)
    for index, (module, hidden, (cos, sin), _) in seen.items():
        before = module.k_proj(hidden).unflatten(-1, (-1, 32))
        before = (module.k_norm(before) if hasattr(module, "k_norm") else before).transpose(1, 2)
        keys = cache.layers[index].keys
        rope = styles[index][0].rope(cos[:1], sin[:1])
        image = tokens[0] == IMAGE
        assert not torch.equal(keys[:, :, image], before[:, :, image])
        assert float((rope.rotate(keys, back=True) - before).abs().max() / before.abs().max()) < 1e-6
        if name != "llava":  # the patches of a row share one axis and differ in another
            assert int((cos[0].diff(dim=0) == 0).sum()) > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_labelled_by_modality_and_diagnostics_tell_them_apart(name):
    loaded, tokens = media_model(name)
    labels = modalities(loaded.model.config, tokens)
    assert torch.equal(labels, (tokens == IMAGE).long() * MODALITIES.index("image"))
    rows = norms_by_modality(loaded, tokens[0], layers=1)
    boxes = [row for row in rows if row["kind"] == "tokens"]
    rows = [row for row in rows if row["kind"] == "modality"]
    counts = {"all": tokens.shape[1], "image": PATCHES, "text": tokens.shape[1] - PATCHES}
    assert len(rows) == 2 * len(SIDES) * len(counts)
    for row in rows:
        assert row["tokens"] == counts[row["modality"]]
        assert row["max_over_min"] >= row["max_over_median"] >= 1
        assert row["max_over_min"] >= row["median_over_min"] >= 1
    by = {(row["layer"], row["side"], row["modality"]): row for row in rows}
    assert by[0, "value", "image"]["relative"] != by[0, "value", "text"]["relative"]
    assert by[0, "value", "all"]["relative"] == pytest.approx(1, abs=0.1)
    assert [(row["layer"], row["side"]) for row in boxes] == [(0, side) for side in SIDES]
    for row in boxes:
        assert row["spans"] == [["text", 3], ["image", PATCHES], ["text", tokens.shape[1] - PATCHES - 3]]
        norms = torch.tensor(row["norms"])
        assert norms.shape == (5, tokens.shape[1])
        assert bool((norms.diff(dim=0) >= 0).all())


@pytest.mark.parametrize("name", FAMILIES)
def test_an_image_needs_its_whole_beginning(name):
    loaded, tokens = media_model(name)
    with pytest.raises(Unsupported, match=r"model: .*ForConditionalGeneration"):
        loaded.hidden_states(tokens[:, :9], KVCache(loaded.model, method("identity")))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_the_next_prompt_does_not_stand_where_the_image_left_off(name):
    loaded, tokens = media_model(name)
    text = MediaModel(loaded.model, loaded.device)
    plain = tokens[:, -8:]
    expected = own_log_probs(text, plain, plain[:, :4])
    answer_log_probs(loaded, method("nsn"), tokens, plain)
    assert torch.equal(own_log_probs(text, plain, plain[:, :4]), expected)

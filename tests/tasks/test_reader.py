"""Reading and writing through the cache against one token at a time, and shared prompts against each on its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvq.cache import KVCache
from kvq.config.tasks import Prefill
from kvq.errors import Unsupported
from kvq.methods.build import build_method
from kvq.methods.method import Method
from kvq.models.load import LoadedModel
from kvq.tasks.items import TOKENS, batches_of, read_in_batches
from kvq.tasks.reader import Reader, answer_text, check_prefill, stop_at
from tests.data.byte_tokenizer import byte_tokenizer
from tests.families import family
from tests.random_models import in_double_precision, random_llama, token_ids

METHODS = {
    "fp16": [],
    "identity": ["residual.size=16"],
    "zero": ["residual.size=16"],
    "kivi": ["residual.size=16"],
    "nsn": ["residual.size=16"],
    "rtn": ["residual.size=0"],
    "nsn without layer 0": ["residual.policy=none", "full_precision_layers.key=[0]", "full_precision_layers.value=[0]"],
}


def never(_tokens: object) -> bool:
    return False


def method_of(name: str) -> Method:
    return build_method(name.split()[0], bits=2, head_dim=32, overrides=METHODS[name])


@torch.no_grad()
def one_at_a_time(loaded: LoadedModel, method: Method, tokens: Tensor, whole: int) -> Tensor:
    """Logits behind each token from position `whole` on; the first `whole` are one prefill."""
    cache, rows = KVCache(loaded.model, method), []
    if whole:
        loaded.model(input_ids=tokens[:, :whole], past_key_values=cache, use_cache=True)
    for column in tokens[:, whole:].split(1, dim=1):
        rows.append(loaded.model(input_ids=column, past_key_values=cache).logits)  # noqa: PERF401
    return torch.cat(rows, 1)


@pytest.mark.parametrize("name", ["fp16", "kivi", "nsn", "rtn", "nsn without layer 0"])
@pytest.mark.parametrize("prefill", Prefill)
@pytest.mark.parametrize("length", [1, 33])
def test_prompt_and_continuation_are_token_by_token(
    name: str, prefill: Prefill, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = in_double_precision(random_llama(), monkeypatch)
    method = method_of(name)
    tokens = token_ids(length + 19, batch=2)
    expected = torch.log_softmax(
        one_at_a_time(loaded, method, tokens[:, :-1], length - 1 if prefill is Prefill.whole else 0)[:, -19:], -1
    ).gather(-1, tokens[:, length:, None])[..., 0]
    reader = Reader(loaded, method, prefill)
    cache, logits = reader.begin(tokens[:, :length])
    found, likeliest = reader.log_probs(cache, logits, tokens[:, length:])
    assert found.shape == likeliest.shape == (2, 19)
    assert (found - expected).abs().max() < 1e-6
    assert cache.get_seq_length() == length + 18


@pytest.mark.parametrize("name", ["fp16", "kivi", "zero"])
def test_writing_is_generate(name: str) -> None:
    loaded, method, tokens = random_llama(), method_of(name), token_ids(40)
    reader = Reader(loaded, method, Prefill.whole)
    cache, logits = reader.begin(tokens)
    rows = reader.write(cache, logits, 20, never)
    # transformers, whose prefill includes the last token: it takes over from the second new token on.
    other, _ = reader.begin(tokens)
    start = torch.cat([tokens, torch.tensor([rows[0][:1]])], 1)
    expected = loaded.model.generate(start, past_key_values=other, max_new_tokens=19, attention_mask=start > -1)
    assert rows[0] == expected[0, 40:].tolist()
    assert len(rows[0]) == 20


def test_rows_of_a_batch_are_the_same_alone_and_end_on_their_own() -> None:
    loaded, method, tokens = random_llama(), method_of("kivi"), token_ids(30, batch=3)
    reader = Reader(loaded, method, Prefill.whole)
    alone = [reader.write(*reader.begin(row[None]), 12, never)[0] for row in tokens]
    assert reader.write(*reader.begin(tokens), 12, never) == alone
    stop = alone[1][3]
    cut = [row[: row.index(stop) + 1] if stop in row else row for row in alone]
    assert reader.write(*reader.begin(tokens), 12, lambda row: row[-1] == stop) == cut
    assert len(cut[1]) <= 4


PROMPTS = [[1, 2, 3], [5], [1, 2, 3, *range(20, 45)], [1, 2, 3], [1, 2, 3, *range(20, 40), 7, 7, 7], [1, 9]]


@pytest.mark.parametrize("name", ["fp16", "kivi", "nsn"])
@pytest.mark.parametrize("prefill", Prefill)
def test_shared_prompts_give_the_numbers_of_prompts_on_their_own(
    name: str, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, method = in_double_precision(random_llama(), monkeypatch), method_of(name)
    reader = Reader(loaded, method, prefill)
    answer, seen = token_ids(21, seed=5), []
    for index, cache, logits in reader.each(PROMPTS):
        found, _ = reader.log_probs(cache, logits, answer)
        alone, _ = reader.log_probs(*reader.begin(torch.tensor([PROMPTS[index]])), answer)
        assert (found - alone).abs().max() < 1e-6, index
        seen.append(index)
    assert sorted(seen) == list(range(len(PROMPTS)))


def test_what_prompts_share_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, read = random_llama(), []
    plain = LoadedModel.hidden_states

    def counting(self: LoadedModel, tokens: Tensor, cache: KVCache) -> Tensor:
        read.append(tokens.numel())
        return plain(self, tokens, cache)

    monkeypatch.setattr(LoadedModel, "hidden_states", counting)
    reader = Reader(loaded, method_of("kivi"), Prefill.chunked)
    for _ in reader.each(PROMPTS):
        pass
    # [5], [1], then behind it [2, 3] and [9], then 20 tokens that two share, and the ends of those two.
    assert sum(read) == 1 + 1 + 2 + 1 + 20 + 5 + 3
    read.clear()
    for _ in Reader(loaded, method_of("kivi"), Prefill.whole).each(PROMPTS):
        pass
    assert sum(read) == sum(map(len, PROMPTS)) - 3  # the two equal ones


def test_residual_none_has_no_order_to_read_a_prompt_in() -> None:
    method = build_method("rtn", bits=4, head_dim=32, overrides=["residual=none"])
    check_prefill(method, Prefill.whole)
    with pytest.raises(Unsupported, match=r"use task\.prefill=whole"):
        check_prefill(method, Prefill.chunked)


def test_an_answer_ends_at_its_stop_text() -> None:
    tokenizer = byte_tokenizer()
    ends = stop_at(tokenizer, [10], ["END", ""])
    said = tokenizer.encode("so it goes END")
    assert [ends(said[: count + 1]) for count in range(len(said))] == [False] * (len(said) - 1) + [True]
    assert stop_at(tokenizer, [said[3]], [])(said[:4])
    assert answer_text(tokenizer, said, ["END"]) == "so it goes "


HYBRIDS = ["qwen3_next", "olmo_hybrid", "kimi_linear", "lfm2", "falcon_h1", "bamba", "granitemoehybrid", "nemotron_h"]


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("name", "prefill"),
    [
        *((name, prefill) for name in ("llama", "gemma2", "gpt2", "bloom") for prefill in Prefill),
        *((name, Prefill.whole) for name in HYBRIDS),
        *((name, Prefill.chunked) for name in ("qwen3_next", "bamba")),
    ],
)
def test_prompts_of_unequal_length_are_answered_together_as_alone(
    name: str, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers and log-probabilities; positions are rotated, embedded and distances, and layers have windows or states.

    Prompts are read in one forward where they can be, and else one by one, what they share once.
    """
    loaded, text = in_double_precision(family(name), monkeypatch), token_ids(90)[0].tolist()
    prompts, continuation = [text[:33], text[40:69], text[:25] + text[50:70]], torch.tensor([text[60:79]])
    reader = Reader(loaded, build_method("kivi", bits=2, head_dim=32, overrides=["residual.size=8"]), prefill)
    assert reader.can_join
    assert reader.can_pad == (prefill is Prefill.whole and name not in HYBRIDS)
    cache, logits = reader.begin_together(prompts)
    assert reader.tokens_read == 33 + 29 + 45 - (25 if prefill is Prefill.chunked else 0)
    held = [cache.sequence(row) for row in range(3)]
    left: dict[int, KVCache] = {}
    rows = reader.write(cache, logits, 6, lambda row: len(row) == row[0] % 6 + 1, leave=left.__setitem__)
    assert len({len(row) for row in rows}) > 1  # answers end one by one
    for row, (prompt, written) in enumerate(zip(prompts, rows, strict=True)):
        alone, after = reader.begin(reader.tensor([prompt]))
        torch.testing.assert_close(logits[row : row + 1], after, atol=1e-9, rtol=0)
        assert (held[row].padding, held[row].is_parted, held[row].nbytes) == (None, False, alone.nbytes)
        expected = reader.log_probs(alone.fork(), after, continuation)[0]
        found = reader.log_probs(held[row], logits[row : row + 1], continuation)[0]
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
        assert written == reader.write(alone, after, len(written), never)[0]
        assert (left[row].get_seq_length(), left[row].nbytes) == (alone.get_seq_length(), alone.nbytes)


@pytest.mark.every_plugin
def test_methods_that_evict_answer_prompts_of_equal_length_together() -> None:
    evicting = build_method("h2o", head_dim=32, overrides=["residual.size=8"])
    reader = Reader(random_llama(), evicting, Prefill.whole)
    assert not reader.can_mix_lengths
    with pytest.raises(Unsupported, match=r"^KVCache\.together: method=h2o evicts .*; go on with each by itself$"):
        reader.begin_together([[1, 2, 3], [1, 2]])
    assert reader.begin_together([[1, 2, 3], [1, 2, 4]])[1].shape[0] == 2


def test_batches_are_as_large_as_their_setting_or_their_tokens_say() -> None:
    lengths = [30, 10, 20, 10, 10]
    assert batches_of(lengths, 2, unequal=True) == [[1, 3], [4, 2], [0]]
    assert batches_of(lengths, 2, unequal=False) == [[1, 3], [4], [2], [0]]
    assert batches_of(lengths, None, unequal=True) == [[1, 3, 4, 2, 0]]
    assert [len(batch) for batch in batches_of([5] * 20, None, unequal=True)] == [8, 8, 4]
    long = [TOKENS // 4, TOKENS // 3, TOKENS // 2, TOKENS, 2 * TOKENS]
    assert batches_of(long, None, unequal=True) == [[0, 1], [2], [3], [4]]
    assert batches_of(long, 5, unequal=True) == [[0, 1, 2, 3, 4]]


@pytest.mark.every_plugin
@pytest.mark.parametrize("prefill", Prefill)
def test_all_prompts_are_read_in_batches_once(prefill: Prefill) -> None:
    prompts = [[1, 2, 3, *range(count)] for count in range(11)]
    found = list(read_in_batches(Reader(random_llama(), method_of("kivi"), prefill), prompts, None))
    assert sorted(index for batch, _, _ in found for index in batch) == list(range(11))
    assert [(len(batch), logits.shape[0]) for batch, _, logits in found] == [(8, 8), (3, 3)]
    # Mostly padding: read one by one.
    reader = Reader(random_llama(), method_of("kivi"), prefill)
    assert reader.begin_together([[1, 2], list(range(40))])[0].padding == [38, 0]
    assert reader.tokens_read == 42
    evicting = Reader(random_llama(), build_method("h2o", head_dim=32, overrides=["residual.size=8"]), prefill)
    assert [batch for batch, _, _ in read_in_batches(evicting, [[1], [2, 3], [4, 5]], None)] == [[0], [1, 2]]

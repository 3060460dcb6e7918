"""Conversations: losses against plain transformers, bytes by hand, forks that share memory, a run that goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvq.cache import KVCache
from kvq.cache.contents import bytes_together
from kvq.config import compose, resolve
from kvq.errors import ConfigError, DataError, Unsupported
from kvq.models.inputs import Inputs
from kvq.report.figures.every import drawings
from kvq.report.tables.build import build_tables
from kvq.report.tables.layout import columns_of
from kvq.results import Record, Store
from kvq.results.files import Journal
from kvq.runs import Prepared, run
from kvq.tasks.scoring import cut_windows, evenly
from kvq_lab.conversation import Speaker, compare_branches, measure, read_turns, turn_metrics

_USER, _ANSWER, _TURNS = 28, 4, 3
GIVEN = (
    f"model=tiny task=conversation task.conversations=3 task.turns={_TURNS} task.user={_USER} task.answer={_ANSWER} "
    "task.branches=2 residual.size=16 threads=1"
).split()
_RTN = ["method=rtn", "bits=2"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, dict[str, Record]]:
    folder = tmp_path_factory.mktemp("conversation")
    words = {"fp16": ["method=fp16"], "identity": ["method=identity"], "rtn": _RTN, "nsn": ["method=nsn", "bits=2"]}
    runs = {name: run(resolve(compose([*GIVEN, *more, f"results_dir={folder}"]))) for name, more in words.items()}
    return Store(folder), runs


def prepared(*more: str) -> Prepared:
    return Prepared(resolve(compose([*GIVEN, *more])))


def passages(inputs: Inputs) -> list[torch.Tensor]:
    task = inputs.config.task
    windows = cut_windows(inputs.tokens.streams, task.context, bos=inputs.bos)
    return [window.tokens[None] for window in evenly(windows, task.conversations, "task.conversations")]


def test_losses_of_full_precision_are_those_of_one_forward_of_the_model(made: tuple[Store, dict[str, Record]]) -> None:
    """Without quantization turns change nothing: plain transformers reads each passage at once."""
    store, records = made
    inputs = Inputs(resolve(compose([*GIVEN, "method=fp16"])))
    rows = store.samples(records["fp16"].key)
    for tokens, row in zip(passages(inputs), rows, strict=True):
        logits = inputs.model.model(tokens).logits[0, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
        answers = [losses[turn * 32 + _USER - 1 : turn * 32 + 31].sum().item() for turn in range(_TURNS)]
        assert [turn["nll"] for turn in row["turns"]] == pytest.approx(answers, abs=5e-3)
        assert row["nll"] == pytest.approx(sum(answers), abs=1e-2)
    metrics = records["fp16"].metrics
    assert metrics["scored_tokens"] == 3 * _TURNS * _ANSWER
    assert metrics["nll"] == pytest.approx(sum(metrics[f"nll[turn={turn}]"] for turn in (1, 2, 3)) / 3)
    assert not [name for name in metrics if name.startswith(("kl_mean", "delta_nll"))]


def test_one_turn_is_a_prompt_and_its_continuation() -> None:
    """Of a method: the prompt but its last token in one forward, then one token per forward, on a plain cache."""
    found = prepared(*_RTN, "task.turns=1")
    speaker = Speaker(found.inputs, found.method)
    tokens = passages(found.inputs)[0]
    (row,), _ = read_turns(speaker, None, tokens, 32)
    model, cache = found.inputs.model.model, KVCache(found.inputs.model, found.method)
    with torch.no_grad():
        model(tokens[:, : _USER - 1], past_key_values=cache)
        steps = [model(tokens[:, at : at + 1], past_key_values=cache).logits[0, 0] for at in range(_USER - 1, 31)]
    loss = torch.nn.functional.cross_entropy(torch.stack(steps).float(), tokens[0, _USER:], reduction="sum")
    assert row["nll"] == pytest.approx(float(loss), abs=1e-3)


def test_identity_is_full_precision_within_rounding(made: tuple[Store, dict[str, Record]]) -> None:
    metrics = made[1]["identity"].metrics
    for part in ("", *(f"[turn={turn}]" for turn in (1, 2, 3))):
        assert metrics[f"delta_nll{part}"] == pytest.approx(0, abs=1e-4)
        assert metrics[f"kl_mean{part}"] == pytest.approx(0, abs=1e-5)


def test_quantization_costs_loss_in_each_turn(made: tuple[Store, dict[str, Record]]) -> None:
    store, records = made
    metrics, units = records["rtn"].metrics, records["rtn"].units
    rows, full = (store.samples(records[name].key) for name in ("rtn", "fp16"))
    for turn in (1, 2, 3):
        gaps = [
            (row["turns"][turn - 1]["nll"] - other["turns"][turn - 1]["nll"]) / _ANSWER
            for row, other in zip(rows, full, strict=True)
        ]
        assert metrics[f"delta_nll[turn={turn}]"] == pytest.approx(sum(gaps) / 3)
        assert metrics[f"delta_nll_se[turn={turn}]"] > 0
        assert metrics[f"kl_mean[turn={turn}]"] > 0.001
        assert units[f"delta_nll_se[turn={turn}]"] == "nats/token"
    assert metrics["delta_nll"] == pytest.approx(sum(metrics[f"delta_nll[turn={turn}]"] for turn in (1, 2, 3)) / 3)


def test_bytes_by_hand(made: tuple[Store, dict[str, Record]]) -> None:
    """Blocks of 16 tokens leave as soon as they are full: after turns of 32 tokens, all are packed."""
    config = Inputs(resolve(compose([*GIVEN, *_RTN]))).model.text_config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim  # of a token
    metrics, full = made[1]["rtn"].metrics, made[1]["fp16"].metrics
    for turn in (1, 2, 3):
        tokens = 32 * turn
        assert full[f"total_bytes[turn={turn}]"] == 2 * tokens * numbers
        assert (full[f"packed_tokens[turn={turn}]"], full[f"residual_tokens[turn={turn}]"]) == (0, tokens)
        assert (metrics[f"packed_tokens[turn={turn}]"], metrics[f"residual_tokens[turn={turn}]"]) == (tokens, 0)
        # 2 bits, a scale and a zero point of 2 bytes for each token of a head
        assert metrics[f"total_bytes[turn={turn}]"] == tokens * numbers * (2 / 8 + 4 / config.head_dim)
        assert metrics[f"effective_bits[turn={turn}]"] == pytest.approx(2 + 32 / config.head_dim)
    assert metrics["separate_bytes"] == 2 * metrics["total_bytes[turn=2]"]
    assert metrics["once_bytes"] == metrics["separate_bytes"] - metrics["total_bytes[turn=1]"]
    assert full["once_bytes"] == 3 * full["total_bytes[turn=1]"]


def test_forks_score_what_caches_of_their_own_do(made: tuple[Store, dict[str, Record]]) -> None:
    assert {record.metrics["fork_difference"] for record in made[1].values()} == {0}


def test_forks_share_what_they_have_not_grown() -> None:
    """A first turn of 160 tokens fills a block of 128, and turns of 32 fill no other: this block is in memory once."""
    found = prepared("method=nsn", "bits=2", "residual.size=128", "task.turns=5")
    speaker, (first, *others) = Speaker(found.inputs, found.method), passages(found.inputs)
    turns = [tokens[:, -32:] for tokens in others]
    sizes = compare_branches(speaker, first, turns)
    assert sizes["fork_difference"] == 0
    assert sizes["shared_bytes"] == sizes["once_bytes"] < sizes["separate_bytes"]
    cache = speaker.reader.new_cache()
    speaker.read_turn(cache, first)
    assert cache.packed_bytes == sizes["separate_bytes"] - sizes["shared_bytes"]
    forks = [cache.fork() for _ in range(4)]
    assert bytes_together([cache]) == bytes_together([cache, *forks]) == cache.nbytes
    other = speaker.reader.new_cache()
    speaker.read_turn(other, first)
    assert bytes_together([cache, other]) == 2 * cache.nbytes


def test_memory_of_forks_that_have_grown_is_counted_as_it_is(made: tuple[Store, dict[str, Record]]) -> None:
    metrics = made[1]["rtn"].metrics
    assert metrics["once_bytes"] < metrics["shared_bytes"] <= metrics["separate_bytes"]


def test_a_killed_run_goes_on() -> None:
    found = prepared("method=identity")
    whole = measure(found.inputs, found.method, None, journal := Journal())
    assert len(journal.rows) == 3
    half = Journal()
    half.add([dict(journal.rows["conversation 0"]) | {"fork_difference": 7.0}])
    again = measure(found.inputs, found.method, None, half)
    assert again.metrics == whole.metrics | {"fork_difference": 7.0}
    assert again.samples[1:] == whole.samples[1:]


def test_numbers_by_hand() -> None:
    def row(nll: float, kl: float) -> dict[str, float]:
        sizes = {"effective_bits": 4.0, "total_bytes": 8.0, "packed_tokens": 1.0, "residual_tokens": 2.0}
        return {"nll": nll, "kl": kl, **sizes}

    rows = [{"tokens": 4, "turns": [row(2, 0.2), row(4, 0.4)]}, {"tokens": 4, "turns": [row(4, 0), row(6, 0)]}]
    found = turn_metrics(rows, answer=2)
    assert [found[name] for name in ("nll", "nll[turn=1]", "nll[turn=2]")] == [2, 1.5, 2.5]
    assert [found[name] for name in ("kl_mean", "kl_mean[turn=1]")] == pytest.approx([0.075, 0.05])
    assert found["residual_tokens[turn=2]"] == 2
    assert "fork_difference" not in found


def test_no_branches() -> None:
    found = prepared("method=identity", "task.branches=0", "task.turns=1")
    metrics = measure(found.inputs, found.method, None, Journal()).metrics
    assert "nll[turn=1]" in metrics
    assert not {"nll[turn=2]", "shared_bytes", "fork_difference"} & metrics.keys()


def test_table_and_figure(made: tuple[Store, dict[str, Record]]) -> None:
    tables = build_tables(made[0])
    (table,) = tables.tables
    titles = [column.title for column in columns_of(table)]
    assert titles[-3:] == [f"ΔNLL (nats/token), turn {turn}" for turn in (1, 2, 3)]
    drawn = {one.stem.partition("-")[0]: one for one in drawings([], made[0], tables.tables)}
    numbers = drawn["turns"].table
    assert numbers["first"].tolist() == [1, 2, 3] * 3
    (axis,) = drawn["turns"].figure().axes
    assert axis.get_xlabel() == "turn"
    assert len(axis.containers) == 3


def test_chunked_prompts_read_the_quantized_cache(made: tuple[Store, dict[str, Record]], tmp_path: Path) -> None:
    words = [*GIVEN, "task.prefill=chunked", f"results_dir={tmp_path}"]
    full = run(resolve(compose([*words, "method=fp16"])))
    assert full.metrics["nll"] == pytest.approx(made[1]["fp16"].metrics["nll"], abs=1e-4)
    assert run(resolve(compose([*words, *_RTN]))).metrics["fork_difference"] == 0


def test_refusals(tmp_path: Path) -> None:
    for word, kind, said in (
        ("task.turns=100000", ConfigError, r"^task\.context=3200000: model=tiny takes at most 4096 tokens"),
        ("task.answer=4000 task.turns=1", ConfigError, rf"^task\.turns=1: 2 turns of task\.user={_USER} and "),
        ("task.branches=3", ConfigError, r"^task\.branches=3: each is of another .* give at most 2$"),
        ("task.user=1", ConfigError, r"^task\.user=1: "),
        ("task.turns=0", ConfigError, r"^task\.turns=0: "),
        ("task.conversations=50000", DataError, r"^task\.conversations=50000: the text has \d+ passages of 96 tokens"),
    ):
        with pytest.raises(kind, match=said):
            run(resolve(compose([*GIVEN, "method=fp16", *word.split(), f"results_dir={tmp_path}"])))
    found = prepared(*_RTN, "residual.policy=none", "task.prefill=chunked")
    with pytest.raises(Unsupported, match=r"^task\.prefill=chunked: residual=none"):
        found.task.check(found.inputs, found.method)

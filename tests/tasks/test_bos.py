"""`task.bos`: windows and prompts begin with the begin-of-text token, once, and say so in key and label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance

from kvq import runs
from kvq.calibration.text import calibration_text
from kvq.config import DatasetConfig, Loader, PplConfig, Scoring, Windows, compose, resolve
from kvq.config.identity import canonical
from kvq.config.method import CalibrationConfig
from kvq.config.tasks import Prefill
from kvq.data.text import begins_with_bos, encode, load_tokens, set_bos
from kvq.errors import ConfigError, Unsupported
from kvq.methods.build import method_of
from kvq.models.inputs import Inputs
from kvq.tasks import longbench, measurement, multimodal, niah, reader
from kvq.tasks.lm_eval_model import CacheLM
from kvq.tasks.ppl import ppl_windows
from kvq.tasks.reader import Reader
from kvq.tasks.scoring import cut_windows
from tests.data.byte_tokenizer import byte_tokenizer
from tests.random_models import llama, save_random_model

BOS = 0
TEXT = "Some words about nothing that stand here again and again. " * 40
CHAT = "{% for m in messages %}<s>[{{ m.content }}]{% endfor %}"


@pytest.fixture(scope="module", params=[False, True], ids=["asked", "by itself"])
def given(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A random model whose tokenizer has the token; it writes it by itself, or the run asks for it."""
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer(request.param).save_pretrained(folder)
    llama(heads=2, kv_heads=1, vocabulary=257).save_pretrained(folder)
    (folder / "text.txt").write_text(TEXT)
    asked = [] if request.param else ["task.bos=true"]
    model = ["model=hf", f"model.path={folder}", "model.dtype=float32"]
    return [*model, "dataset=text", f"dataset.path={folder}/text.txt", *asked]


def inputs_of(given: list[str], *more: str) -> Inputs:
    return Inputs(resolve(compose([*given, *more])))


def once(tokens: Any) -> bool:
    row = [int(token) for token in tokens]
    return row[0] == BOS and BOS not in row[1:]


@pytest.mark.parametrize("stride", [None, 3, 7, 8])
def test_every_window_begins_with_it_and_the_text_is_scored_on(stride: int | None) -> None:
    text = torch.arange(100, 160)
    windows = cut_windows([text], 8, stride, bos=BOS)
    assert all(len(window.tokens) == 8 and once(window.tokens) for window in windows)
    scored = torch.cat([window.tokens[window.scored_from :] for window in windows])
    assert scored.tolist() == list(range(100, 100 + len(scored)))  # every token once, the first one too
    plain = cut_windows([text], 8, stride)
    assert [window.targets for window in plain] == [window.targets for window in windows][: len(plain)]


def test_a_continuation_counts_it_in_its_prompt() -> None:
    task = PplConfig(context=8, windows=Windows.disjoint, scoring=Scoring.continuation, prompt=5)
    for window in ppl_windows([torch.arange(100, 160)], task, BOS):
        assert once(window.tokens)
        assert (window.scored_from, window.targets) == (5, 3)


@pytest.mark.parametrize("loader", [Loader.text, Loader.documents])
@pytest.mark.parametrize("writes", [False, True])
def test_a_stream_has_room_for_it_and_none_of_its_own(tmp_path: Path, loader: Loader, writes: bool) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * 31)
    config = DatasetConfig("text", loader, str(path))
    (stream,) = load_tokens(config, byte_tokenizer(writes), 32, BOS).streams
    assert len(stream) == 31
    assert BOS not in stream
    (window,) = cut_windows([stream], 32, bos=BOS)
    assert once(window.tokens)


def test_it_is_never_doubled() -> None:
    marked, plain = byte_tokenizer(True), byte_tokenizer()
    assert (begins_with_bos(marked), begins_with_bos(plain)) == (True, False)
    for tokenizer in (marked, plain):
        ids = encode(tokenizer, "abc")
        assert set_bos(tokenizer, set_bos(tokenizer, ids, BOS), BOS) == set_bos(tokenizer, ids, BOS)
        assert once(set_bos(tokenizer, ids, BOS))
        assert BOS not in set_bos(tokenizer, ids, None)
        tokenizer.chat_template = CHAT
        assert begins_with_bos(tokenizer, chat=True)
    assert set_bos(plain, [], BOS) == [BOS]


def test_windows_and_prompts_of_every_task(given: list[str]) -> None:
    inputs = inputs_of(given, "task.context=64", "task.stride=16")
    assert inputs.bos == BOS
    assert all(once(window.tokens) for window in ppl_windows(inputs.tokens.streams, inputs.config.task, inputs.bos))
    for task in ("tni", "error"):
        diagnostic = inputs_of(given, f"task={task}", "task.context=64", "task.windows=3")
        assert [len(row) for row in measurement.windows_of(diagnostic)] == [64] * 3
        assert all(map(once, measurement.windows_of(diagnostic)))
    needles = niah.make_items(inputs_of(given, "task=niah", "task.lengths=[256,320]", "task.repeats=2"))
    assert {len(item.prompt) for item in needles} == {256, 320}
    assert all(once(item.prompt) for item in needles)
    chatting = inputs_of(given, "task=niah/chat", "task.lengths=[256,320]", "task.repeats=2")
    with pytest.raises(ConfigError, match="no chat template"):
        niah.make_items(chatting)
    chatting.tokenizer.chat_template = CHAT
    needles = niah.make_items(chatting)
    assert {len(item.prompt) for item in needles} == {256, 320}
    assert all(once(item.prompt) for item in needles)
    question = needles[0].needles[0].question
    assert chatting.tokenizer.decode(needles[0].prompt).endswith(f"{question}]")
    asked = inputs_of(given, "task=generate", "task.chat_template=true", "task.prompt='Name a river.'")
    asked.tokenizer.chat_template = CHAT
    assert once(reader.prompt_of(asked))
    assert asked.tokenizer.decode(reader.prompt_of(asked)) == "<s>[Name a river.]"
    document = longbench.Document("qasper/0", longbench.load_subset("qasper"), {"context": TEXT, "question": "What?"})
    for chat in ("false", "true"):
        asked = inputs_of(given, "task=longbench", f"task.chat_template={chat}")
        asked.tokenizer.chat_template = CHAT
        for room in (4000, 100):
            tokens, cut = longbench.prompt_tokens(asked, document, room)
            assert once(tokens)
            assert (len(tokens) == 100) == (cut > 0) or chat == "true"


def test_without_it_prompts_have_none(given: list[str]) -> None:
    without = [word for word in given if not word.startswith("task.bos")] + ["task.bos=false"]
    assert inputs_of(without).bos is None
    for item in niah.make_items(inputs_of(without, "task=niah", "task.lengths=[256]", "task.repeats=1")):
        assert len(item.prompt) == 256
        assert BOS not in item.prompt
    document = longbench.Document("qasper/0", longbench.load_subset("qasper"), {"context": TEXT, "question": "What?"})
    assert BOS not in longbench.prompt_tokens(inputs_of(without, "task=longbench"), document, 4000)[0]


def test_contexts_of_lm_eval_begin_with_it_also_where_they_are_cut(given: list[str]) -> None:
    inputs = inputs_of(given, "method=fp16")
    reader = Reader(inputs.model, method_of(inputs.config, 128), Prefill.chunked)
    model = CacheLM(reader, inputs.tokenizer, 1, 40, bos=inputs.bos)
    request = Instance("generate_until", {}, ("ab" * 30, {"until": ["\n"], "max_gen_toks": 8}), 0, metadata=("t", 0, 1))
    context, _ = model._prepare(request)
    assert (len(context), once(context)) == (32, True)
    pair = model._encode_pair("abc", " de")
    assert BOS not in [*pair[0], *pair[1]]
    for words in ("abc", "ab" * 30):
        context, continuation = model._split((None, *model._encode_pair(words, " de")))
        assert once(context)
        assert inputs.tokenizer.decode(continuation) == " de"
        assert len(context) + len(continuation) <= 41
    rolling = Instance("loglikelihood_rolling", {}, ("abc" * 30,), 0, metadata=("t", 0, 1))
    cuts: list[Any] = []
    original = model._split
    model._split = lambda one: cuts.append(original(one)) or cuts[-1]  # type: ignore[method-assign, func-returns-value]
    (score,) = model.loglikelihood_rolling([rolling], disable_tqdm=True)
    assert score < 0
    assert all(once(context) and BOS not in continuation for context, continuation in cuts)
    assert sum(len(continuation) for _, continuation in cuts) == 90


def test_calibration_windows_begin_with_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    settings = CalibrationConfig(dataset="wikitext2", samples=4, length=32, path=str(path))
    plain, begins = (calibration_text(settings, byte_tokenizer(), bos) for bos in (None, BOS))
    assert plain.windows.shape == begins.windows.shape == (4, 32)
    assert all(map(once, begins.windows))
    assert plain.fingerprint != begins.fingerprint


def test_perplexity_behind_it_is_the_plain_forward(given: list[str], tmp_path: Path) -> None:
    more = ["method=fp16", "task.context=64", "task.windows=disjoint", "task.max_windows=2", f"results_dir={tmp_path}"]
    inputs = inputs_of(given, *more)
    record = runs.run(inputs.config)
    ids = set_bos(inputs.tokenizer, encode(inputs.tokenizer, TEXT), None)
    losses = []
    for start in (0, 63):
        tokens = torch.tensor([BOS, *ids[start : start + 63]])
        logits = inputs.model.model(input_ids=tokens[None]).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits.double(), tokens[1:]))
    assert record.metrics["nll"] == pytest.approx(float(torch.stack(losses).mean()), abs=1e-5)
    assert record.config["task"]["bos"] is True
    assert record.metrics["cached_tokens"] == 63


def test_the_key_has_it_where_model_or_task_does() -> None:
    def task(*overrides: str, own: bool | None = None) -> Any:
        return canonical(resolve(compose(list(overrides))), "weights", "text", trained_with=own)["task"].get("bos")

    assert task() is task("task.bos=false") is task("model=tiny_outliers") is task("model.bos=false") is None
    assert task("task.bos=true") is task("model.bos=true") is task("model=llama_2_7b") is True
    assert task("model.bos=true", "task.bos=false") is False
    chat = ("task=niah", "task.chat_template=true")
    assert task(*chat, "model.chat_bos=true") is task(*chat, "model.bos=true") is True
    assert task("task=niah", "model.chat_bos=true") is task(*chat, "model.bos=true", "model.chat_bos=false") is None
    assert task("task=niah/chat", "model=smollm2_135m") is True  # known by name, so an experiment finds its records
    hub = ["model=hf", "model.path=somewhere"]
    assert task(*hub) is task(*hub, own=False) is None
    assert task(*hub, own=True) is True
    assert task(*hub, "task.bos=false", own=True) is False
    assert task("task=latency") is None


def test_a_tokenizer_without_such_a_token_is_refused(tmp_path: Path) -> None:
    save_random_model(tmp_path)
    for setting in ("task.bos=true", "model.bos=true"):
        inputs = inputs_of(["model=hf", f"model.path={tmp_path}", setting])
        said = rf"^{setting}: the tokenizer of model=.* has no BOS token; use false$"
        with pytest.raises(ConfigError, match=said):
            _ = inputs.bos
    with pytest.raises(ConfigError, match=r"^task\.bos=true: the tokenizer"):
        _ = runs.Prepared(
            inputs_of(["model=hf", f"model.path={tmp_path}", "task=longbench", "task.bos=true"]).config
        ).method
    image = inputs_of(["task=multimodal", "task.bos=true"])
    with pytest.raises(Unsupported, match=r"^task.bos=true: the model's processor writes the prompts of this task$"):
        multimodal.check(image, method_of(image.config, 128))

"""Bad input: one clear line that names the setting, a non-zero exit, and nothing that was there is lost."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvq.cli import main
from kvq.results import Record, Store
from tests.random_models import save_random_model
from tests.sweeps import small_run

NAMES = [
    (["task=[1,2]"], r"task=\[1,2\]: unknown task"),
    (["model=[null]"], r"model=\[null\]: unknown model"),
    (["task=pll"], "task=pll: unknown task; .*Did you mean 'ppl'"),
    (["+experiment=mian"], "experiment=mian: unknown experiment.*Did you mean 'main'"),
    (["+experiment=nsnquant/tabel2"], "unknown experiment.*Did you mean 'nsnquant/table2'"),
    (["+experiment=nsnquant/table5", "layout.pool=max"], "layout.pool=max: one of mean, sum"),
    (["+experiment=nsnquant/table5", "layout.axes.methd=[x]"], "layout.axes.methd"),
    (["experiment=main"], r"add it with \+experiment=main"),
    (["metod=nsn"], "metod: unknown setting; .*Did you mean 'method'"),
    (["task.contex=3"], "task.contex: unknown setting; task has .*Did you mean 'context'"),
    (["+method.key.quantizer.colour=red"], "colour: not an argument of kvq.codecs"),
    (["+method.key.stages.hadamad={_target_: kvq.codecs.Hadamard}", "method.key.order=[]"], "hadamad"),
    (["model.outlier.seed=1"], "model.outlier.seed: unknown setting"),
    (["task.name=foo"], "task.name=foo: choose another task by task=..."),
    (["logger=wadb"], "logger=wadb: unknown logger; one of none, wandb.*Did you mean 'wandb'"),
    (["logger.project=mine"], "logger.project: unknown setting; logger has name"),
    (["logger.name=wandb"], "logger.name=wandb: choose another logger by logger=..."),
    (["logger=wandb", "logger.projct=mine"], "logger.projct: unknown setting; .*Did you mean 'project'"),
    (["hydra/launcher=ray"], "hydra/launcher=ray: a sweep is one process; start a command"),
]
FORMS = [
    (["[[="], "cannot be read as setting=value"),
    (["=3"], "cannot be read as setting=value"),
    (["method=nsn,kivi"], "method=nsn,kivi: several values need -m"),
    (["hydra.run.dir=/proc/nope"], "hydra: cannot use its folder '/proc/nope'"),
    (["--config-dir", "CYCLE", "method=odd"], "defaults name each other in a circle"),
    (["--multrun"], "unrecognized arguments: --multrun; see --help"),
    (["--cfg", "jbo"], "argument --cfg.*invalid choice: 'jbo'"),
    (["--config-dir", "nowhere"], "'.*nowhere' not found"),
    (["--config-dir", "x" * 300], "--config-dir='x+'...: File name too long"),
    (["-m", "method=nsn,nns", "bits=2,3"], "method=nns: unknown method.*Did you mean 'nsn'"),
    (["-m", "method=nsn,kivi", "method.key.stages.norm=null"], "norm: unknown setting with method=kivi; .* has none"),
    (["-m", "method=nsn,kivi", "bts=2,3"], "bts: unknown setting; .*Did you mean 'bits'"),
]
VALUES = [
    (["bits=banana"], "bits=banana: whole numbers 1-16"),
    (["bits=17"], "bits=17: whole numbers 1-16"),
    (["bits={key: 3}"], "bits=.*: whole numbers 1-16"),
    (["bits=null"], "bits=null: whole numbers 1-16"),
    (["~bits"], "bits=null: whole numbers 1-16"),
    (["bits=${nowhere}"], "bits.*'nowhere' not found"),
    (["logger=wandb", "logger.mode=oflline"], "logger.mode.*'oflline'.*Did you mean 'offline'"),
    (["logger=wandb", "logger.project=a/b"], "logger.project=a/b: 1 to 128 characters"),
    (["logger=wandb", "logger.group="], "logger.group=: 1 to 128 characters"),
    (["logger=wandb", "logger.samples=-1"], "logger.samples=-1: at least 0"),
    (["seed=null"], "seed=null: .*not Optional"),
    (["seed=-1"], "seed=-1: 0 to"),
    (["seed=99999999999"], "seed=99999999999: 0 to"),
    (["plan=perhaps"], "plan=perhaps: .*bool"),
    (["device=gpu"], r"device=gpu: .*expected one of \[auto, cpu, cuda\]"),
    (["results_dir="], "results_dir=: empty"),
    *(
        ([*chosen, f"{setting}={'x' * 300}"], f"{setting}='x+'...: File name too long")
        for chosen, setting in (
            ([], "results_dir"),
            ([], "model.path"),
            ([], "dataset.path"),
            (["method=kvquant"], "method.calibration.path"),
            (["task=lm_eval", "task.tasks=[x]"], "task.include_path"),
        )
    ),
    (["task=lm_eval", f"task.tasks=[/{'x' * 300}.yaml]"], "task.tasks='/x+'...: File name too long"),
    (["threads=100000"], "threads=100000: at most 1024"),
    (["method.name=''"], "method.name=: empty"),
    (["method.value=[1]"], "method.value=.1.: "),
    (["method.key._target_=[1,2]"], r"method.key._target_=\[1, 2\]: cannot be imported"),
    (["method.key._target_=math.pi"], "method.key._target_=math.pi: cannot be imported"),
    (["task.version=2"], "task.version"),
    (["task.bootstrap.resamples=1000000000"], "task.bootstrap.resamples=1000000000: at most 1000000"),
    (["task=niah", "task.digits=20"], "task.digits=20: at most 18"),
    (
        ["task=niah", "task.needle='{key:>1000000000} {value}'", "task.question='{key}'"],
        "task.needle=.*: {key} and {value} are filled in, without a format",
    ),
    (["task=niah", "task.needle='{key!r} {value}'", "task.question='{key}'"], "filled in, without a format"),
    (["results_dir=A_FILE"], "results_dir=.*a_file: not a folder"),
    (["model.dtype=int8"], r"model.dtype=int8: .*expected one of \["),
    (["model.path="], "model.path=: empty"),
    (["task.context=abc"], "task.context=abc: Value 'abc' .* could not be converted to Integer"),
    (["task.context=1"], "task.context=1: at least 2"),
    (["+nonsense=1"], "nonsense: unknown setting"),
    (["+task.contxt=1"], "task.contxt: unknown setting. Did you mean 'context'"),
    (["+method.keys=1"], "method.keys: unknown setting. Did you mean 'key'"),
    (["task.stride=4096"], r"task.stride=4096: 1 to task.context \(96\)"),
    (["task.max_windows=0"], "task.max_windows=0: at least 1"),
    (["task.bootstrap.block=0"], "task.bootstrap.block=0: at least 1"),
    (["bits=k2"], "bits=k2: whole numbers"),
    (["threads=0"], "threads=0: at least 1"),
    (["task=latency", "cpu_linear=onednn"], "cpu_linear=onednn: "),
    (["method.bits_range=[3]"], r"method.bits_range=\[3\]"),
    (["task=generate", "task.prompt=a", "task.prompt_file=b"], "task.prompt_file=b: or task.prompt, not both"),
    (["task=random_states", "task.against_bits=3"], "task.against_bits=3: bits of task.against, which is null"),
    (["task=random_states", "task.jumps=[3]"], r"task.jumps=\[3\]: tokens of drifting states, 1 to 359"),
    (["task=random_states", "task.states=drifting", "task.jumps=[360]"], r"task.jumps=\[360\]"),
    (["task=random_states", "task.draws=1001"], "task.draws=1001: at most 1000"),
    (["task=model_states", "task.held_out=159"], "task.held_out=159: at most task.context=160 less 2"),
    (["task=model_states", "task.layers=[]"], r"task.layers=\[\]: a list of layers from 0 on"),
    (["task=generate", "task.prompt=''"], "task.prompt=: empty"),
    (["task=generate", "task.max_new_tokens=0"], "task.max_new_tokens=0: at least 1"),
    (["task=generate", "task.ngram=0"], "task.ngram=0: at least 1"),
    (["cache.dtype=float64"], "cache.dtype=float64: null, float16, bfloat16 or float32"),
    (["model.cache_dtype=float64"], "model.cache_dtype=float64: null, float16, bfloat16 or float32"),
    (["task=error", "cache.dtype=float16"], "cache.dtype=float16: task=error fills no cache; leave it null"),
    (["task=memory", "cache.dtype=float16"], "cache.dtype=float16: task=memory fills no cache; leave it null"),
    (["model.max_memory={0: 20GiB}"], "model.max_memory={0: '20GiB'}: sizes by device for model.device_map=auto"),
    (["model.attn_implementation=''"], "model.attn_implementation="),
    (["task.windows=slidng"], r"expected one of \[sliding, disjoint\]. Did you mean 'sliding'"),
    (["model.outliers.key_scale=3", "model.outliers.key_pairs=2"], "key_scale=3.0: a power of two"),
    (["method.key.quantizer.group_size=many"], "group_size=many: .* takes int"),
    (["method=oscar", "method.key.stages.norm=3"], "stages.norm=3: a mapping whose _target_ is a kvq.codecs.Stage"),
    (["~method.key.quantizer._target_"], "quantizer={.*}: a mapping whose _target_ is a kvq.codecs.Quantizer"),
    (["method.key.order=3"], "a codec has stages .* and an order"),
    (["method.bits_range=[8,2]"], "bits"),
    (["residual.value=${seed}"], "residual.value=0: a group of settings, not a value"),
    (["residual.value=${seed}", "+residual.value.size=3"], "size=3: one of these is a setting of a group that is null"),
    (
        ["method=polarquant", "method.key.quantizer.angle_bits=[4,9]"],
        r"angle_bits=\[4, 9\]: one number of bits per level",
    ),
    (["method=qjl", "method.key.quantizer.ratio=0"], "ratio=0: at least 1"),
    (["method=ott", "method.token_policy.pool=0"], "method.token_policy of ott: pool=0: at least 1"),
    (["method=ott", "residual.size=2"], "method.token_policy.pool=3: below residual.size"),
    (["method=ott", "residual.value.policy=sliding"], "residual: method=ott plans keys and values together"),
    (["method=zipcache", "task.scoring=parallel"], "zipcache chooses tokens .*; use task.scoring=gen"),
    (["method=zipcache", "method.token_policy.recent=2"], "recent=2, random=0.05: shares"),
    (["method=zipcache", "method.key.quantizer.share=1.5"], "share=1.5: of the tokens"),
    (
        ["method=kvquant_plus_plus/tiers", "method.token_policy.decay=1"],
        "method.token_policy of .*/tiers: decay=1: a share, 0 to below",
    ),
    (
        [
            *("method=kvquant_plus_plus/delta_mse", "bits=1"),
            "+method.key.quantizer.codec.quantizer={_target_: kvq.codecs.UniformQuantizer, axis: per_token}",
        ],
        r"method.key of kvquant_plus_plus/delta_mse: deltas diverge: .* error is 3.\d\d at head_dim=128",
    ),
    (["method=kvquant_plus_plus/delta", "bits=1"], "bits=1: kvquant_plus_plus/delta does 2 to 8 bits"),
    (["method=kvquant_plus_plus/attention", "bits=2"], "bits=2: kvquant_plus_plus/attention does 3 to 7 bits"),
    (["+experiment=real/longbench", "task.chat_template=true"], r"chat_template: unknown .*: \+\+task.chat_template="),
    (["task=memory", "method=turboquant_plus"], "task=memory: full_precision_layers of turboquant_plus keeps"),
    (["task=tni", "method=kitty"], "task=tni: sink_tokens of kitty keeps"),
    (["task=error", "method=rtn", "method.bits_by_layer.key=[[2,3],2]"], "bits_by_layer: bits of single heads"),
    (
        ["task=latency", "task.contexts=[99]", "task.regimes=[per_head]", "method=kvquant_plus_plus/huffman"],
        "task.regimes: a codec of",
    ),
    (["residual=sliding", "residual.size=16", "task.scoring=parallel"], "residual.size=16: scoring=parallel has"),
    (["method=h2o", "method.eviction.budget=0"], "method.eviction of h2o: budget=0"),
    (["method=h2o", "method.eviction.budgt=0.5"], "method.eviction.budgt: .*Did you mean 'budget'"),
    (["method=streamingllm", "method.eviction.sinks=9", "method.eviction.budget=9"], "sinks alone are 9 tokens"),
    (["method=snapkv", "task.scoring=generation"], "eviction of snapkv evicts tokens; needs tokens one by one"),
    (["method=h2o/kivi", "method.eviction.when=sometimes"], "when=sometimes: one of prompt, always"),
    (["method.kept_keys.texts=[a b c]"], "method.kept_keys.texts: 'a b c' is [0-9]+ tokens of this model"),
    (["method.kept_keys.text=[a]"], "Did you mean 'texts'"),
    (["method=kvquant/sink", "method.kept_keys.texts=[a]"], "method=kvquant/sink .kept_keys.: sink_tokens of"),
    (["method.kept_keys.texts=[a]", "task=error"], "task=error: kept_keys of kivi keeps keys of chosen tokens; needs"),
    (["method.calibration.tokens=3"], "method.calibration.tokens=3: at least 1 of each of 16 samples"),
    (["method.calibration.split=test"], "method.calibration.split=test: never the text under test"),
    (["method.calibration.dataset=pydocs"], "method.calibration.dataset=pydocs: kivi calibrates nothing"),
    (["method=kvquant", "method.key.quantizer.outliers=0.9"], "outliers=0.9: a share of the entries"),
    (
        ["cache.attention=packed"],
        "cache.attention=packed: task=ppl scores with dense attention; packed is for task=lat",
    ),
    (["task=latency", "cache.attention=packed", "cache.keep_decoded=true"], "cache.keep_decoded=true is for dense"),
    (["task=latency", "task.contexts=[]"], r"task.contexts=\[\]: a list of one or more"),
    (["task=latency", "task.references=[fast]"], "task.references"),
    (["task=latency", "task.regimes=[naive]"], "task.regimes"),
    (["task=latency", "task.regimes=[kept,kept]"], "task.regimes=.*: each once"),
    (
        ["task=latency", "task.contexts=[99]", "task.regimes=[kept]", "method=h2o"],
        "task.regimes: eviction of h2o evicts tokens; needs a past",
    ),
]
REFUSED = [
    (["method=quarot", "model.path=ODD"], "head_dim=44"),
    (["method=quanto", "bits=3"], "bits=3: quanto does 2 or 4 bits"),
    (["method=hqq", "bits=5"], "bits=5: hqq does 1, 2, 3, 4 or 8 bits"),
    (["method=hqq", "bits=4", "residual=sliding"], "residual: hqq has that of transformers' cache"),
    (["residual=none"], "use task.scoring=parallel"),
    (["task.scoring=parallel", "residual.size=0"], "residual.size=0"),
    (["task.context=600", "task.stride=300"], "takes at most 512 tokens"),
    (["model.outliers.key_pairs=99"], "has 64 pairs"),
    (["model.path=nowhere/at/all"], "model.path=nowhere/at/all"),
    (["model.path=./nowhere"], "model.path=./nowhere: no such folder"),
    (["model.path=embedded:tinny"], "Did you mean 'tiny'"),
    (["dataset.path=nowhere.txt"], r"nowhere\.txt"),
    (["dataset.path=FOLDER"], r"the folder holds files of several kinds \(.*\.jsonl.*\.txt\)"),
    (["dataset.path=EMPTY"], "empty"),
    (["dataset.path=HALF"], "row 1 of .* has half of a surrogate pair"),
    (["dataset.path=SHORT"], "fewer than task.context=96"),
    (["dataset=pydocs"], "dataset=pydocs is embedded"),
    (["dataset.path=NO_TEXT", "dataset.text_field=words"], "words"),
    (["model.path=NAN", "method=nsnquant", "bits=2"], "layer 0 keys: NaN or infinite"),
    (["method=kvquant", "bits=5"], "kvquant does 1 to 4 bits"),
    (["method=kvquant", "method.calibration.dataset=null"], "method.calibration.dataset=null: the method needs a text"),
    (["method=kvquant", "method.calibration.dataset=pydoc"], "method.calibration.dataset=pydoc.*Did you mean 'pydocs'"),
    (["method=kvquant", "method.calibration.dataset=longbench"], "longbench: holds items, not text"),
    (["method=kvquant"], "method.calibration.length=2048: .* takes at most 512 tokens"),
    (["method=cq", "method.key.quantizer.channels=5"], "head_dim=128: 5 channels are coupled at a time"),
    (
        ["task=latency", "task.contexts=[99]", "cache.attention=packed", "method=fp8"],
        "cache.attention=packed: codes of Float8Quantizer",
    ),
    (["task=latency", "task.contexts=[511]"], "543 tokens; .* takes at most 512"),
]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with a run that is done, and the overrides of such a run."""
    folder = tmp_path_factory.mktemp("bad")
    overrides = [*small_run(folder), f"results_dir={folder / 'results'}"]
    assert main([*overrides, "method=rtn", "bits=2"]) == 0
    (folder / "empty.txt").write_text("\n \n", encoding="utf-8")
    (folder / "short.txt").write_text("too short", encoding="utf-8")
    (folder / "a_file").write_text("", encoding="utf-8")
    (folder / "half.jsonl").write_text(json.dumps({"text": "a\ud800"}) + "\n", encoding="utf-8")
    (folder / "no_text.jsonl").write_text(json.dumps({"text": "a"}) + "\n", encoding="utf-8")
    save_random_model(folder / "odd", head_dim=44)
    save_random_model(folder / "nan")
    file = folder / "nan" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.self_attn.k_proj.weight"][:] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    (folder / "cycle" / "method").mkdir(parents=True)
    for one, other in (("odd", "even"), ("even", "odd")):
        (folder / "cycle" / "method" / f"{one}.yaml").write_text(f"defaults: [{other}]\n", encoding="utf-8")
    return folder, overrides


def _on_disk(folder: Path) -> dict[str, Record]:
    found, broken = Store(folder / "results").scan()
    assert not broken
    return {record.key: record for record in found}


@pytest.mark.thin(6)
@pytest.mark.parametrize(
    ("change", "says"), [*NAMES, *FORMS, *VALUES, *REFUSED], ids=lambda row: " ".join(row) if type(row) is list else ""
)
def test_one_line_and_nothing_is_lost(
    given: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str], change: list[str], says: str
) -> None:
    folder, overrides = given
    before = _on_disk(folder)
    change = [str(folder / "cycle") if word == "CYCLE" else word for word in change]
    for name in ("EMPTY.txt", "SHORT.txt", "A_FILE", "NO_TEXT.jsonl", "HALF.jsonl", "ODD", "NAN"):
        stem = name.partition(".")[0]
        change = [f"dataset.path={folder}" if word == "dataset.path=FOLDER" else word for word in change]
        change = [re.sub(f"=({stem})$", f"={folder / name.lower()}", word) for word in change]
    changed = {word.partition("=")[0] for word in change}
    kept = [word for word in [*overrides, "method=kivi", "bits=2"] if word.partition("=")[0] not in changed]
    if "task" in changed:  # settings of the task that is no longer run
        kept = [word for word in kept if not word.startswith("task.")]
    capsys.readouterr()
    assert main([*kept, *change]) in (1, 2)
    err = capsys.readouterr().err
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    assert len(err) < 600
    assert re.search(says, err), err
    after = _on_disk(folder)
    assert {key: after[key] for key in before} == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_said(given: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*given[1], "method=kivi", "bits=2", "device=cuda"]) == 1
    assert "no GPU is visible" in capsys.readouterr().err

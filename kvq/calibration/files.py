"""A calibration: the tables of a method for every layer of one model, binding a method to it, and its files.

On disk it is a safetensors file named by a hash of its inputs, and a second file with its cost.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from hydra.utils import get_class
from torch import Tensor

import kvq.codecs
from kvq.cache.files import dump, read_tensors
from kvq.calibration.text import fingerprint_of
from kvq.codecs import Codec, bind_codec, calibrated_parts
from kvq.codecs.quantizers import without_prefix
from kvq.codecs.second_moments import FOLDED
from kvq.config import plugins
from kvq.config.identity import canonical
from kvq.errors import DataError, RecordError, Unsupported, reason_of
from kvq.methods.method import Method
from kvq.methods.policies import Policy
from kvq.models.inputs import Inputs
from kvq.results.files import write_file
from kvq.results.record import versions_of_parts

_LENGTHS = {"32k": 2**15, "1m": 2**20}
"""Sequence lengths for which metrics state the bits of tables, besides the measured length."""
FOLDER = "calibration"
_FORMAT = "kvq-calibration-2"


@dataclass(frozen=True)
class Calibration:
    """Tables by name, `<side>.<layer>.<part>.<table>`, with the method and model that they belong to.

    Attributes:
        method: name of the method.
        model: name of the weights (`kvq.models.weights.weights_name`).
        heads, head_dims: KV heads and their channels, of every layer.
        seconds, peak_bytes: time and peak memory of the calibration; None: not measured.
    """

    tensors: Mapping[str, Tensor]
    method: str
    model: str
    heads: Sequence[int]
    head_dims: Sequence[int]
    seconds: float | None = None
    peak_bytes: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tables, but for those that are part of the model's weights."""
        return sum(tensor.nbytes for name, tensor in self.tensors.items() if f".{FOLDED}" not in name)

    def metrics(self, measured: Mapping[str, float], method: Method) -> dict[str, float]:
        """Size of the tables and cost of the calibration as metrics, separate from the bits stored per token.

        `calibration_bits`: bytes of the tables over the elements of one sequence of the measured length;
        `calibration_bits_32k` and `calibration_bits_1m`: of one of 32,768 and of 1,048,576 tokens.
        `decode_multiplications`: of the method bound to it, per element, where tables are matrices of all heads.
        """
        sized = measured.get("total_bytes") and measured.get("effective_bits")
        found: dict[str, float | None] = {
            "calibration_bytes": self.nbytes,
            "calibration_bits": self.nbytes * measured["effective_bits"] / measured["total_bytes"] if sized else None,
            "calibration_seconds": self.seconds,
            "calibration_peak_bytes": self.peak_bytes,
            "decode_multiplications": self._multiplications(method),
        }
        per_token = 2 * sum(heads * dim for heads, dim in zip(self.heads, self.head_dims, strict=True))
        for name, tokens in _LENGTHS.items():
            found[f"calibration_bits_{name}"] = 8 * self.nbytes / (per_token * tokens) if per_token else None
        return {name: float(value) for name, value in found.items() if value is not None}

    def _multiplications(self, method: Method) -> float | None:
        """Of decoding, per element of the layers and sides that have such tables; None: there are none."""
        total = elements = 0
        for codecs in method.bound.values():
            for layer, (codec, heads, dim) in enumerate(zip(codecs, self.heads, self.head_dims, strict=True)):
                parts = {} if codec is None else calibrated_parts(codec)
                own = [part.multiplications for part in parts.values() if part.multiplications is not None]
                count = heads * dim * (2 if method.joins_sides else 1)
                once = codec is not None and codec.joins_layers and layer  # counted with the first layer
                total, elements = total + (0 if once else sum(own)), elements + count * bool(own)
        return total / elements if elements else None


def bind_tables(method: Method, calibration: Calibration, model: str, head_dims: Sequence[int]) -> Method:
    """The method with the tables of a calibration, which must be of the same model.

    Args:
        model: name of the weights it will run on (`kvq.models.weights.weights_name`).
        head_dims: channels per head of each of its layers.
    """
    whose, count = f"calibration of method={calibration.method}", len(calibration.head_dims)
    if count != len(head_dims):
        raise Unsupported(f"{whose}: of a model with {count} layers, not {len(head_dims)}")
    if list(calibration.head_dims) != list(head_dims):
        own, given = (", ".join(map(str, sorted(set(dims)))) for dims in (calibration.head_dims, head_dims))
        raise Unsupported(f"{whose}: of a model with head_dim={own}, not {given}")
    if calibration.model != model:
        raise Unsupported(
            f"{whose}: of another model (weights {calibration.model[:12]}, given {model[:12]}); calibrate on the model "
            "it is used with"
        )
    bound, shapes = {}, zip(calibration.heads, head_dims, strict=True)
    layers = list(enumerate(shapes))
    for side in ("key", "value"):
        codec = getattr(method, side)
        if codec is None or not calibrated_parts(codec):
            continue
        kept = method.full_precision_indices(side, len(layers))
        codecs: list[Codec | None] = []
        for layer, (heads, dim) in layers:
            if codec.joins_layers:
                if layer:
                    codecs.append(codecs[0])  # one for all
                    continue
                heads = sum(calibration.heads)
            prefix = f"{side}.{layer}."
            tables = without_prefix(calibration.tensors, prefix)
            missing = [part for part in calibrated_parts(codec) if not any(n.startswith(f"{part}.") for n in tables)]
            if missing and layer not in kept:
                raise Unsupported(f"{whose}: has no tables for {prefix}{missing[0]}")
            its_codec = method.codec_of(side, layer) or codec
            held = heads * (2 if method.joins_sides else 1)
            codecs.append(None if layer in kept else bind_codec(its_codec, tables, held, dim))
        bound[side] = codecs
    return dataclasses.replace(method, bound=bound)


def file_of(inputs: Inputs) -> Path:
    """Path of a run's calibration, whether or not the file exists.

    The name includes a hash of the fitting code's statements, so tables of an earlier version are never read.
    """
    kinds = ((name, get_class(one["_target_"])) for name, one in inputs.config.method.policies.items() if one)
    plain = (name for name, kind in kinds if kind.codec is Policy.codec)  # type: ignore[attr-defined]
    outside_codecs = ("sink_tokens", "kept_keys", *plain)  # no table depends on them
    whole = canonical(inputs.config, inputs.model_fingerprint, "", fingerprint_of(inputs))
    method = {name: item for name, item in whole["method"].items() if name not in outside_codecs}
    # Sinks and kept keys do not change the tables, so methods with equal codecs share them.
    outside = {name: kind for name, kind in versions_of_parts(whole["method"]).items() if isinstance(kind, str)}
    model = {name: item for name, item in whole["model"].items() if name != "cache_dtype"}
    decides = {"model": model, "method": method, "code": _fitting_code(), "outside": outside}
    name = hashlib.sha256(f"{_FORMAT}{json.dumps(decides, sort_keys=True, separators=(',', ':'))}".encode()).hexdigest()
    return Path(inputs.config.results_dir) / FOLDER / f"{name}.safetensors"


@functools.cache
def _fitting_code() -> str:
    """SHA-256 (hex) of calibrations, codecs and plugins: their modules' statements, and tables that ship with them."""
    folders = (Path(__file__).parent, Path(kvq.codecs.__path__[0]), *plugins.packages())
    files = [file for folder in folders for file in folder.rglob("*") if "tests" not in file.relative_to(folder).parts]
    written = [statements(file.read_text(encoding="utf-8")).encode() for file in files if file.suffix == ".py"]
    tables = [file.read_bytes() for file in files if file.suffix == ".safetensors"]
    digests = sorted(hashlib.sha256(content).digest() for content in (*written, *tables))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def statements(source: str) -> str:
    """The statements of a module in a fixed form, without comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
    return ast.unparse(tree)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Within the context, a folder that cannot be written is a `RecordError`."""
    try:
        yield
    except OSError as error:
        raise RecordError(f"results_dir: cannot write under '{path.parent}': {reason_of(error)}") from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a calibration, so that one process makes it; the system frees the lock when its holder dies."""
    with _writing(path):
        folder = path.parent / ".locks"
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{path.stem}.lock").acquire()
    with lock:
        yield


def write(path: Path, calibration: Calibration) -> None:
    """Write the tables atomically, and their cost as `<name>.json` in the same folder."""
    about = {
        "format": _FORMAT,
        "method": calibration.method,
        "model": calibration.model,
        "heads": list(calibration.heads),
        "head_dims": list(calibration.head_dims),
    }
    content = dump(calibration.tensors, about)
    cost = {
        "seconds": calibration.seconds,
        "peak_memory_bytes": calibration.peak_bytes,
        "table_bytes": calibration.nbytes,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    with _writing(path):
        write_file(path.with_suffix(".json"), (json.dumps(about | cost, sort_keys=True, indent=1) + "\n").encode())
        write_file(path, content)


def read(path: str | Path) -> Calibration:
    """The calibration in a file."""
    path = Path(path)
    about, tensors = read_tensors(path, "calibration", _FORMAT)
    if missing := [name for name in ("method", "model", "heads", "head_dims") if name not in about]:
        raise DataError(f"calibration {path}: cannot be read (without {missing[0]})")
    cost: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        cost = {"seconds": found["seconds"], "peak_bytes": found["peak_memory_bytes"]}
    return Calibration(tensors, about["method"], about["model"], about["heads"], about["head_dims"], **cost)

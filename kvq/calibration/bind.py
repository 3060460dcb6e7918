"""A calibration: the tables of a method for every layer of one model, and binding a method to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvq.codecs import bind_codec, calibrated_parts
from kvq.errors import Unsupported
from kvq.methods.method import Method

_LENGTHS = {"32k": 2**15, "1m": 2**20}
"""Sequence lengths for which metrics state the bits of tables, besides the measured length."""


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
        """Bytes of all tables."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def metrics(self, measured: Mapping[str, float]) -> dict[str, float]:
        """Size of the tables and cost of the calibration as metrics, separate from the bits stored per token.

        `calibration_bits`: bytes of the tables over the elements of one sequence of the measured length;
        `calibration_bits_32k` and `calibration_bits_1m`: of one of 32,768 and of 1,048,576 tokens.
        """
        found: dict[str, float | None] = {
            "calibration_bytes": self.nbytes,
            "calibration_bits": None,
            "calibration_seconds": self.seconds,
            "calibration_peak_bytes": self.peak_bytes,
        }
        if measured.get("total_bytes") and measured.get("effective_bits"):
            found["calibration_bits"] = self.nbytes * measured["effective_bits"] / measured["total_bytes"]
        per_token = 2 * sum(heads * dim for heads, dim in zip(self.heads, self.head_dims, strict=True))
        for name, tokens in _LENGTHS.items():
            found[f"calibration_bits_{name}"] = 8 * self.nbytes / (per_token * tokens) if per_token else None
        return {name: float(value) for name, value in found.items() if value is not None}


def bind(method: Method, calibration: Calibration, model: str, head_dims: Sequence[int]) -> Method:
    """The method with the tables of a calibration, which must be of the same model.

    Args:
        model: name of the weights it will run on (`kvq.models.weights.weights_name`).
        head_dims: channels per head of each of its layers.

    Raises:
        Unsupported: a calibration of other weights, of another number of layers or other head dims, or one without
            tables that the method needs.
    """
    if len(calibration.head_dims) != len(head_dims):
        count = len(calibration.head_dims)
        raise Unsupported(
            f"calibration of method={calibration.method}: of a model with {count} layers, not {len(head_dims)}"
        )
    if list(calibration.head_dims) != list(head_dims):
        own, given = (", ".join(map(str, sorted(set(dims)))) for dims in (calibration.head_dims, head_dims))
        raise Unsupported(f"calibration of method={calibration.method}: of a model with head_dim={own}, not {given}")
    if calibration.model != model:
        raise Unsupported(
            f"calibration of method={calibration.method}: of another model (weights {calibration.model[:12]}, given "
            f"{model[:12]}); calibrate on the model it is used with"
        )
    bound, shapes = {}, zip(calibration.heads, head_dims, strict=True)
    layers = list(enumerate(shapes))
    for side in ("key", "value"):
        codec = getattr(method, side)
        if codec is None or not calibrated_parts(codec):
            continue
        kept = method.whole_layers(side, len(layers))
        codecs = []
        for layer, (heads, dim) in layers:
            prefix = f"{side}.{layer}."
            tables = {
                name[len(prefix) :]: table for name, table in calibration.tensors.items() if name.startswith(prefix)
            }
            missing = [part for part in calibrated_parts(codec) if not any(n.startswith(f"{part}.") for n in tables)]
            if missing and layer not in kept:
                raise Unsupported(f"calibration of method={calibration.method}: has no tables for {prefix}{missing[0]}")
            its_codec = method.codec_of(side, layer) or codec
            codecs.append(None if layer in kept else bind_codec(its_codec, tables, heads, dim))
        bound[side] = codecs
    return dataclasses.replace(method, bound=bound)

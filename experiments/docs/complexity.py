"""Operations per element of methods, in closed form, in docs/methods.md: `python experiments/docs/complexity.py`.

A place is `<!-- complexity: oscar kivi at 2 -->` to `<!-- end -->`: methods and the bits of their codes. Counted are
the additions, multiplications, divisions, comparisons, roundings and look-ups of an element (a channel of a token), as
the formulas are written, whatever a kernel shares or leaves out; what is done once per token or per group is not. They
follow from the stages of a method's configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.docs.places import ROOT, fill
from kvq.config import compose, resolve
from kvq.report.tables.formats import markdown_table

PAGE = ROOT / "docs" / "methods.md"
WORDS = re.compile(r"([\w ]+) at (\d)")
HEAD_DIM_LOG = 7
"""Of 128 channels, for the numbers beside the formulas."""
CODEWORDS, CHANNELS = 256, 8
TITLES = ("method", "keys, encoded", "keys, decoded", "values, encoded", "values, decoded", "fitted to a text")


class Cost(NamedTuple):
    """`logs` times log2 of the channels of a head, plus `more`."""

    logs: int = 0
    more: int = 0

    def plus(self, other: Cost) -> Cost:
        """The sum."""
        return Cost(self.logs + other.logs, self.more + other.more)

    @property
    def text(self) -> str:
        """The formula, and its number for 128 channels where that is another."""
        logs = {0: "", 1: "log₂ D"}.get(self.logs, f"{self.logs} log₂ D")
        words = " + ".join(filter(None, [logs, str(self.more) if self.more or not logs else ""]))
        return f"{words} = {self.logs * HEAD_DIM_LOG + self.more}" if self.logs else words


def of_stage(stage: Mapping[str, Any]) -> tuple[Cost, Cost]:
    """What a stage does to an element when encoding, and when decoding.

    Raises:
        SystemExit: a stage of which nothing is known here.
    """
    name = stage["_target_"].rpartition(".")[2]
    known = {
        "Hadamard": (Cost(1, 1), Cost(1, 1)),  # a fast transform's additions, and the factor D^-1/2
        "RandomizedHadamard": (Cost(1, 2), Cost(1, 2)),  # and a sign
        "TokenNorm": (Cost(0, 3), Cost(0, 1)),  # square, sum, divide; multiply
        "ChannelShift": (Cost(0, 2), Cost(0, 1)),  # sum, subtract; add
        "UndoRope": (Cost(0, 3), Cost(0, 3)),  # two products and their sum
        "ApplyRope": (Cost(0, 3), Cost(0, 3)),
        "ChannelOrder": (Cost(), Cost()),
    }
    if name == "GroupedHadamard":  # a transform over the channels of several heads
        joined = int(stage["heads"]).bit_length() - 1
        return Cost(1, 1 + joined), Cost(1, 1 + joined)
    if name not in known:
        raise SystemExit(f"complexity: {name}: a stage without a count")
    return known[name]


def of_quantizer(quantizer: Mapping[str, Any], bits: int) -> tuple[Cost, Cost]:
    """What a quantizer does to an element when encoding, and when decoding.

    Raises:
        SystemExit: a quantizer of which nothing is known here.
    """
    name = quantizer["_target_"].rpartition(".")[2]
    if name in ("UniformQuantizer", "ClippedQuantizer"):
        # Least, largest, subtract, divide, round; where the range is clipped, codes are held within it on both sides.
        clips = name == "ClippedQuantizer" or float(quantizer.get("clip", 1)) != 1
        encode, decode = 5 + 2 * clips, 2
    elif name == "LloydMaxQuantizer":  # halving the thresholds; a look-up
        encode, decode = bits, 1
    elif name == "VectorQuantizer":
        # Products with every codeword, their sums, and a comparison; at 2 bits a magnitude and a sign beside it.
        search = CODEWORDS * (2 * CHANNELS + 1) // CHANNELS
        encode, decode = search + 2 * (bits == 2), 1 + (bits == 2)
    else:
        raise SystemExit(f"complexity: {name}: a quantizer without a count")
    # Two sums of products to fit a stored gain, which multiplies; a unit gain is found and applied in decoding.
    gain = {"none": (0, 0), "unit": (0, 3)}.get(str(quantizer.get("gain", "none")), (4, 1))
    return Cost(0, encode + gain[0]), Cost(0, decode + gain[1])


def of_codec(codec: Mapping[str, Any], bits: int) -> tuple[Cost, Cost]:
    """Encoding and decoding of an element by a whole chain."""
    stages = [codec["stages"][name] for name in codec["order"] if codec["stages"][name] is not None]
    encode, decode = of_quantizer(codec["quantizer"], bits)
    for one, back in map(of_stage, stages):
        encode, decode = encode.plus(one), decode.plus(back)
    return encode, decode


def table(words: str) -> str:
    """The rows of a place's methods as a Markdown table.

    Raises:
        SystemExit: words of another form, or a part of a method without a count.
    """
    given = WORDS.fullmatch(words)
    if given is None:
        raise SystemExit(f"complexity: {words}: methods, then 'at' and their bits")
    bits, rows = int(given[2]), []
    for name in given[1].split():
        method = resolve(compose([f"method={name}", f"bits={bits}"])).method
        costs = [cost.text for side in ("key", "value") for cost in of_codec(getattr(method, side), bits)]
        rows.append([f"`{name}`", *costs, "yes" if method.calibration.dataset else "no"])
    return "\n".join(markdown_table(TITLES, rows)) + "\n"


if __name__ == "__main__":
    fill(PAGE, "complexity", table)

"""What the zoo's parts refuse, each in one line that names the setting: a table of data."""

import pytest

import kvq
from kvq.codecs import UniformQuantizer
from kvq.errors import KvqError
from kvq_zoo.balance import VarianceBalance
from kvq_zoo.gear import SparseLowRank
from kvq_zoo.geometric import PolarQuantizer
from kvq_zoo.grids import EngineFloat8Quantizer, EngineUniformQuantizer, NormalQuantizer
from kvq_zoo.octave import LeadingChannels, RmsLevelsQuantizer
from kvq_zoo.qjl import SketchQuantizer
from kvq_zoo.serving import LayerScale

UNIFORM = UniformQuantizer(2, "per_token")

WRONG = {
    "divisor=0: above 0": lambda: LayerScale(divisor=0),
    "marginal=gaussian: one of normal, trapezoid": lambda: NormalQuantizer(2, marginal="gaussian"),
    "levels=full: of a symmetric grid": lambda: EngineUniformQuantizer(4, "per_token", levels="full"),
    "fixed_scale=1.0: of a symmetric grid": lambda: EngineUniformQuantizer(4, "per_token", fixed_scale=1.0),
    "zero_point=code: with scale_dtype": lambda: EngineUniformQuantizer(4, "per_token", zero_point="code"),
    "group_size=64: at least 1, with scale=token": lambda: EngineFloat8Quantizer(scale="none", group_size=64),
    "per_rms=0: above 0": lambda: RmsLevelsQuantizer(levels=[-1, 1], per_rms=0),
    "first=0: at least 1": lambda: LeadingChannels(first=0, high=None, low=None),
    "first=64: head_dim=64 leaves no other": lambda: kvq.build_method("engine/vllm_octave_k3v4", head_dim=64),
    "kept=per_head: one of per_channel, per_token": lambda: VarianceBalance("per_head"),
    "iterations=-1: at least 0": lambda: VarianceBalance("per_token", -1),
    "imbalance=std: one of deviation, variance": lambda: VarianceBalance("per_token", imbalance="std"),
    "sparsity=1.0": lambda: SparseLowRank(UNIFORM, sparsity=1.0),
    "rank=-1": lambda: SparseLowRank(UNIFORM, rank=-1),
    "buffer=-1": lambda: SparseLowRank(UNIFORM, buffer=-1),
    "iterations=0": lambda: SparseLowRank(UNIFORM, iterations=0),
    r"angle_bits=\[4, 9\]": lambda: PolarQuantizer([4, 9]),
    r"angle_bits=\[\]": lambda: PolarQuantizer([]),
    "head_dim=24: 4 levels take 16 channels": lambda: kvq.build_method("polarquant", head_dim=24),
    "ratio=0: at least 1": lambda: SketchQuantizer(ratio=0),
    "outlier_ratio=0: at least 1": lambda: SketchQuantizer(outlier_ratio=0),
    "outliers=-1": lambda: SketchQuantizer(outliers=-1),
    r"outlier_ratio=3: at most ratio \(2\) where shared_rows=true": lambda: SketchQuantizer(ratio=2, outlier_ratio=3),
    "outliers=8: .*leaves no other channels": lambda: SketchQuantizer(outliers=8).check(8),
    "one byte": lambda: SketchQuantizer().check(512),
}


@pytest.mark.parametrize(("says", "make"), WRONG.items())
def test_one_line_names_the_setting(says, make):
    with pytest.raises(KvqError, match=says) as caught:
        make()
    assert "\n" not in str(caught.value)

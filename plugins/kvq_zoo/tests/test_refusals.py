"""What the zoo's parts refuse, each in one line that names the setting: a table of data."""

import pytest

from kvq.errors import ConfigError
from kvq_zoo.balance import VarianceBalance
from kvq_zoo.octave import LeadingChannels, RmsLevelsQuantizer
from kvq_zoo.serving import LayerScale

WRONG = {
    "divisor=0: above 0": lambda: LayerScale(divisor=0),
    "per_rms=0: above 0": lambda: RmsLevelsQuantizer(levels=[-1, 1], per_rms=0),
    "first=0: at least 1": lambda: LeadingChannels(first=0, high=None, low=None),
    "kept=per_head: one of per_channel, per_token": lambda: VarianceBalance("per_head"),
    "iterations=-1: at least 0": lambda: VarianceBalance("per_token", -1),
    "imbalance=std: one of deviation, variance": lambda: VarianceBalance("per_token", imbalance="std"),
}


@pytest.mark.parametrize(("says", "make"), WRONG.items())
def test_one_line_names_the_setting(says, make):
    with pytest.raises(ConfigError, match=says) as caught:
        make()
    assert "\n" not in str(caught.value)

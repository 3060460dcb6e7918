"""The method's default residual under a run's override."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.config.residual import Policy, PrefillBlock, ResidualConfig, ResidualSideConfig, effective_residual
from kvq.errors import ConfigError

DEFAULT = ResidualConfig(policy=Policy.block, size=128, prefill_block=PrefillBlock.whole)
POLICIES, SIZES = st.sampled_from([None, *Policy]), st.sampled_from([None, 1, 64])
SIDES = st.builds(ResidualSideConfig, policy=POLICIES, size=SIZES)
CONFIGS = st.builds(ResidualConfig, policy=POLICIES, size=SIZES, key=SIDES, value=SIDES)


def test_no_override_is_the_default():
    residual = effective_residual(DEFAULT, ResidualConfig())
    assert residual.key == residual.value
    assert (residual.key.policy, residual.key.size, residual.key.prefill_block) == ("block", 128, "whole")


@given(CONFIGS)
def test_the_nearest_setting_wins(override):
    residual = effective_residual(DEFAULT, override)
    for side in ("key", "value"):
        own, effective = getattr(override, side), getattr(residual, side)
        assert effective.policy == (own.policy or override.policy or DEFAULT.policy)
        assert effective.size == (own.size or override.size or DEFAULT.size)
        assert effective.prefill_block == PrefillBlock.whole


def test_a_side_of_the_default_wins_over_its_common_setting_but_not_over_an_override():
    default = ResidualConfig(policy=Policy.block, size=128, value=ResidualSideConfig(size=32))
    assert effective_residual(default, ResidualConfig()).value.size == 32
    assert effective_residual(default, ResidualConfig()).key.size == 128
    assert effective_residual(default, ResidualConfig(size=64)).value.size == 64


@pytest.mark.parametrize(
    ("default", "override", "setting"),
    [
        (ResidualConfig(size=4), ResidualConfig(), "residual.policy"),
        (ResidualConfig(policy=Policy.none), ResidualConfig(), "residual.size=null"),
        (DEFAULT, ResidualConfig(policy=Policy.none, size=0), "residual.size=0"),
        (DEFAULT, ResidualConfig(size=-1), "residual.size=-1"),
        (DEFAULT, ResidualConfig(value=ResidualSideConfig(size=-3)), r"residual.size=-3 \(values\)"),
    ],
)
def test_what_is_missing_or_out_of_range(default, override, setting):
    with pytest.raises(ConfigError, match=setting):
        effective_residual(default, override)


def test_no_residual_under_block_quantizes_everything_as_it_comes() -> None:
    assert effective_residual(DEFAULT, ResidualConfig(size=0)).key.size == 0


def test_nothing_is_kept_under_sliding_of_size_0() -> None:
    residual = effective_residual(DEFAULT, ResidualConfig(policy=Policy.sliding, size=0))
    assert residual.key.keeps_nothing
    assert residual.for_parallel_scoring() == residual
    assert not effective_residual(DEFAULT, ResidualConfig(size=0)).key.keeps_nothing


def test_at_once_keeps_the_blocks() -> None:
    residual = effective_residual(DEFAULT, ResidualConfig(value=ResidualSideConfig(size=32))).for_parallel_scoring()
    assert {residual.key.policy, residual.value.policy} == {Policy.none}
    assert (residual.key.size, residual.value.size) == (128, 32)
    assert residual.key.prefill_block is PrefillBlock.whole

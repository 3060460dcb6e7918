"""Bytes of states of fixed size by a model's configuration, without weights: those that transformers' layers allocate.

A layer keeps the last inputs of a short convolution and, unless it is nothing but a convolution, a recurrent state: of
gated linear attention a matrix of keys by values for each head, of Mamba one of `d_state` numbers for each channel.
"""

from __future__ import annotations

from typing import Any

from kvq.errors import Unsupported
from kvq.models.layers import state_layers_of


def state_bytes_of(config: Any) -> int:
    """Bytes of the states of all layers and one sequence in a model of 16 bits, whose recurrent states are in fp32.

    Args:
        config: a transformers text configuration.

    Raises:
        Unsupported: states that the configuration does not give in a known form.
    """
    layers = state_layers_of(config)
    if not layers:
        return 0
    for sizes in (_gated_attention, _latent_hybrid, _convolution, _mamba):
        try:
            convolved, recurrent = sizes(config)
        except (AttributeError, TypeError):
            continue
        return len(layers) * (2 * convolved + 4 * recurrent)
    raise Unsupported(f"model: {type(config).__name__} does not say how large its states are, in a form that kvq knows")


Sizes = tuple[int, int]
"""Numbers of the convolution and of the recurrent state of one layer."""


def _gated_attention(config: Any) -> Sizes:
    """Qwen3-Next, Qwen3.5, OLMo Hybrid."""
    dim = config.linear_key_head_dim
    keys, values = config.linear_num_key_heads * dim, config.linear_num_value_heads * config.linear_value_head_dim
    return (2 * keys + values) * config.linear_conv_kernel_dim, values * dim


def _latent_hybrid(config: Any) -> Sizes:
    """Kimi Linear."""
    heads, dim = config.linear_num_heads, config.linear_head_dim
    return 3 * heads * dim * config.linear_conv_kernel_dim, heads * dim * dim


def _convolution(config: Any) -> Sizes:
    """LFM2."""
    return config.hidden_size * config.conv_L_cache, 0


def _mamba(config: Any) -> Sizes:
    """Mamba 2 (Bamba, Falcon-H1, Granite 4, Nemotron-H, Zamba 2), whose names differ, and Mamba 1 (Jamba)."""
    state = _first(config, "mamba_d_state", "ssm_state_size")
    if (inner := getattr(config, "mamba_d_ssm", None)) is None:
        heads, dim = (getattr(config, name, None) for name in ("mamba_num_heads", "mamba_head_dim"))
        inner = heads * dim if heads and dim else int(config.mamba_expand * config.hidden_size)
    groups = 0 if hasattr(config, "mamba_dt_rank") else _first(config, "mamba_n_groups", "mamba_ngroups", "n_groups")
    convolved = (inner + 2 * groups * state) * _first(config, "mamba_d_conv", "conv_kernel")
    return convolved, inner * state


def _first(config: Any, *names: str) -> int:
    """The setting of the first of these names that the configuration has. Raises: AttributeError: it has none."""
    for name in names[:-1]:
        if (found := getattr(config, name, None)) is not None:
            return int(found)
    return int(getattr(config, names[-1]))

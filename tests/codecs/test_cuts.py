"""What is stored of a token does not depend on how many tokens are encoded with it, also where a sum cancels to 0."""

import pytest
import torch

from kvq.codecs import LloydMaxQuantizer
from kvq.codecs.packed import unpack_parts
from kvq.codecs.rotations import per_block
from tests.cache.states import nearest_bits
from tests.calibrated import build

# One of each way to turn rotated states into codes, token by token.
ROTATED = [
    *("turboquant/hadamard", "turboquant/prod_keys", "kvquant_plus_plus", "nsnquant", "oscar", "kivi_had", "quarot"),
    *("rotatekv", "polarquant/hadamard", "engine/llamacpp_q4_0", "engine/llamacpp_q4_1", "engine/exllama3_4"),
    *("engine/lmdeploy_42", "engine/vllm_turboquant_3bit_nc", "engine/vllm_int4_per_token_head"),
]
GENERATOR = torch.Generator().manual_seed(4)
FITTED = torch.randn(1, 2, 128, 128, generator=GENERATOR)
# Small whole numbers: one rotated coordinate in fifty is 0 but for rounding.
STATES = torch.randint(-3, 4, (1, 2, 64, 128), generator=GENERATOR).bfloat16()


@pytest.mark.parametrize("name", ROTATED)
def test_tokens_alone_are_as_tokens_together(name):
    method = build(name, FITTED, nearest_bits(name))
    codecs = [codec for codec in (method.key, method.value) if codec.token_group == 1 and not codec.uses_rope]
    for codec in codecs:
        whole = codec.decode(codec.encode(STATES))[:, :, :12]
        for size in (1, 2, 3):
            cut = [codec.decode(codec.encode(piece)) for piece in STATES[:, :, :12].split(size, 2)]
            assert torch.equal(torch.cat(cut, 2), whole), size


def test_a_product_of_few_rows_is_that_of_many():
    matrix = torch.linalg.qr(torch.randn(128, 128, generator=GENERATOR))[0]
    whole = per_block(FITTED, matrix)
    for rows in range(1, 12):
        assert torch.equal(per_block(FITTED[:, :, :rows], matrix), whole[:, :, :rows])


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_tie_but_for_rounding_goes_up(bits):
    """Of 16-bit states only: a rounding of a sum is far below their precision, and far above that of fp32 states'."""
    quantizer = LloydMaxQuantizer(bits)
    levels = quantizer.levels(128, torch.float32)
    middles = (levels[1:] + levels[:-1]) / 2
    middles[len(middles) // 2] = 0
    x = torch.zeros(1, 128)
    x[0, : len(middles)] = middles
    for dtype, below, step in (
        (torch.bfloat16, 1e-7, 1),
        (torch.float16, 1e-7, 1),
        (torch.float32, 1e-7, 0),
        (torch.bfloat16, 1e-5, 0),
    ):
        codes = unpack_parts(quantizer.encode(x - below, dtype), bits, 1)[0, : len(middles)]
        assert codes.tolist() == [at + step for at in range(len(middles))], (dtype, below)

"""Run in a process of its own with TRITON_INTERPRET=1, before which triton must not be imported."""

import torch

from kvq.codecs import trellis
from kvq.codecs.trellis import FRONT, Layout, books
from kvq_kernels import encode_gpu


def strings_of(x, weights, layout, memory):
    """As `trellis.encode` on a GPU, whatever device the states are on."""
    return trellis.write(encode_gpu.codes_of(x, layout.widths, weights, books(memory, torch.float32, x.device)), layout)


def searched(memory, widths, rows):
    """The string that the codec finds, also of values that are far away, and of components that cost nothing."""
    generator = torch.Generator().manual_seed(memory)
    layout = Layout(tuple(widths))
    x = torch.randn(rows, len(widths), generator=generator)
    x[0] *= 20
    weights = torch.rand(len(widths), generator=generator)
    weights[3] = 0
    expected = trellis.encode(x, weights, layout, memory)
    found = strings_of(x, weights, layout, memory)
    levels = [trellis.decode(one, layout, memory, torch.float64) for one in (found, expected)]
    errors = [((x.double() - one).square() * weights.double()).sum(-1) for one in levels]
    torch.testing.assert_close(*errors, rtol=1e-6, atol=0)
    same = float((found == expected).all(-1).double().mean())
    print("searched", memory, f"{same:.3f} of rows are equal")
    assert same == 1


def read(memory, widths):
    """The levels that the codec reads: of a trellis, and of numbers by themselves."""
    layout = Layout(tuple(widths))
    strings = torch.randint(0, 256, (5, layout.nbytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for lengths in ([memory] * len(widths), widths):
        table = books(memory, torch.float32, strings.device)
        padded = torch.nn.functional.pad(strings, (FRONT, trellis.BACK))
        first, book = trellis.entries_of(layout, table)
        found = encode_gpu.values_of(padded, *trellis.places(layout, tuple(lengths)), first, book)
        expected = trellis.levels_of(trellis.read(strings, layout, lengths), layout.widths, table)
        assert torch.equal(found, expected)
    print("read", memory, len(widths))


if __name__ == "__main__":
    for bits in (6, 8, 10):
        drawn = torch.randint(0, min(bits, 8) + 1, (30,), generator=torch.Generator().manual_seed(bits)).tolist()
        searched(bits, [*drawn, *range(min(bits, 8) + 1)], 3)
        read(bits, drawn * 20)

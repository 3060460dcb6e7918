"""`make codebooks`: build the vector codebooks that kvq ships, from synthetic standard normal data alone.

k-means on a fixed sample; then, on fresh draws throughout, Lloyd's iteration and tuning for the cosine between whole
tokens and what is read back for them: gradients reach the codewords through the lookup, not through the choice of
codeword. The shipped `finetuned` codebooks have entries of 4 bits (an integer times one fp16 step). Rounding happens
within the tuning: first in its forward pass, then by single steps of single entries, taken where they raise the cosine.

    python experiments/models/codebooks.py [--steps 1500] [--out kvq/codecs/gaussian8.safetensors]

About 10 minutes on one CPU core. Other versions of torch give other last digits, so a rebuilt file has another SHA-256;
where the shipped file is replaced, so is the hash that `kvq.codecs.vector` names.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from pathlib import Path

import torch
from safetensors.torch import save
from sklearn.cluster import KMeans
from torch import Tensor

from kvq.codecs import vector
from kvq.codecs.vector import DIM, FILE, SIZE, Codebook, PlainCodebook, SignedCodebook

TOKEN = 128  # channels over which the cosine is taken
BATCH = 4096  # tokens per step
RATE = 3e-3
CLIP = 0.85  # the grid ends below the largest tuned entry: finer steps for all are worth more than a few far entries
SWEEPS = 3
FOLDS = 4
SEED = 20250518


def book(entries: Tensor, bits: int) -> Codebook:
    """The codebook these entries are: 1 bit plain, 2 bits with free signs."""
    return (PlainCodebook if bits == 1 else SignedCodebook)(entries)


def draw(count: int, generator: torch.Generator) -> Tensor:
    """`count` fresh sub-vectors, as one group."""
    return torch.randn(1, count, DIM, generator=generator)


def kmeans(bits: int, generator: torch.Generator, count: int = 150_000) -> Tensor:
    """k-means++ and Lloyd's iteration on one sample, as a library does it."""
    points = draw(count, generator)[0]
    points = points if bits == 1 else points.abs()
    means = KMeans(SIZE, n_init=1, max_iter=100, random_state=SEED).fit(points.numpy()).cluster_centers_
    return torch.from_numpy(means).float()


def settle(entries: Tensor, bits: int, generator: torch.Generator, rounds: int = 60, count: int = 2**18) -> Tensor:
    """Lloyd's iteration on fresh draws each round; the last third of the rounds is averaged."""
    mean = torch.zeros(SIZE, DIM)
    for number in range(rounds):
        vectors = draw(count, generator)
        index = book(entries, bits).search(vectors)[0].flatten().long()
        points = (vectors if bits == 1 else vectors.abs()).flatten(0, 1)
        hits = torch.zeros(SIZE).index_add_(0, index, torch.ones(count))
        entries = torch.zeros(SIZE, DIM).index_add_(0, index, points) / hits.clamp_min(1)[:, None]
        used = number - rounds * 2 // 3
        if used >= 0:
            mean += (entries - mean) / (used + 1)
    return mean


def top_of(bits: int) -> int:
    """Largest 4-bit integer: unsigned beside free signs, else signed."""
    return 15 if bits == 2 else 7


def rounded(entries: Tensor, bits: int, step: Tensor) -> Tensor:
    """Entries as integers of the grid."""
    top = top_of(bits)
    return (entries / step.float()).round().clamp(0 if bits == 2 else -top, top)


def tune(start: Tensor, bits: int, steps: int, generator: torch.Generator, step: Tensor | None = None) -> Tensor:
    """Adam on 1 - cosine, over fresh tokens at every step; with `step` the forward pass sees entries on that grid.

    The grid stays what it was at the start: the cosine does not see a scale, so nothing else would hold it.
    """
    entries = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([entries], lr=RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        seen = entries.detach()
        if step is not None:
            seen = rounded(seen, bits, step) * step.float()
        vectors = draw(BATCH * TOKEN // DIM, generator)
        index = book(seen, bits).search(vectors)[0].flatten().long()
        points = (seen + (entries - entries.detach()))[index]  # rounding passes gradients on
        target = vectors[0] if bits == 1 else vectors[0].abs()
        cosine = torch.cosine_similarity(points.view(BATCH, TOKEN), target.view(BATCH, TOKEN), dim=1)
        drift = (points * points).sum() / (points * target).sum() - 1
        optimizer.zero_grad()
        (1 - cosine.mean() + drift**2).backward()
        optimizer.step()
        schedule.step()
        if bits == 2:
            entries.data.clamp_(min=0)
    return entries.detach()


class Moves:
    """Single steps of single 4-bit entries, compared by Σ x·y / √Σ |y|² (a long token's cosine) on `FOLDS` samples."""

    def __init__(self, codes: Tensor, bits: int, step: Tensor, generator: torch.Generator, count: int = 2**18) -> None:
        self.codes, self.step = codes.clone(), float(step)
        self.low, self.high = (0 if bits == 2 else -top_of(bits)), top_of(bits)
        points = draw(count, generator)[0]
        self.points = points if bits == 1 else points.abs()
        self.best, self.index = self._two_nearest(self.points)

    def _two_nearest(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Scores x·c - |c|²/2 and numbers of the best two codewords."""
        entries = self.codes * self.step
        bias = entries.square().sum(1) / -2
        found = [torch.addmm(bias, part, entries.T).topk(2) for part in points.split(4096)]
        return torch.cat([values for values, _ in found]), torch.cat([numbers for _, numbers in found])

    def sweep(self) -> int:
        """Try all steps of every codeword; how many codewords moved."""
        return sum(self._improve(number) for number in range(SIZE))

    def _improve(self, number: int) -> bool:
        """Take the best step of one codeword that helps on every sample."""
        steps = torch.cat([torch.zeros(1, DIM), torch.eye(DIM), -torch.eye(DIM)])
        tried = self.codes[number] + steps
        tried = tried[((tried >= self.low) & (tried <= self.high)).all(1)]
        norms = (tried * self.step).square().sum(1)
        scores = torch.addmm(norms / -2, self.points, (tried * self.step).T)
        mine = self.index[:, 0] == number
        other = torch.where(mine, self.best[:, 1], self.best[:, 0])
        rival = torch.where(mine, self.index[:, 1], self.index[:, 0])
        rival_norm = (self.codes * self.step).square().sum(1)[rival, None]
        wins = scores > other[:, None]
        product = torch.where(wins, scores + norms / 2, other[:, None] + rival_norm / 2)
        energy = torch.where(wins, norms, rival_norm)
        product, energy = (t.view(FOLDS, -1, len(tried)).sum(1, dtype=torch.float64) for t in (product, energy))
        gain = product / energy.sqrt()
        gain = gain - gain[:, :1]
        chosen = int(gain.mean(0).argmax())
        if not bool((gain[:, chosen] > 0).all()):
            return False
        self.codes[number] = tried[chosen]
        touched = (self.index == number).any(1) | (scores[:, chosen] > self.best[:, 1])
        self.best[touched], self.index[touched] = self._two_nearest(self.points[touched])
        return True


def quality(entries: Tensor, bits: int, tokens: int = 16384) -> tuple[float, float]:
    """Relative MSE and mean cosine over fresh tokens, from a stream of its own."""
    generator = torch.Generator().manual_seed(SEED + 1)
    vectors = draw(tokens * TOKEN // DIM, generator)
    chosen = book(entries, bits)
    x, y = vectors.view(tokens, TOKEN), chosen.lookup(chosen.search(vectors)).view(tokens, TOKEN)
    return float((x - y).square().sum() / x.square().sum()), float(torch.cosine_similarity(x, y, dim=1).mean())


def in_four_bits(tuned: Tensor, bits: int, steps: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Integers and their step: tuned with rounding in the forward pass, then entry by entry."""
    step = (CLIP * tuned.abs().max() / top_of(bits)).half()
    codes = rounded(tune(tuned, bits, steps, generator, step), bits, step)
    for _ in range(SWEEPS):
        moves = Moves(codes, bits, step, generator)
        moves.sweep()
        codes = moves.codes
    return codes, step


def build(steps: int) -> dict[str, Tensor]:
    """All shipped tensors."""
    tensors: dict[str, Tensor] = {}
    for bits in (1, 2):
        generator = torch.Generator().manual_seed(SEED + 10 * bits)
        start = kmeans(bits, generator)
        tuned = tune(settle(start, bits, generator), bits, steps, generator)
        codes, step = in_four_bits(tuned, bits, steps // 2, generator)
        tensors |= {
            f"kmeans_{bits}b": start.half(),
            f"finetuned_fp16_{bits}b": tuned.half(),
            f"finetuned_{bits}b": codes.to(torch.int8),
            f"finetuned_{bits}b.step": step,
        }
        for name, entries in (("kmeans", start), ("finetuned_fp16", tuned), ("finetuned", codes * step.float())):
            error, cosine = quality(entries, bits)
            print(f"{name:<16}{bits} bit  relative MSE {error:.5f}  cosine {cosine:.5f}", flush=True)
    return tensors


def main() -> None:
    """Build, write, and name the file's hash in `kvq.codecs.vector`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="Adam steps of each tuning (default 1500)")
    parser.add_argument("--out", type=Path, default=FILE, help="where the codebooks go")
    args = parser.parse_args()
    data = save(build(args.steps), metadata={"seed": str(SEED), "steps": str(args.steps)})
    args.out.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    print(f"wrote {args.out}: {len(data)} bytes, SHA-256 {digest}")
    if args.out.resolve() == FILE.resolve():
        module = Path(vector.__file__)
        named = re.sub(r'^FILE_SHA256 = ".*"$', f'FILE_SHA256 = "{digest}"', module.read_text("utf-8"), flags=re.M)
        module.write_text(named, "utf-8")


if __name__ == "__main__":
    main()

"""The script behind `make codebooks`, on little data: each step does what it is there for."""

import pytest
import torch

from experiments.models import codebooks as script
from kvq.codecs import vector


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module", params=[1, 2])
def start(request):
    return request.param, script.kmeans(request.param, generator(), count=8000)


def cosine(entries, bits):
    return script.quality(entries, bits, tokens=1024)[1]


def test_fresh_draws_mend_k_means_on_few_points(start):
    bits, entries = start
    assert (
        cosine(script.settle(entries, bits, generator(1), rounds=6, count=2**15), bits) > cosine(entries, bits) + 0.001
    )


def test_tuning_raises_the_cosine(start, monkeypatch):
    bits, entries = start
    monkeypatch.setattr(script, "BATCH", 512)
    tuned = script.tune(entries, bits, 60, generator(2))
    assert cosine(tuned, bits) > cosine(entries, bits) + 0.0005
    assert bits == 1 or bool((tuned >= 0).all())


def test_single_steps_raise_the_cosine_of_rounded_entries(start):
    bits, entries = start
    step = (script.CLIP * entries.abs().max() / script.top_of(bits)).half()
    codes = script.rounded(entries, bits, step)
    moves = script.Moves(codes, bits, step, generator(3), count=2**14)
    assert moves.sweep() > 10
    assert cosine(moves.codes * step.float(), bits) > cosine(codes * step.float(), bits)
    assert bool((moves.codes == moves.codes.round()).all())
    assert float(moves.codes.abs().max()) <= script.top_of(bits)
    entries_now = moves.codes * float(step)
    scores = moves.points @ entries_now.T - entries_now.square().sum(1) / 2
    torch.testing.assert_close(moves.best, scores.topk(2).values, rtol=1e-5, atol=1e-5)


def test_a_replaced_file_is_named_in_the_code(tmp_path, monkeypatch):
    module, file = tmp_path / "codebooks.py", tmp_path / "gaussian8.safetensors"
    module.write_text('A = 1\nFILE_SHA256 = "old"\nB = 2\n')
    monkeypatch.setattr(vector, "__file__", str(module))
    monkeypatch.setattr(script, "FILE", file)
    monkeypatch.setattr(script, "build", lambda steps: {"x": torch.zeros(steps)})
    monkeypatch.setattr("sys.argv", ["codebooks.py", "--steps", "2", "--out", str(file)])
    script.main()
    digest = script.hashlib.sha256(file.read_bytes()).hexdigest()
    assert module.read_text() == f'A = 1\nFILE_SHA256 = "{digest}"\nB = 2\n'
    monkeypatch.setattr("sys.argv", ["codebooks.py", "--steps", "3", "--out", str(tmp_path / "other")])
    script.main()
    assert digest in module.read_text()

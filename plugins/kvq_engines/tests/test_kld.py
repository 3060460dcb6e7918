"""llama.cpp's files of log-probabilities: written, read and compared."""

import math

import numpy as np
import pytest
import torch

from kvq.errors import DataError
from kvq.report.tables.build import build_tables
from kvq.report.tables.formats import markdown
from kvq.results import Store
from kvq_engines import kld
from kvq_engines.kld import LogitsFile, LogitsWriter, compare_files, decode_rows, encode_rows, main, row_words
from kvq_engines.tests import installed

CONTEXT, VOCAB, CHUNKS = 12, 37, 5


def logits(seed=0, spread=1.5, rows=CHUNKS * CONTEXT, vocab=VOCAB):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def tokens(seed=9):
    return torch.randint(VOCAB, (CHUNKS, CONTEXT), generator=torch.Generator().manual_seed(seed))


def as_llamacpp_writes(row):
    """`log_softmax` of tools/perplexity/perplexity.cpp, one number at a time, in float."""
    f = np.float32
    top, low = f(max(row)), f(min(row))
    low = max(low, f(top - f(16)))
    total = sum(math.exp(f(one - top)) for one in row)
    smallest, scale = f(low - top - f(math.log(total))), f((top - low) / f(65535))
    inverse = f(1 / scale) if scale else f(0)
    codes = [int(np.rint(f(inverse * f(one - low)))) if one > low else 0 for one in row]
    return scale, smallest, codes


def written(path, given, text=None):
    text = tokens() if text is None else text
    writer = LogitsWriter(path, text, VOCAB)
    for window, rows in enumerate(torch.log_softmax(given, -1).split(CONTEXT)):
        writer.write(window, 1, rows[:5])  # targets 1 to 11 in two parts
        writer.write(window, 6, rows[5 : CONTEXT - 1])
    writer.close()
    return LogitsFile.open(path)


def test_rows_are_those_of_llamacpp():
    given = logits(spread=9.0)
    ours = encode_rows(torch.log_softmax(given, -1))
    assert ours.shape == (len(given), row_words(VOCAB)) == (60, 42)
    for row, one in zip(given.numpy(), ours, strict=True):
        scale, smallest, codes = as_llamacpp_writes(row)
        numbers = one[:4].copy().view(np.float32)
        assert numbers == pytest.approx([scale, smallest], rel=1e-5)
        assert np.abs(one[4 : 4 + VOCAB].astype(int) - codes).max() <= 1  # a half, up to rounding of float32
    assert not ours[:, 4 + VOCAB :].any()


def test_equal_logits_have_scale_zero():
    found = encode_rows(torch.full((2, VOCAB), -math.log(VOCAB)))
    assert torch.allclose(decode_rows(found, VOCAB), torch.tensor(-math.log(VOCAB)))


def test_a_file_holds_the_second_half_of_each_window(tmp_path):
    given = logits()
    file = written(tmp_path / "base", given)
    assert (file.context, file.vocab, file.chunks, file.rows) == (CONTEXT, VOCAB, CHUNKS, 5)
    assert np.array_equal(file.tokens(), tokens().numpy())
    expected = torch.log_softmax(given, -1).view(CHUNKS, CONTEXT, VOCAB)[:, 6:11]
    for chunk in range(CHUNKS):
        torch.testing.assert_close(torch.cat(list(file.chunk(chunk))), expected[chunk], atol=3e-4, rtol=0)
    assert not list(tmp_path.glob("*.partial"))


def test_what_is_far_below_is_clipped():
    given = torch.zeros(1, VOCAB)
    given[0, 0], given[0, 1] = 40.0, 30.0
    found = decode_rows(encode_rows(torch.log_softmax(given, -1)), VOCAB)[0]
    assert found[1] == pytest.approx(-10, abs=1e-3)
    assert torch.allclose(found[2:], torch.tensor(-16.0), atol=1e-3)


def test_metrics_are_those_of_both_distributions(tmp_path):
    first, second = logits(0), logits(0) + logits(1, 0.3)
    metrics, samples = compare_files(written(tmp_path / "a", first), written(tmp_path / "b", second))
    one, two = (
        torch.log_softmax(given, -1).double().view(CHUNKS, CONTEXT, VOCAB)[:, 6:11] for given in (first, second)
    )
    kl = (one.exp() * (one - two)).sum(-1)
    own = tokens()[:, 7:12, None]
    assert metrics["kl_mean"] == pytest.approx(float(kl.mean()), abs=1e-4)
    assert metrics["kl_max"] == pytest.approx(float(kl.max()), abs=1e-3)
    assert metrics["kl_median"] == pytest.approx(float(kl.flatten().quantile(0.5)), abs=1e-4)
    assert metrics["nll"] == pytest.approx(-float(two.gather(2, own).mean()), abs=1e-4)
    assert metrics["base_perplexity"] == pytest.approx(math.exp(-float(one.gather(2, own).mean())), rel=1e-3)
    assert metrics["top1_agreement"] == pytest.approx(float((one.argmax(-1) == two.argmax(-1)).float().mean()))
    assert metrics["delta_nll_se"] > 0
    assert sum(row["tokens"] for row in samples) == metrics["scored_tokens"] == 25


def test_the_same_file_differs_by_nothing(tmp_path):
    file = written(tmp_path / "a", logits())
    metrics, _ = compare_files(file, file)
    assert metrics["kl_mean"] == metrics["kl_max"] == metrics["delta_nll"] == 0
    assert metrics["top1_agreement"] == 1


def test_clipped_probabilities_enter_no_divergence(tmp_path):
    given = torch.zeros(CHUNKS * CONTEXT, VOCAB)
    given[:, 0], given[:, 1] = 40.0, 38.0
    base = written(tmp_path / "a", given)
    given[:, 2:] = 10.0
    metrics, _ = compare_files(base, written(tmp_path / "b", given))
    assert metrics["kl_mean"] == pytest.approx(0, abs=1e-4)


def test_the_command_writes_a_record_that_tables_show(tmp_path, capsys):
    written(tmp_path / "f16.logits", logits(0))
    written(tmp_path / "q4_0.logits", logits(0) + logits(1, 0.3))
    results = tmp_path / "results"
    given = [str(tmp_path / "f16.logits"), str(tmp_path / "q4_0.logits"), "--results-dir", str(results), "--model", "M"]
    assert main(given) == 0
    assert "kl_p999" in capsys.readouterr().out
    (record,), broken = Store(results).scan()
    assert (record.task, record.model, record.method, broken) == ("kld", "M", "q4_0", [])
    assert len(Store(results).samples(record.key)) == CHUNKS
    (table,) = build_tables(Store(results)).tables
    assert "q4_0" in markdown(table)
    assert "KL median (nats)" in markdown(table)
    assert not any(row.stale for row in table.rows)
    assert main(given) == 0
    assert len(Store(results).scan()[0]) == 1


def broken_files(folder, whole):
    yield "none", None, "No such file or directory"
    yield "other", b"GGUF" + whole[4:], "no file of llama-perplexity"
    yield "empty", b"", "no file of llama-perplexity"
    yield "cut", whole[:-3], "truncated or another format"
    yield "longer", whole + b"\0\0", "truncated or another format"
    yield "header", whole[:12] + b"\xff\xff\xff\xff" + whole[16:], "a broken header"


def test_broken_files_cost_one_line(tmp_path, capsys):
    base = written(tmp_path / "base", logits())
    whole = base.path.read_bytes()
    for name, content, said in broken_files(tmp_path, whole):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert main([str(base.path), str(tmp_path / name), "--results-dir", str(tmp_path / "results")]) == 1
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1
        assert said in lines[0]
    assert not (tmp_path / "results").exists()


def test_files_of_other_texts_are_refused(tmp_path):
    base = written(tmp_path / "base", logits())
    other = written(tmp_path / "other", logits(), tokens(3))
    with pytest.raises(DataError, match="other tokens than in"):
        compare_files(base, other)
    small = LogitsWriter(tmp_path / "small", tokens()[:, :6], VOCAB)
    for window in range(CHUNKS):
        small.write(window, 1, torch.log_softmax(logits(rows=5), -1))
    small.close()
    with pytest.raises(DataError, match=r"context 6; .* has 12"):
        compare_files(base, LogitsFile.open(tmp_path / "small"))


def test_numbers_that_are_not_finite_are_refused(tmp_path):
    base = written(tmp_path / "base", logits())
    data = bytearray(base.path.read_bytes())
    data[base.offset(2) : base.offset(2) + 4] = np.float32(np.nan).tobytes()
    (tmp_path / "nan").write_bytes(data)
    with pytest.raises(DataError, match="chunk 2: numbers that are not finite"):
        compare_files(base, LogitsFile.open(tmp_path / "nan"))


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(DataError, match=r"task.save_logits=.*: No such file"):
        LogitsWriter(tmp_path / "no" / "file", tokens(), VOCAB)


def test_memory_is_that_of_some_rows(tmp_path, monkeypatch):
    sizes = []
    whole = kld.decode_rows
    monkeypatch.setattr(kld, "decode_rows", lambda rows, vocab: sizes.append(len(rows)) or whole(rows, vocab))
    monkeypatch.setattr(kld, "_ROWS", 2)
    file = written(tmp_path / "a", logits())
    compare_files(file, file)
    assert max(sizes) == 2


@installed.llamacpp
def test_a_file_of_the_engines_own_logits(tmp_path):
    """Rows that llama.cpp's formula makes of its logits are those that the writer makes of them."""
    from kvq_engines.llamacpp import LlamaCpp, write_gguf
    from kvq_engines.tests.test_llamacpp import model_of

    write_gguf(model_of(), tmp_path / "model.gguf")
    text = torch.randint(120, (16,), generator=torch.Generator().manual_seed(0))
    with LlamaCpp(tmp_path / "model.gguf", 16) as engine:
        found = torch.cat(list(engine.logits(text)))
    rows = encode_rows(torch.log_softmax(found, -1))
    for row, one in zip(found.numpy(), rows, strict=True):
        scale, smallest, codes = as_llamacpp_writes(row)
        assert one[:4].copy().view(np.float32) == pytest.approx([scale, smallest], rel=1e-4)
        assert np.abs(one[4:124].astype(int) - codes).max() <= 1

"""Machine code on disk: a second process compiles nothing, and code of anything else is not taken."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")
from numba.core import types
from numba.extending import intrinsic

from kvq.codecs import machine_code
from kvq.codecs.machine_code import compiled

ROOT = Path(__file__).parents[2]
OPTIONS = {"nogil": True}
NUMBERS = np.arange(4, dtype=np.float32)


def plus(number, *, name="total"):
    """A kept loop that holds another loop, an array, a number and an emitted instruction."""

    def build(context, builder, signature, args):
        return builder.fadd(args[0], context.get_constant(types.float32, number))

    @intrinsic
    def add(typing_context, one):
        return types.float32(types.float32), build

    @compiled(OPTIONS)
    def inner(x):
        return add(x)

    @compiled(OPTIONS, keep=True)
    def total(x):
        found = np.float32(0)
        for one in x:
            found += inner(one)
        return found

    return total


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where code is kept in these tests."""
    monkeypatch.setattr(machine_code.config, "CACHE_DIR", str(tmp_path))
    found = (machine_code._folder, machine_code._stamp)
    for one in found:
        one.cache_clear()
    yield tmp_path
    for one in found:
        one.cache_clear()


def counts(loop):
    return sum(loop.stats.cache_hits.values()), sum(loop.stats.cache_misses.values())


def counts_of_next():
    loop = plus(1.0)
    assert loop(NUMBERS) == 10
    return counts(loop)


def test_code_is_kept_for_what_a_loop_holds(folder):
    first, other = plus(1.0), plus(2.0)
    assert (first(NUMBERS), other(NUMBERS)) == (10, 14)
    assert counts(first) == counts(other) == (0, 1)
    again, third = plus(1.0), plus(3.0)
    assert (again(NUMBERS), third(NUMBERS)) == (10, 18)
    assert (counts(again), counts(third)) == ((1, 0), (0, 1))
    assert len(list(folder.rglob("*.nbc"))) == 3
    assert not list(folder.rglob("*.tmp"))


def test_code_is_kept_for_the_kinds_of_arguments():
    plus(1.0)(NUMBERS)
    loop = plus(1.0)
    assert loop(NUMBERS[::2]) == 4
    assert counts(loop) == (0, 1)


def test_a_damaged_file_is_compiled_again(folder):
    plus(1.0)(NUMBERS)
    (path,) = folder.rglob("*.nbc")
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damaged)
        loop = plus(1.0)
        assert loop(NUMBERS) == 10
        assert counts(loop) == (0, 1)
    assert counts_of_next() == (1, 0)


def test_code_of_other_sources_is_not_read_and_is_removed(folder, monkeypatch):
    plus(1.0)(NUMBERS)
    (old,) = folder.rglob("*.nbc")
    monkeypatch.setattr(machine_code, "_stamp", lambda folder: "another")
    assert counts_of_next() == (0, 1)
    assert not old.exists()
    assert len(list(folder.rglob("*.nbc"))) == 1


def test_the_stamp_is_of_what_the_files_say(tmp_path, monkeypatch):
    source = tmp_path / "loops.py"
    source.write_text("A = 1")
    os.utime(source, (0, 0))
    stamp = machine_code._stamp(tmp_path)
    os.utime(source, (9, 9))
    machine_code._stamp.cache_clear()
    assert machine_code._stamp(tmp_path) == stamp
    source.write_text("A = 2")
    os.utime(source, (9, 9))
    machine_code._stamp.cache_clear()
    assert machine_code._stamp(tmp_path) not in (stamp, None)


def test_nothing_is_kept_of_sources_edited_since_they_were_read(folder, monkeypatch):
    monkeypatch.setattr(machine_code, "_READ", 0)
    for _ in range(2):
        assert counts_of_next() == (0, 1)
    assert not list(folder.rglob("*.nbc"))


def test_the_folder_is_the_first_that_can_be_written(tmp_path, monkeypatch):
    sources = tmp_path / "kernels"
    user = Path(machine_code.AppDirs(appname="kvq", appauthor=False).user_cache_dir)
    assert machine_code._folder(sources).parent == tmp_path
    monkeypatch.setattr(machine_code.config, "CACHE_DIR", "")
    for place in (sources, user):
        monkeypatch.setattr(machine_code, "_writable", lambda folder, place=place: place in folder.parents)
        machine_code._folder.cache_clear()
        assert machine_code._folder(sources).parent == place
    monkeypatch.setattr(machine_code, "_writable", lambda folder: False)
    machine_code._folder.cache_clear()
    assert machine_code._folder(sources) is None


def test_without_a_folder_loops_work(folder, monkeypatch):
    (folder / "file").touch()
    monkeypatch.setattr(machine_code.config, "CACHE_DIR", str(folder / "file"))
    machine_code._folder.cache_clear()
    assert counts_of_next() == (0, 1)
    assert not list(folder.rglob("*.nbc"))


def test_what_has_no_lasting_name_is_refused():
    held = object()
    with pytest.raises(TypeError, match="a compiled loop holds a object, which has no lasting name"):

        @compiled(OPTIONS)
        def loop():
            return held


FIRST_CALLS = """
import numpy as np, torch, kvq
from numba.core.dispatcher import Dispatcher
made, init = [], Dispatcher.__init__
Dispatcher.__init__ = lambda self, *args, **settings: (init(self, *args, **settings), made.append(self))[0]
from kvq.codecs import trellis
from kvq.kernels import dispatch
from kvq_kernels import cpu
from tests.kernels import oracle
from tests.kernels.test_eager import query
for name, bits in (("kivi", 2), ("turboquant", 2), ("nsnquant", 1)):
    method = kvq.build_method(name, bits=bits, head_dim=32)
    rope = kvq.codecs.rope_table(128, 32) if method.key.uses_rope else None
    sides = [oracle.states(codec, 64, 0, dim=32, block=32, rope=rope) for codec in (method.key, method.value)]
    cpu.attend(query(2, 32, 1, torch.float32), *sides, 1.0)
    dispatch.fused(method.key).encode(torch.ones(1, 2, 32, 32), 32, rope and rope.narrow(0, 32))
layout = trellis.Layout((2, 2, 2, 2))
strings = trellis.encode(torch.ones(1, 4), torch.ones(4), layout, 6)
trellis.decode(strings, layout, 6, torch.float32)
stats = [loop.stats for loop in made]
print(sum(sum(one.cache_hits.values()) for one in stats), sum(sum(one.cache_misses.values()) for one in stats))
"""


@pytest.mark.long
def test_a_second_process_compiles_nothing(folder):
    """Nor waits for it: attention on codes of grids, levels and codebooks, encoding in one pass, and a trellis."""
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_CALLS],
            cwd=ROOT,
            env=os.environ | {"NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        found.append(tuple(map(int, done.stdout.split())))
    (hits, misses), (second_hits, second_misses) = found
    assert hits == 0
    assert misses > second_hits > 10
    assert second_misses == 0

"""No setting of torch that a caller may have changed moves what a method computes."""

import contextlib
import itertools
import sys

import pytest
import torch

import kvq
from kvq.cache import KVCache
from kvq.calibration.fit import calibrate
from kvq.codecs import rope_table
from kvq.config.method import CalibrationConfig
from kvq.config.plugins import installed
from kvq.errors import ConfigError
from kvq.models.load import LoadedModel
from tests.cache.states import nearest_bits, quantizes
from tests.calibrated import build, random_states, sides
from tests.codecs.test_every_method import CODED, bits_range, head_dim_of
from tests.presets import METHODS, one_of_each
from tests.random_models import llama, token_ids

COMPILED = ("trellis_cpu",)


@contextlib.contextmanager
def setting(switch, value, before):
    switch(value)
    try:
        yield
    finally:
        switch(before)


SETTINGS = {
    "gradients": torch.enable_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default dtype": lambda: setting(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "double": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "default device": lambda: torch.device("meta"),
    "precision": lambda: setting(torch.set_float32_matmul_precision, "medium", "highest"),
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
}


def forget_constants():
    """What codecs keep of a process's first calls."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("kvq.codecs", *installed())) and name.rpartition(".")[2] not in COMPILED:
            for value in vars(module).values():
                getattr(value, "cache_clear", lambda: None)()


@pytest.mark.thin(6)
@pytest.mark.parametrize("name", one_of_each(CODED))
def test_codecs(name):
    dim = head_dim_of(name)
    x, rope = random_states(2, dim, 64), rope_table(64, dim)
    method = build(name, x, min(3, (bits_range(name) or (3, 3))[1]))
    for side, codec in sides(method).items():
        expected = codec.decode(codec.encode(x, 32, rope), rope)
        for setting_of, context in SETTINGS.items():
            forget_constants()
            own = x.clone().requires_grad_(setting_of == "gradients")
            state = torch.random.get_rng_state()
            with context():
                stored = codec.encode(own, 32, rope)
                assert torch.equal(codec.decode(stored, rope), expected), (side, setting_of)
            assert torch.equal(torch.random.get_rng_state(), state)
            assert not any(part.is_inference() or part.requires_grad for part in stored.parts.values())
            assert torch.equal(codec.decode(codec.encode(x, 32, rope), rope), expected), (side, setting_of)


def logits(model, method, first, then):
    """Of 40 tokens in three forwards; `first` and `then`: what the first and the others run in."""
    cache, found = KVCache(model, method), []
    for number, piece in enumerate(token_ids(40).split([30, 9, 1], 1)):
        with then() if number else first():
            found.append(model(piece, past_key_values=cache).logits.detach())
    return torch.cat(found, 1)


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", [name for name in METHODS if quantizes(name)])
def test_caches(name):
    """A cache filled in one mode goes on in another."""
    model = llama(head_dim=128).requires_grad_(True)
    try:
        method = kvq.build_method(name, bits=nearest_bits(name), head_dim=128, overrides=["residual.size=8"])
    except ConfigError:
        method = kvq.build_method(name, bits=nearest_bits(name), head_dim=128)
    if method.needs_calibration:
        pytest.skip("its codecs are above")
    expected = logits(model, method, torch.no_grad, torch.no_grad)
    for first, then in itertools.permutations([torch.no_grad, torch.enable_grad, torch.inference_mode], 2):
        forget_constants()
        assert torch.equal(logits(model, method, first, then), expected), (first, then)


@pytest.mark.parametrize("name", ["spinquant", "waterfill", "kvquant"])
def test_calibrating(name):
    """Also what a calibration leaves behind: no gradients, weights that take them as before, the state of draws."""
    model = llama(layers=1, head_dim=32).requires_grad_(True)
    loaded, windows = LoadedModel(model, torch.device("cpu")), token_ids(160, batch=2)
    steps = ["value.stages.rotation.steps=2"] if name == "spinquant" else []
    method = kvq.build_method(name, bits=4, head_dim=32, overrides=steps)
    settings = CalibrationConfig(samples=2, length=160)
    expected = calibrate(loaded, method, windows, settings).tensors
    for setting_of, context in SETTINGS.items():
        state = torch.random.get_rng_state()
        with context():
            found = calibrate(loaded, method, windows, settings).tensors
        assert all(torch.equal(found[table], own) for table, own in expected.items()), setting_of
        assert torch.equal(torch.random.get_rng_state(), state)
        assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())

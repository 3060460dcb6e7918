"""`method.bits_by_layer`: layers with bits of their own are the layers of methods at those bits."""

import numpy as np
import pytest
import torch

from kvq.cache import KVCache
from kvq.calibration.files import bind_tables
from kvq.calibration.fit import calibrate, weights_name
from kvq.codecs import HeadsCodec
from kvq.config import compose, resolve
from kvq.config.identity import canonical, names
from kvq.config.method import CalibrationConfig
from kvq.errors import ConfigError, KvqError, Unsupported
from kvq.methods.build import build_method
from kvq.models.load import LoadedModel
from kvq.results import run_key
from kvq.results.record import versions_of_method
from tests.random_models import llama, token_ids

KEYS, VALUES = [4, 2, 3], [2, 2, 4]
BOTH = [f"bits_by_layer.key={KEYS}", f"bits_by_layer.value={VALUES}"]


def key(*overrides):
    return run_key(canonical(resolve(compose(overrides)), "weights", "text"))


def states(tokens=200, dim=128):
    return torch.randn(2, 1, 2, tokens, dim, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["kivi", "nsn", "oscar", "quarot", "turboquant", "gear", "rtn", "ott"])
def test_each_layer_is_that_of_the_method_at_its_bits(name):
    """Bytes and decoded states of layer i are those of the method at the bits of layer i."""
    model, (keys, values) = llama(layers=3), states()
    mixed = KVCache(model, build_method(name, bits=2, overrides=BOTH))
    stored = 0
    for index, bits in enumerate(zip(KEYS, VALUES, strict=True)):
        alone = KVCache(model, build_method(name, bits=bits))
        for at in range(0, 200, 100):
            seen = [cache.layers[index].update(keys[:, :, at : at + 100], values[:, :, at : at + 100])
                    for cache in (mixed, alone)]  # fmt: skip
        for ours, theirs in zip(*seen, strict=True):
            assert torch.equal(ours, theirs)
        for side in ("key", "value"):
            ours, theirs = (getattr(cache.layers[index], side) for cache in (mixed, alone))
            assert ours.packed_bytes == theirs.packed_bytes > 0
            stored += theirs.packed_bytes
    assert mixed.packed_bytes == stored


def test_a_side_without_bits_of_its_own_has_those_of_the_run():
    method = build_method("kivi", bits="k8v2", overrides=[f"bits_by_layer.key={KEYS}"])
    assert [method.codec_of("key", layer).quantizer.bits for layer in range(3)] == KEYS
    assert [method.codec_of("value", layer).quantizer.bits for layer in range(3)] == [2, 2, 2]
    assert method.label == "kivi k3v2"


def test_calibrated_layers_are_fitted_at_their_bits():
    model = llama(layers=3, head_dim=32, kv_heads=1)
    loaded, windows = LoadedModel(model, torch.device("cpu")), token_ids(64, seed=2, batch=2)
    settings = CalibrationConfig(dataset="pydocs", samples=2, length=64)
    tables = {}
    for name, overrides in {"mixed": ["bits_by_layer.key=[2,3,4]"], "alone": []}.items():
        method = build_method("kvquant", bits=3, head_dim=32, overrides=overrides)
        with torch.enable_grad():
            tables[name] = calibrate(loaded, method, windows, settings)
        bound = bind_tables(method, tables[name], weights_name(model), [32] * 3)
        bits = [bound.codec("key", layer, 3).quantizer.bits for layer in range(3)]
        assert bits == ([2, 3, 4] if name == "mixed" else [3, 3, 3])
    mixed, alone = (tables[name].tensors for name in ("mixed", "alone"))
    same = {name: mixed[name].shape == alone[name].shape and torch.equal(mixed[name], alone[name]) for name in alone}
    assert all(same[name] for name in same if name.startswith(("key.1.", "value.")))
    assert not all(same[name] for name in same if name.startswith("key.0."))


HEADS = ["bits_by_layer.key=[[2,4],3,[16,2]]", "bits_by_layer.value=[2,[4,3],[2,4]]"]


@pytest.mark.parametrize(
    "name", ["kivi", "nsn", "oscar", "turboquant", "rtn", pytest.param("tcq", marks=pytest.mark.long)]
)
def test_each_head_is_that_of_the_method_at_its_bits(name):
    """Bytes and decoded states of a head are those of a cache of that head alone at its bits; 16 bits: as it is."""
    widths = {"key": [[2, 4], [3, 3], [16, 2]], "value": [[2, 2], [4, 3], [2, 4]]}
    model, one_head, (keys, values) = llama(layers=3), llama(layers=3, kv_heads=1), states()
    mixed = KVCache(model, build_method(name, bits=2, overrides=HEADS))
    for index in range(3):
        for at in range(0, 200, 100):
            seen = mixed.layers[index].update(keys[:, :, at : at + 100], values[:, :, at : at + 100])
        for head in range(2):
            own = {side: widths[side][index][head] for side in widths}
            asked = {side: 2 if bits == 16 else bits for side, bits in own.items()}
            alone = KVCache(one_head, build_method(name, bits=asked))
            for at in range(0, 200, 100):
                one = [part[:, head : head + 1, at : at + 100] for part in (keys, values)]
                theirs = alone.layers[index].update(*one)
            for side, ours, other, given_states in zip(own, seen, theirs, (keys, values), strict=True):
                expected = given_states[:, head] if own[side] == 16 else other[:, 0]
                assert torch.equal(ours[:, head], expected)


def test_records_of_heads_name_the_codec_s_version():
    configs = [resolve(compose(["method=kivi", f"method.bits_by_layer.key={own}"])) for own in ("[[2,4],3]", "[2,3]")]
    of_heads, of_layers = (versions_of_method(canonical(config, "", "")["method"]) for config in configs)
    assert of_heads == {**of_layers, "HeadsCodec": HeadsCodec.version}


def test_bytes_of_heads_add_up():
    """Of RTN, b + 32/D bits for each head; 32 for one in full precision, of states in fp32."""
    cache = KVCache(llama(layers=3), build_method("rtn", bits=2, overrides=HEADS))
    for layer in cache.layers:
        layer.update(*states(256))
    assert cache.side_bits("key") == pytest.approx((2.25 + 4.25 + 3.25 + 3.25 + 32 + 2.25) / 6, abs=1e-12)
    assert cache.side_bits("value") == pytest.approx((2 + 2 + 4 + 3 + 2 + 4) / 6 + 0.25, abs=1e-12)


def test_heads_in_another_number_than_the_model_s_are_refused():
    cache = KVCache(llama(layers=1), build_method("kivi", overrides=["bits_by_layer.key=[[2,4,2]]"]))
    with pytest.raises(Unsupported, match=r"^bits of 3 heads in a layer of 2; one for each head$"):
        cache.layers[0].update(*states())


@pytest.mark.parametrize("name", ["oscar/token_scope", "kvquant", "waterfill"])
def test_heads_that_are_encoded_together_have_no_bits_of_their_own(name):
    with pytest.raises(Unsupported, match=r"^method.bits_by_layer.key: .*: encodes heads together"):
        build_method(name, bits=2, overrides=["bits_by_layer.key=[[2,1]]"])


def test_a_cache_of_heads_is_read_again(tmp_path):
    """A cache of heads with bits of their own is written, read and continued as any."""
    model, (keys, values) = llama(layers=3), states()
    method = build_method("kivi", bits=2, overrides=HEADS)
    cache = KVCache(model, method)
    for layer in cache.layers:
        layer.update(keys[:, :, :100], values[:, :, :100])
    with pytest.raises(Unsupported, match="heads with bits of their own need decoded tokens"):
        method.check_packed()
    cache.save(tmp_path / "cache.safetensors")
    again = KVCache.load(tmp_path / "cache.safetensors", model, method)
    for ours, theirs in zip(cache.layers, again.layers, strict=True):
        found = [layer.update(keys[:, :, 100:], values[:, :, 100:]) for layer in (ours, theirs)]
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


def test_the_key_holds_the_bits_of_layers_and_nothing_where_they_are_alike():
    plain = key("method=kivi", "bits=4")
    assert "bits_by_layer" not in canonical(resolve(compose(["method=kivi"])), "", "")["method"]
    alike = ["method=kivi", "method.bits_by_layer.key=[4,4]", "method.bits_by_layer.value=[4,4]"]
    assert key(*alike) == key(*alike, "bits=2") == plain
    mixed = ["method=kivi", "method.bits_by_layer.key=[4,2]", "method.bits_by_layer.value=[2,2]"]
    assert key(*mixed, "bits=2") == key(*mixed, "bits=8") != plain
    assert (
        len({key(*mixed), key(*mixed[:2]), key(*mixed[:1]), key("method=kivi", "method.bits_by_layer.key=[2,4]")}) == 4
    )


@pytest.mark.parametrize(
    ("overrides", "label"),
    [
        (["bits=k4v2"], "k4v2"),
        (["method.bits_by_layer.key=[8,4,4,2]"], "k4.5v3"),
        (["method.bits_by_layer.key=[4,4,3]", "bits=2"], "k3.667v2"),
        (["method.bits_by_layer.key=[4,2]", "method.bits_by_layer.value=[2,4]"], "3"),
        (["method.bits_by_layer.key=[[4,2],2]", "bits=2"], "k2.5v2"),
    ],
)
def test_a_record_is_named_by_mean_bits(overrides, label):
    assert names(resolve(compose(["method=kivi", *overrides])))["bits"] == label


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["bits_by_layer.key=[4,0]"],
            r"^method.bits_by_layer.key=\[4, 0\]: a whole number 1-16 for each layer, or a list",
        ),
        (["bits_by_layer.key=[4,[2,2.5]]"], "a whole number 1-16 for each layer, or a list of one for each KV head$"),
        (["bits_by_layer.key=[4,[2,9]]"], r"^method.bits_by_layer.key=\[4, \[2, 9\]\]: kivi does 1 to 8 bits$"),
        (["bits_by_layer.key=[4,[16,16]]"], "full_precision_layers for a whole layer$"),
        (["bits_by_layer.key=[4,9]"], r"^method.bits_by_layer.key=\[4, 9\]: kivi does 1 to 8 bits$"),
        (["bits_by_layer.key=[4]", "bits_by_layer.value=[4,2]"], "1 layers of keys and 2 of values; as many of both"),
        (["bits_by_layer.key=[a]"], "bits_by_layer.key"),
        (["bits_by_layer.keys=[4]"], "keys"),
        (["bits_by_layer.at=1"], "^method.bits_by_layer.at: follows from key and value"),
        (["bits_by_layer.key=[4,2]", "key.quantizer.bits=4"], "^method.bits_by_layer.key: keys of kivi do not follow"),
        (["bits_by_layer.value=[4,2]", "value=null"], "^method.bits_by_layer.value: values of kivi do not follow"),
    ],
)
def test_wrong_bits_are_one_line(overrides, says):
    with pytest.raises(KvqError, match=says) as caught:
        build_method("kivi", overrides=overrides)
    assert "\n" not in str(caught.value)


def test_a_fixed_rate_has_no_bits():
    with pytest.raises(ConfigError, match=r"^method.bits_by_layer: cq stores at a fixed rate and takes no bits$"):
        build_method("cq", overrides=["bits_by_layer.key=[4,2]"])


def test_the_number_of_layers_is_checked():
    method = build_method("kivi", overrides=["bits_by_layer.key=[4,2]"])
    with pytest.raises(ConfigError, match=r"^method.bits_by_layer: 2 numbers for 3 layers; one for each$"):
        KVCache(llama(layers=3), method)


def kvtuner(group, bits):
    """Reconstruction of KVTuner's quantizer, number by number: whole zero point, halves to even; scale kept in fp16."""
    low, high = min(group), max(group)
    scale = (high - low) / (2**bits - 1)
    zero, kept = round(low / scale), float(np.float16(scale))
    return [(min(max(round(x / scale) - zero, 0), 2**bits - 1) + zero) * kept for x in group]


@pytest.mark.parametrize(
    ("released", "preset", "mean"), [("llama_3_1_8b", "kivi/kvtuner", 3.25), ("qwen2_5_7b", "rtn/kvtuner", 4.0)]
)
def test_the_released_lists_of_kvtuner(released, preset, mean):
    """Means over layers are those that KVTuner states (abstract), and a side's groups decode to its formula."""
    config = resolve(compose([f"+experiment=kvtuner_{released}"]))
    assert config.method.name == preset
    own = config.method.bits_by_layer
    assert (sum(own.key) + sum(own.value)) / (2 * len(own.key)) == mean
    values = torch.randn(1, 1, 32, 64, generator=torch.Generator().manual_seed(1))
    codec = build_method(preset, bits=2).value
    decoded = codec.decode(codec.encode(values)).flatten().tolist()
    size = 32 if preset.startswith("kivi") else 64
    flat = values.double().flatten().tolist()
    expected = [x for at in range(0, len(flat), size) for x in kvtuner(flat[at : at + size], 2)]
    assert decoded == pytest.approx(expected, rel=2e-3, abs=1e-6)

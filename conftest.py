"""Settings of all tests.

`KVQ_TYPES=1` checks shapes and types of kvq at each call, which makes codecs three times slower: `tests/test_types.py`
runs a part of the tests so, and `make test-all` all of them.
"""

from __future__ import annotations

import gc
import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from jaxtyping import install_import_hook

if os.environ.get("KVQ_TYPES") == "1":  # before anything imports kvq, and for the whole session
    _HOOK = install_import_hook("kvq", "beartype.beartype")

gc.disable()  # until every module is imported, see pytest_collection_finish

ROOT = Path(__file__).parent
EXAMPLES = 100 if os.environ.get("KVQ_ALL") == "1" else 25  # of properties that say no number
hypothesis.settings.register_profile("local", deadline=None, max_examples=EXAMPLES)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=EXAMPLES)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def _left_out() -> tuple[list[Path], set[str]]:
    """The folders of plugins that are not in use, and the names of their methods and tasks."""
    from kvq.config.choices import choices_in
    from kvq.config.plugins import installed

    folders = [file.parent for file in (ROOT / "plugins").glob("*/__init__.py") if file.parent.name not in installed()]
    found = [choice for folder in folders if (folder / "conf").is_dir() for choice in choices_in(folder / "conf")]
    return folders, {choice.name for choice in found if choice.group in ("method", "task")}


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The one test that takes a minute begins first, so that no process waits for it at the end.

    What KVQ_PLUGINS leaves out is skipped: a plugin's tests, cases of its methods and tasks, and tests marked
    `every_plugin`.

    Of a test marked `thin(n)` one case in n, chosen by its name, belongs to the quick half and the others to the long.
    """
    items.sort(key=lambda item: item.path.name != "test_types.py")
    folders, out = _left_out()
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {}).values()
        words = (word for value in params for word in (value if isinstance(value, list | tuple) else [value]))
        cases = {word.removeprefix("method=") for word in words if isinstance(word, str)}
        of_plugin = any(item.path.is_relative_to(folder) for folder in folders)
        if of_plugin or (folders and item.get_closest_marker("every_plugin")) or out & cases:
            item.add_marker(pytest.mark.skip(reason="of a plugin that KVQ_PLUGINS leaves out"))
        mark = item.get_closest_marker("thin")
        if mark is not None and zlib.crc32(item.name.encode()) % mark.args[0]:
            item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """What is imported stays: collections of garbage need not look at its three million objects each time.

    They wait for more new objects than Python's own 700: compositions and forwards make many, and few in circles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _torch_threads() -> None:
    """Small tensors: more threads only wait for each other."""
    import torch

    alone = "PYTEST_XDIST_WORKER" not in os.environ
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2" if alone else "1")))


@pytest.fixture(scope="module", autouse=True)
def _composed_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hydra composes a command line a first time to read `hydra.mode`, which only experiments and its settings set.

    The tests of the command line itself let it, as every process does.
    """
    if request.path.name in ("test_cli.py", "test_composing.py"):
        yield
        return
    from hydra._internal.hydra import Hydra

    get_mode = Hydra.get_mode

    def mode(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        sets = any("experiment" in word or "hydra" in word for word in overrides)
        return get_mode(self, config_name, overrides) if sets else None

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Hydra, "get_mode", mode)
        yield


LONG_TEXT = 100_000
"""Characters: the embedded corpora have more, and no text that a test writes."""


@pytest.fixture(scope="session", autouse=True)
def _long_texts_are_encoded_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A tokenizer takes seconds for an embedded corpus, which runs with other windows would ask of it again.

    The processes of a session find each other's tokens in its folder.
    """
    import numpy as np

    from kvq.data import text as texts

    encode, kept, folder = texts.encode, dict[str, list[int]](), tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def once(tokenizer: Any, text: str, special: bool = True) -> list[int]:
        if len(text) < LONG_TEXT or not hasattr(tokenizer, "backend_tokenizer"):
            return encode(tokenizer, text, special)
        parts = (tokenizer.backend_tokenizer.to_str(), text)
        rows = getattr(tokenizer, "embedding_rows", None)
        given = repr(([hashlib.sha256(part.encode()).hexdigest() for part in parts], special, rows))
        name = hashlib.sha256(given.encode()).hexdigest()
        file, own = folder / f"encoded-{name}.npy", folder / f"encoded-{name}-{os.getpid()}.npy"
        if name not in kept and file.exists():
            kept[name] = np.load(file).tolist()
        elif name not in kept:
            kept[name] = encode(tokenizer, text, special)
            np.save(own, kept[name])
            own.replace(file)  # whole or not at all
        return [*kept[name]]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(texts, "encode", once)
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """A folder of real data sets, where there is one (`KVQ_SHARED_DATA`, or `shared/data` beside the checkout)."""
    given = os.environ.get("KVQ_SHARED_DATA")
    folder = Path(given) if given else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs real data sets; {folder.name} not found (set KVQ_SHARED_DATA)")
    return folder

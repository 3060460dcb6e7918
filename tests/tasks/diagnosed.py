"""What a diagnostic task needs of a run, around a random model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from kvq.config import ModelConfig
from kvq.config.run import CacheConfig
from kvq.models.inputs import Inputs
from kvq.models.load import LoadedModel
from kvq.results.files import Journal
from tests.random_models import VOCABULARY, random_llama, token_ids


class DiagnosedInputs(Inputs):
    """Inputs of a random llama of 2 layers, 2 KV heads and head_dim 32, or of another model, on random tokens."""

    def __init__(self, task: Any, loaded: LoadedModel | None = None, path: str = "random") -> None:
        model = ModelConfig(name="random", path=path, bos=False)
        self.config: Any = SimpleNamespace(task=task, model=model, cache=CacheConfig())
        self._loaded = loaded

    @property
    def model(self) -> LoadedModel:
        self._loaded = self._loaded or random_llama()
        return self._loaded

    @property
    def tokens(self) -> Any:
        return SimpleNamespace(streams=[self.ids], fingerprint="random tokens")

    @property
    def ids(self) -> Tensor:
        return token_ids(400)[0] % VOCABULARY

    @property
    def head_dims(self) -> list[int]:
        return [32]

    @property
    def longest_context(self) -> int | None:
        return 512 if self.reads_weights else super().longest_context


def journal(folder: Path) -> Journal:
    return Journal(folder / "journal.jsonl", "test")


class InThisProcess:
    """An executor whose work is done in this process."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_: object) -> None: ...
    def submit(self, call: Callable[..., Any], *given: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*given))
        return done

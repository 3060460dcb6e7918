"""Methods: a codec for keys, a codec for values and a residual policy, built from YAML; each is a call of its name."""

from typing import Any


def __getattr__(name: str) -> Any:
    """The call of a method, such as `KIVI`; configurations are read only when something asks."""
    from kvq.methods.presets import maker

    return maker(name)

"""`kvq lm_eval --model kvq --model_args pretrained=ID,method=kivi,bits=2 --tasks ...`: lm-eval's own command line.

Every option is lm-eval's; the model `kvq` answers through a quantized cache, as `task=lm_eval` does. Its
arguments: `pretrained`, a hub id, a folder or a model of `conf/model`; `method` and `bits`; `prefill`, whole or
chunked; `max_length`; and any other setting of a run by its name, such as `residual.size=64`.
"""

from __future__ import annotations

if __name__ == "__main__":
    from kvq.entry import enter

    enter("kvq.tasks.lm_eval_command")

import sys
from collections.abc import Sequence
from typing import Any

from lm_eval.api.registry import register_model

from kvq.calibration.fit import fitted
from kvq.config import Config
from kvq.config.explain import choices, composed
from kvq.config.tasks import Prefill
from kvq.errors import ConfigError, KvqError, printable
from kvq.methods.build import method_of
from kvq.methods.method import bind_kept_keys
from kvq.models.inputs import Inputs
from kvq.tasks.lm_eval_model import CacheLM
from kvq.tasks.reader import Reader, check_prefill


def config_of(pretrained: str | None = None, method: str = "fp16", bits: Any = None, **settings: Any) -> Config:
    """The run that the arguments of the model stand for; `pretrained` None: `settings` name the model.

    Raises:
        ConfigError: a setting that is unknown or out of range.
    """
    words = [f"method={method}", *([] if bits is None else [f"bits={bits}"])]
    if pretrained is not None:
        known = pretrained in choices()["model"]
        words += [f"model={pretrained}"] if known else ["model=hf", f"model.path={pretrained}"]
    words += [f"{name}={'null' if value is None else value}" for name, value in settings.items()]
    return composed(words)


@register_model("kvq")
class MethodLM(CacheLM):
    """The model `kvq` of lm-eval.

    Args:
        pretrained: hub id or folder, or a model of `conf/model`; None: `model` among the settings.
        method: a method of `conf/method`.
        bits: as on kvq's command line.
        prefill: `whole` or `chunked`, which is the default of `task=lm_eval` too.
        max_length: longest context in tokens; None: the model's own.
        batch_size: contexts that are answered together; `auto`: as `kvq.tasks.items` chooses.
        max_batch_size: is not needed; lm-eval gives it to every model.
        device: `cpu`, or one that torch names; lm-eval asks for `cuda:0` where nothing is said, which is then any.
        settings: any other setting of a run.

    Raises:
        ConfigError: a setting that is unknown or out of range.
        Unsupported: a method that cannot do the bits, the model or the prefill.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        method: str = "fp16",
        bits: Any = None,
        prefill: str = "chunked",
        max_length: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        del max_batch_size
        config = config_of(pretrained, method, bits, device="cpu" if device == "cpu" else "auto", **settings)
        if prefill not in Prefill.__members__:
            raise ConfigError(f"prefill={prefill}: {' or '.join(Prefill)}")
        inputs = Inputs(config)
        built = method_of(config, *inputs.head_dims)
        check_prefill(built, Prefill(prefill))
        if built.kept_keys is not None:
            built = bind_kept_keys(built, inputs.tokenizer)
        if built.is_calibrated:
            built, _ = fitted(inputs, built)
        reader = Reader(inputs.model, built, Prefill(prefill), config.cache.keep_decoded)
        rows = int(str(batch_size)) if str(batch_size).isdecimal() else None
        longest = inputs.longest_context if max_length is None else max_length
        super().__init__(reader, inputs.tokenizer, rows, longest, seed=config.seed, bos=inputs.bos)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run lm-eval's command line and return 0; 2: settings that the model `kvq` cannot take."""
    from lm_eval.__main__ import cli_evaluate

    if arguments is not None:
        sys.argv[1:] = list(arguments)
    try:
        cli_evaluate()
    except KvqError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    return 0

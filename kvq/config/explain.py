"""Choices of each configuration group, `kvq ls` and `--help`, and Hydra's errors reworded in one line."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvq.config import plugins
from kvq.config.composing import compose, resolve
from kvq.config.method import RENAMED
from kvq.config.run import Config
from kvq.errors import ConfigError, KvqError, did_you_mean, one_line

# OmegaConf asserts that a setting below null has something to be set in.
COMPOSE_ERRORS = (KvqError, HydraException, OmegaConfBaseException, ValueError, AssertionError, yaml.YAMLError)
_FEW = 10
ONE_PROCESS = "a sweep is one process; start a command for each part of it, such as method=kivi and method=nsn"
USAGE = """\
kvq measures KV-cache quantizers: one run, or a sweep with -m. Results are JSON records under results/.

  python run.py method=nsn bits=3                           one run
  python run.py -m method=nsn,oscar,kivi bits=2,3,4         a sweep; runs that are done are skipped
  python run.py -m method=kivi bits=2,k4v2 plan=true        what is done, stale, pending or unsupported; starts nothing
  python run.py method=nsn method.key.stages.norm=null      an ablation; any setting can be given this way
  python run.py method=kivi residual=none task=ppl/nsn      another residual, another protocol
  python run.py model=hf model.path=<hub id or folder>      any llama-shaped model
  python run.py --config-dir=mine method=my_method          methods, tasks, data sets of your own (docs/extend.md)
  python run.py +experiment=nsnquant/table5 model=tiny      a paper's table in small; without model= it is the paper's
  python run.py --cfg job method=oscar                      print the configuration and stop
  python run.py ls methods [word]                           what there is to choose; also models, tasks, experiments
  make tables                                               tables of all results; also python run.py report --print
  make report                                               one page of all results, results/report.html

Where the package is installed, `kvq` and `python -m kvq` stand for `python run.py`; other commands of it are report,
papers, figures, html and wandb. bits is 3, k3v2 (keys 3, values 2) or {key: 3, value: 2}. KVQ_DEBUG=1 shows
tracebacks, --hydra-help Hydra's flags."""


def choices(config_dir: str | Path | None = None) -> dict[str, dict[str, str]]:
    """Group -> choice -> its one-line description; presets are named with a slash."""
    found: dict[str, dict[str, str]] = {}
    for choice in sorted(plugins.all_choices(config_dir), key=lambda choice: (choice.group, *choice.name.split("/"))):
        found.setdefault(choice.group, {})[choice.name] = choice.about
    return found


def setting_of(override: str) -> str:
    """The setting that an override gives a value: `model.path` of `+model.path=x`, `dataset` of `~dataset`."""
    return re.split(r"[=@]", override.lstrip("+~"), maxsplit=1)[0]


def composed(words: Sequence[str], config_dir: str | Path | None = None) -> Config:
    """The resolved configuration of overrides, as `compose` and `resolve` give it."""
    try:
        with plugins.using(plugins.folder_in_use(config_dir)):
            return resolve(compose(words, config_dir))
    except COMPOSE_ERRORS as error:
        raise ConfigError(explain(error, words, config_dir)) from error


def explain(error: Exception, overrides: Sequence[str], config_dir: str | Path | None = None) -> str:
    """Reword a composition error in one line: the setting, what was given, what is allowed."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        missing = str(error.missing_cfg_file)
        if missing.startswith("hydra/launcher/"):
            return f"hydra/launcher={missing.rpartition('/')[2]}: {ONE_PROCESS}"
        if missing.startswith("task/") and missing.endswith("_schema"):
            name = missing.removeprefix("task/").removesuffix("_schema")
            return plugins.unknown_task(name, plugins.folder_in_use(config_dir))
        group, _, name = missing.partition("/")
        return unknown_choice(group, name, config_dir) if group in choices(config_dir) else one_line(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read as setting=value; `python run.py --help` lists commands"
    if isinstance(error, AssertionError):
        below = " ".join(word for word in overrides if "." in setting_of(word))
        return f"{below}: one of these is a setting of a group that is null here or has a value of its own"
    text = str(error)
    if match := re.match(r"Could not override '([^']+)'", text):
        return _unknown_key(match[1], overrides, config_dir)
    if match := re.match(r"Error merging override (.+)", text):
        return f"{match[1]}: {_reason(error.__cause__ or error)}"
    if match := re.match(r"In '(.+?)': .*:\s+Key '(\w+)' not in '", text):
        now = f"; its name is {RENAMED[match[2]]} now" if match[2] in RENAMED else ""
        return f"{match[1]}.yaml: {match[2]}: unknown setting{now}"
    if match := re.match(r"Ambiguous value for argument '(.+?)'", text):
        return f"{match[1]}: several values need -m (a sweep)"
    if text.startswith("Config group override must be a string or a list. Got"):
        nameless = next((f"{given}: cannot be read as setting=value" for given in overrides if given[:1] == "="), None)
        return nameless or value_for_choice(overrides, config_dir) or one_line(error)
    return _reason(error.__cause__) if isinstance(error.__cause__, OmegaConfBaseException) else one_line(error)


def _reason(error: BaseException) -> str:
    """The first line of OmegaConf's message; an unknown enum value gets a suggestion."""
    first = " ".join(str(getattr(error, "msg", None) or error).splitlines()[0].split())
    match = re.search(r"Invalid value '(.+?)', expected one of \[(.+)\]", first)
    return f"{first}.{did_you_mean(match[1], match[2].split(', '))}" if match else first


def unknown_choice(group: str, name: str, config_dir: str | Path | None = None) -> str:
    """One line for a choice that a group does not have."""
    options = list(choices(config_dir).get(group, {}))
    allowed = f"one of {', '.join(options)}" if len(options) <= _FEW else f"`python run.py ls {group}` lists all"
    return f"{group}={name}: unknown {group}; {allowed}.{did_you_mean(name, options)}{plugins.failures()}"


def value_for_choice(overrides: Sequence[str], config_dir: str | Path | None = None) -> str | None:
    """One line for a group that is given a number, a list or a mapping instead of a choice; None where none is."""
    groups = choices(config_dir)
    for override in overrides:
        group, _, name = override.lstrip("+").partition("=")
        if group in groups and re.fullmatch(r"[-+\d.eE]+|true|false|null|\{.*\}|\[.*\]", name, re.IGNORECASE):
            return unknown_choice(group, name, config_dir)
    return None


def _values_of(override: str) -> list[str]:
    """`setting=value` for each value of a sweep `setting=a,b`."""
    name, _, value = override.partition("=")
    return [override] if value[:1] in tuple("[{'\"") else [f"{name}={one}" for one in value.split(",")]


def _unknown_key(key: str, overrides: Sequence[str], config_dir: str | Path | None) -> str:
    """The error line for a setting that no schema has, with the settings beside it and the most similar name."""
    groups = choices(config_dir)
    if key in groups:
        given = next((o.partition("=")[2] for o in overrides if o.partition("=")[0] == key), "...")
        if given not in groups[key] and given != "...":
            return unknown_choice(key, given, config_dir)
        return f"{key}={given}: not among the defaults; add it with +{key}={given}"
    parent, _, last = key.rpartition(".")
    beside: list[str] = []
    found, swept, rest = None, "", [override for override in overrides if setting_of(override) != key]
    for words in itertools.islice(itertools.product(*map(_values_of, rest)), _FEW):  # the first that lacks the setting
        with contextlib.suppress(*COMPOSE_ERRORS):  # of another override
            config = compose(words, config_dir)
            found = OmegaConf.select(config, parent) if parent else config
            beside, own = list(map(str, found or {})), f"{key.partition('.')[0]}="
            swept = next((f" with {word}" for word in words if word.startswith(own) and word not in rest), "")
            if last not in beside:
                break
    hint = did_you_mean(last, [*beside, *([] if parent else groups)])
    allowed = "." if found is None else f"; {parent or 'the top level'} has {', '.join(beside) or 'none'}."
    if parent and any(override.startswith("+experiment=") for override in overrides):
        allowed += f" A setting that all runs of the experiment have: ++{key}=..."
    return f"{key}: unknown setting{swept}{allowed}{hint}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="kvq ls", description="List the choices of a group, one a line.")
    parser.add_argument("group", nargs="?", help="methods, models, tasks, experiments, ...; none: all groups")
    parser.add_argument("word", nargs="?", default="", help="only choices whose name or description has it")
    plugins.add_option(parser)
    given = parser.parse_args(arguments)
    try:
        with plugins.using(given.config_dir):
            print(overview() if given.group is None else list_choices(given.group, given.word))
    except KvqError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def list_choices(group: str, word: str = "") -> str:
    """One line of text, name and description, per choice of a group (`method` or `methods`) that has `word`."""
    known = choices()
    name = group if group in known else group.removesuffix("s")
    if name not in known:
        raise ConfigError(f"ls {group}: unknown group; one of {', '.join(known)}.{did_you_mean(name, known)}")
    found = {one: said for one, said in known[name].items() if word.lower() in f"{one} {said}".lower()}
    if not found:
        raise ConfigError(f"ls {group} {word}: no {name} has this word.{did_you_mean(word, known[name])}")
    width = max(map(len, found))
    return "\n".join(f"{one:<{width}}  {said}".rstrip() for one, said in found.items())


def overview() -> str:
    """Every group: the number of its choices and their names, of presets (`kivi/sink`) what they are presets of."""
    lines = ["choices, of which `kvq ls GROUP [WORD]` lists each with its description:"]
    for group, names in choices().items():
        prefix = "+" if group == "experiment" else ""
        stems = dict.fromkeys(name.partition("/")[0] for name in names)
        shown = ", ".join(f"{stem}/" if stem not in names else stem for stem in stems)
        lines.append(f"\n{prefix}{group}=  ({len(names)})")
        lines += textwrap.wrap(shown, 110, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)

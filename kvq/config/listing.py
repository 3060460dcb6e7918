"""`kvq ls` and `--help`: what there is to choose, by group."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence

from kvq.config import outside
from kvq.config.explain import choices
from kvq.errors import ConfigError, KvqError, did_you_mean

_WIDTH = 110


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="kvq ls", description="List the choices of a group, one a line.")
    parser.add_argument("group", nargs="?", help="methods, models, tasks, experiments, ...; none: all groups")
    parser.add_argument("word", nargs="?", default="", help="only choices whose name or description has it")
    outside.add_option(parser)
    given = parser.parse_args(arguments)
    try:
        with outside.using(given.config_dir):
            print(overview() if given.group is None else listed(given.group, given.word))
    except KvqError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def listed(group: str, word: str = "") -> str:
    """Choices of a group (`method` or `methods`) whose name or description has a word, each with its description.

    Raises:
        ConfigError: a group that there is none of, or a word that no choice has.
    """
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
        lines += textwrap.wrap(shown, _WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def help_text() -> str:
    """The help page: common commands, and the groups of choices."""
    return f"{_USAGE}\n\n{overview()}"


_USAGE = """\
kvq measures KV-cache quantizers: one run, or a sweep with -m. Results are JSON records under results/.

  python run.py method=nsn bits=3                           one run
  python run.py -m method=nsn,oscar,kivi bits=2,3,4         a sweep; runs that are done are skipped
  python run.py -m method=kivi,nsn hydra/launcher=joblib    in parallel; also submitit_local, submitit_slurm, ray
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
papers, figures, html, diff and wandb. bits is 3, k3v2 (keys 3, values 2) or {key: 3, value: 2}. KVQ_DEBUG=1 shows
tracebacks, --hydra-help Hydra's flags."""

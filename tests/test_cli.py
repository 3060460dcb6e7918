"""The command line: what is refused in one line, what a sweep does, and what is left behind."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvq import cli
from kvq.config import explain
from kvq.config.explain import choices
from kvq.errors import DataError

REPOSITORY = Path(__file__).resolve().parents[1]
KNOWN = choices()

MEASURED = SimpleNamespace(status="done", reason=None)
UNSUPPORTED = SimpleNamespace(status="unsupported", reason="bits=7: not today")


class FakeRunner:
    """Stands for `kvq.runs`; keeps the calls.

    `bits=7` is unsupported, `seed=7` fails, `seed=8` is a bug.
    """

    def __init__(self):
        self.calls = []

    def Sweep(self, total):
        return self.shown("sweep", total)

    def SweepPlan(self):
        return self.shown("plan")

    def shown(self, *what):
        self.calls.append(what)
        return SimpleNamespace(
            add=lambda config, record="planned": self.calls.append(("add", config.method.name, config.bits, record)),
            finish=lambda: self.calls.append(("finish",)),
        )

    def run(self, config, words=None, baselines=None):
        if config.bits == 7:
            return UNSUPPORTED
        if config.seed == 7:
            raise DataError("dataset.path=none: not found")
        if config.seed == 8:
            raise ZeroDivisionError("division by zero")
        return MEASURED


@pytest.fixture
def runner(monkeypatch, tmp_path):
    fake = FakeRunner()
    monkeypatch.setattr(cli, "_measuring", lambda: fake)
    monkeypatch.delenv("KVQ_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    return fake


REFUSED = [  # tests/test_bad_input.py has many more
    (["method=nns"], 2, "method=nns: unknown method; .*Did you mean 'nsn'"),
    (["model=hf"], 1, "model.path has no value"),
    (["bits=7"], 1, "bits=7: not today"),
    (["seed=7"], 1, "dataset.path=none: not found"),
]


@pytest.mark.parametrize(("argv", "code", "says"), REFUSED, ids=lambda given: str(given))
def test_one_clear_line_and_a_non_zero_exit(runner, capsys, argv, code, says):
    assert cli.main(argv) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")
    assert re.search(says, err)
    assert code == 1 or runner.calls == []


def test_a_run_or_a_sweep_counts_its_jobs_and_ends_with_its_table(runner, capsys):
    assert cli.main(["method=kivi", "bits=2"]) == 0
    one = [("sweep", 1), ("add", "kivi", 2, MEASURED), ("finish",)]
    assert runner.calls == one
    assert cli.main(["-m", "method=nsn,kivi", "bits=2,k4v2", "seed=1"]) == 0
    runs = [("add", method, bits, MEASURED) for method in ("nsn", "kivi") for bits in (2, "k4v2")]
    assert runner.calls == [*one, ("sweep", 4), *runs, ("finish",)]
    assert capsys.readouterr() == ("", "")


def test_flags_may_stand_between_overrides(runner):
    assert cli.main(["bits=2", "-m", "method=kivi,nsn", "--config-dir", ".", "seed=1"]) == 0
    assert [call[1] for call in runner.calls if call[0] == "add"] == ["kivi", "nsn"]


def test_the_default_experiment_sweeps_on_its_own_and_yields_to_the_command_line(runner):
    assert cli.main(["+experiment=main", "method=kivi"]) == 0
    assert runner.calls == [("sweep", 3), *(("add", "kivi", bits, MEASURED) for bits in (2, 3, 4)), ("finish",)]


def test_a_failing_job_does_not_stop_later_ones(runner, capsys):
    assert cli.main(["-m", "method=kivi", "seed=7,8,9"]) == 1
    records = [call[3] for call in runner.calls if call[0] == "add"]
    assert records == [None, None, MEASURED]
    assert runner.calls[-1] == ("finish",)
    err = capsys.readouterr().err
    assert "error: method=kivi seed=7: dataset.path=none: not found" in err
    assert "error: method=kivi seed=8: ZeroDivisionError: division by zero" in err
    assert err.count("Traceback") == 1


def test_no_folders_of_hydra_and_no_changed_environment(runner, tmp_path):
    before = dict(os.environ), list(sys.argv)
    cli.main(["-m", "method=kivi", "bits=2,3"])
    cli.main(["method=kivi"])
    assert list(tmp_path.iterdir()) == []
    assert (dict(os.environ), list(sys.argv)) == before


def test_debug_shows_the_traceback(runner, monkeypatch, capsys):
    monkeypatch.setenv("KVQ_DEBUG", "1")
    assert cli.main(["method=nns"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_bits_that_the_method_cannot_do_are_refused_before_anything_is_imported(runner, monkeypatch, capsys):
    assert cli.main(["-m", "method=nsn", "bits=11,3,k2v9"]) == 1
    assert [call for call in runner.calls if call[0] == "add"] == [("add", "nsn", 3, MEASURED)]
    assert capsys.readouterr().err.splitlines() == [
        "error: method=nsn bits=11: bits=11: nsn does 2 to 8 bits",
        "error: method=nsn bits=k2v9: bits=k2v9: nsn does 2 to 8 bits for values",
    ]
    monkeypatch.setattr(cli, "_measuring", lambda: pytest.fail("imported"))
    assert cli.main(["method=nsn", "bits=11"]) == 1
    assert capsys.readouterr().err == "error: bits=11: nsn does 2 to 8 bits\n"
    assert cli.main(["-m", "method=nsn,kivi", "bits=11"]) == 1
    assert capsys.readouterr().err.count("bits=11: nsn does 2 to 8 bits") == 1


def test_methods_of_ones_own(runner, tmp_path, capsys):
    (tmp_path / "mine" / "method").mkdir(parents=True)
    text = "# My own idea.\ndefaults:\n  - /method/kivi@_here_\n  - _self_\nname: my_kivi\n"
    (tmp_path / "mine" / "method" / "my_kivi.yaml").write_text(text)
    assert cli.main(["--config-dir", "mine", "method=my_kivi"]) == 0
    assert ("add", "my_kivi", 3, MEASURED) in runner.calls
    assert cli.main(["--config-dir=mine", "method=my_kiwi"]) == 2
    assert "Did you mean 'my_kivi'" in capsys.readouterr().err
    assert explain.main(["--config-dir=mine", "methods"]) == 0
    assert "My own idea." in capsys.readouterr().out


def test_help_fits_a_screen_and_names_every_group(capsys):
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 70
    assert max(map(len, lines)) <= 120
    for group, names in KNOWN.items():
        assert any(line.lstrip("+").split() == [f"{group}=", f"({len(names)})"] for line in lines)


@pytest.mark.parametrize("group", list(KNOWN))
def test_ls_lists_every_choice_with_its_description(group, capsys):
    for name in (group, f"{group}s"):
        assert explain.main([name]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.partition(" ")[0] for line in lines] == list(KNOWN[group])
        assert all(said in line for line, said in zip(lines, KNOWN[group].values(), strict=True))


def test_ls_with_a_word_and_with_none_that_fits(capsys):
    assert explain.main(["methods", "KVTuner"]) == 0
    assert capsys.readouterr().out.split()[0] == "kivi/kvtuner"
    assert explain.main([]) == 0
    assert "method=  (" in capsys.readouterr().out
    assert explain.main(["metods"]) == explain.main(["methods", "no such"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("error: ls metods: unknown group; one of ")
    assert said[0].endswith("Did you mean 'method'?")
    assert said[1].startswith("error: ls methods no such: no method has this word.")


def test_a_mistyped_name_is_answered_before_torch_is_imported():
    """Also the one test of `run.py` as a process."""
    code = (
        "import sys, runpy; sys.argv = ['run.py', 'method=nns']\n"
        "try:\n    runpy.run_path('run.py', run_name='__main__')\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
    assert done.stderr.startswith("error: method=nns: unknown method")

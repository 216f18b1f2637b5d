from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest

import lineattn
from lineattn.cli import main as command
from lineattn.cli.main import TASK_VERBS, TASKS, VERBS, main
from lineattn.cli.models import Cost, plain_cost, timm_cost
from lineattn.errors import InputError


def _spent(*args):
    """CPU seconds of the command in a process of its own, which a busy machine stretches less than the clock's."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "lineattn", *args], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["fit", "--help"], ["sweep", "--help"]])
def test_help_and_version_import_nothing_heavy(args):
    shown, seconds = _spent(*args)
    assert shown and seconds < 0.5


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lineattn {lineattn.__version__}\n"
    assert main([]) == main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*VERBS, *TASK_VERBS, *TASKS))


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_has_a_help(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    assert f"lineattn {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["fti", "cls"], "unknown command 'fti': did you mean 'fit'?"),
        (["fit", "csl"], "unknown task 'csl': did you mean 'cls'?"),
        (["show", "kcal"], "unknown method or network 'kcal': did you mean 'kcla'"),
        (["models", "resnext99*"], "no network or method fits 'resnext99*'"),
        (["show", "kcla", "--attn", "kcla"], "kcla is a method"),
    ],
)
def test_unknown_names_are_one_line(args, part, capsys):
    assert main(args) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("lineattn: ") and shown.err.count("\n") == 1
    assert part in shown.err and not shown.out


def test_a_task_is_missing(capsys):
    assert main(["fit"]) == 2
    assert "cls" in capsys.readouterr().out


def _raising(monkeypatch, error):
    def run(args):
        raise error

    monkeypatch.setattr(command, "import_module", lambda name: SimpleNamespace(run=run))


@pytest.mark.parametrize(
    ("error", "code", "part"),
    [
        (InputError("photos/: no such folder"), 2, "photos/: no such folder"),
        (OSError(errno.ENOSPC, "No space left on device", "a.csv"), 2, "the disk is full, writing a.csv"),
        (KeyboardInterrupt("stopped at step 3"), 130, "stopped at step 3"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_a_user_can_mend_is_one_line(error, code, part, capsys, monkeypatch):
    _raising(monkeypatch, error)
    assert main(["models"]) == code
    shown = capsys.readouterr().err
    assert part in shown and shown.count("\n") == 1


def test_a_full_disk_behind_another_error(capsys, monkeypatch):
    error = RuntimeError("file write failed")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    _raising(monkeypatch, error)
    assert main(["models"]) == 2
    assert "the disk is full" in capsys.readouterr().err


def test_programming_errors_stay_exceptions(monkeypatch):
    _raising(monkeypatch, ZeroDivisionError("ours to mend"))
    with pytest.raises(ZeroDivisionError):
        main(["models"])


def test_a_reader_that_leaves_is_no_error():
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([sys.executable, "-m", "lineattn", "--help"], stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert done.stderr == b""


def test_passive_threads_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    main(["--version"])
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    main(["--version"])
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_models_lists_networks_and_methods(capsys, monkeypatch):
    monkeypatch.setattr("lineattn.cli.models.plain_cost", lambda name: Cost(1, 2, 3))
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*lineattn.list_models(), *lineattn.list_methods("depth")))
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if line}
    assert lines["kcla"][1:5] == ["O(L)", "O(1)", "output", "2606.28405"]
    assert lines["metala"][1:7] == ["O(T)", "O(1)", "query,", "value,", "decay", "2411.10741"]
    assert lines["mrla_light"][3] == "output+shortcut" and lines["se"][3] == "branch"


@pytest.mark.medium
def test_models_by_pattern(capsys):
    assert main(["models", "resnet20_bottleneck*"]) == 0
    shown = capsys.readouterr().out
    assert "resnet20_bottleneck_cifar" in shown and "220,378" in shown and "resnet110" not in shown
    assert "layer_softmax" in shown  # what the networks found can take

    assert main(["models", "resnet18_k*"]) == 0
    shown = capsys.readouterr().out
    plain, macs, side = plain_cost("timm/resnet18")
    found, more, _ = timm_cost("resnet18_kcla")
    assert found > plain and more > macs and side == 224
    assert "registered by lineattn.timm" in shown and f"{found:,}" in shown and f"{more / 1e6:,.1f}" in shown

    assert main(["models", "timm/resnet18"]) == 0
    assert f"{plain:,}" in capsys.readouterr().out
    assert main(["models", "kcla*"]) == 0
    shown = capsys.readouterr().out
    assert "kcla_decay" in shown and "networks" not in shown


def test_a_network_that_cannot_be_counted_does_not_end_the_list(capsys, monkeypatch):
    def fail(name):
        raise NotImplementedError

    monkeypatch.setattr("lineattn.cli.models.plain_cost", fail)
    assert main(["models", "resnet*_cifar"]) == 0
    assert "NotImplementedError" in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_an_option_is_not_guessed_from_its_beginning(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        main([verb, *["x"] * (verb in ("show", "compare")), *["depth"] * (verb == "bench"), "--hel"])
    assert stop.value.code == 2
    assert "usage: lineattn" in capsys.readouterr().err


@pytest.mark.medium
def test_show_a_method_and_a_network(capsys):
    assert main(["show", "kcla"]) == 0
    shown = capsys.readouterr().out
    assert "Key-Correlated Layer Attention" in shown and "arXiv" in shown and "m_t = " in shown and "O(L)" in shown
    assert "start " not in shown
    assert main(["show", "metala"]) == 0
    assert "made of query: input, key: 1 - decay, value: input, decay: input" in capsys.readouterr().out
    assert main(["show", "se"]) == 0
    assert "start   with init='paper' the network starts changed: each block's branch" in capsys.readouterr().out
    assert main(["show", "resnet20_bottleneck_cifar", "--attn", "kcla"]) == 0
    shown = capsys.readouterr().out
    assert "220,378 parameters" in shown and "with kcla behind 6 blocks" in shown

from __future__ import annotations

import os
import socket
from urllib.error import HTTPError, URLError

import pytest

from lineattn.cli import doctor
from lineattn.cli.main import main


@pytest.fixture
def offline(monkeypatch):
    def refuse(request, timeout):
        raise URLError("no network")

    monkeypatch.setattr(doctor, "urlopen", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.mark.medium
def test_one_screen_and_all_is_well(capsys, offline):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 40
    found = {line[6:24].strip(): line for line in lines}
    for name in ("lineattn", "torch", "timm", "onnxruntime", "torchvision's nms", "a training step", "threads", "disk"):
        assert found[name].startswith("ok"), found[name]
    assert "offline" in found["network"] and "give paths" in found["network"]
    assert os.environ["OMP_WAIT_POLICY"] in found["threads"]


def _only(monkeypatch, *checks):
    monkeypatch.setattr(doctor, "_checks", lambda: iter(checks))


@pytest.mark.parametrize(("needed", "code", "mark"), [(True, 1, "FAIL"), (False, 0, "--")])
def test_what_is_broken_is_one_line(needed, code, mark, capsys, monkeypatch):
    def broken():
        raise OSError("libcudart.so.99:\ncannot open shared object file")

    _only(monkeypatch, ("onnx", broken, needed))
    assert main(["doctor"]) == code
    first, last = capsys.readouterr().out.splitlines()
    assert first.split(None, 1) == [
        mark,
        "onnx                OSError: libcudart.so.99: cannot open shared object file",
    ]
    assert last.startswith("training works" if code == 0 else "training can't work")


def test_a_broken_package_is_imported_to_find_out(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("raise AttributeError('built for another numpy')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "2.0")
    assert doctor._try(lambda: doctor._package("broken-package>=1.0", "demo")) == (
        "FAIL",
        "AttributeError: built for another numpy",
    )


@pytest.mark.parametrize(
    ("spec", "extra", "part"),
    [
        ("no-such-package>=1", "export", "not installed: pip install 'lineattn[export]'"),
        ("numpy>=99.1", None, "where >=99.1 is needed: pip install lineattn"),
        ("numpy>=1,<1.5", None, "where <1.5 is needed"),
    ],
)
def test_what_is_missing_or_too_old_comes_with_the_command(spec, extra, part):
    mark, text = doctor._try(lambda: doctor._package(spec, extra))
    assert mark == "FAIL" and part in text


def test_versions_are_numbers_not_text():
    assert doctor._numbers("2.14.1+cpu") == (2, 14, 1) > doctor._numbers("2.8")
    assert doctor._name("timm>=1.0.20,<2") == "timm" and doctor._name("jsonargparse[signatures]>=4") == "jsonargparse"


def test_optional_packages_name_the_extra_that_brings_them():
    packages = {doctor._name(spec): extra for spec, extra in doctor._packages()}
    assert packages["torch"] is None and packages["scikit-learn"] == "demo" and packages["onnx"] == "export"
    assert "pytest" not in packages and "lineattn" not in packages


def test_the_network(monkeypatch, offline):
    assert doctor._network().startswith("offline")
    monkeypatch.setattr(doctor, "urlopen", lambda request, timeout: socket.socket())
    assert doctor._network() == "https://huggingface.co answers"

    def forbidden(request, timeout):
        raise HTTPError(request.full_url, 403, "no", None, None)

    monkeypatch.setattr(doctor, "urlopen", forbidden)
    assert doctor._network().endswith("answers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert doctor._network().startswith("HF_HUB_OFFLINE=1")


def test_a_full_disk_is_said(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: type("Usage", (), {"free": 1000}))
    mark, text = doctor._try(doctor._disk)
    assert mark == "FAIL" and "GiB free here" in text

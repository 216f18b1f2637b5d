"""What ``LINEATTN_NATIVE`` does, what passes the door to raw pointers, and when the kernels are not asked at all."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import lineattn
from lineattn.errors import InputError
from lineattn.ops import native

kernels = pytest.mark.skipif(not native.enabled, reason="no native kernels")

PACKAGE = Path(lineattn.__file__).parent
# One call of a kernel on two threads, or of PyTorch in its place.
CALL = (
    "import torch; from lineattn.ops import native; from lineattn.ops.scan import scan; torch.set_num_threads(2); "
    "scan(*(torch.ones(2, 9, 3, 4) for _ in range(3)), torch.zeros(2, 9, 3)); "
)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def unbuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package where nothing was compiled, for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("unbuilt")
    shutil.copytree(PACKAGE, folder / "lineattn", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the library is looked for now; nothing is there yet."""
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    return tmp_path / "_kernels.so"


@pytest.mark.medium
def test_off_computes_in_pytorch() -> None:
    done = python(CALL + "print(native.status(), native.enabled, native.instructions())", LINEATTN_NATIVE="off")
    assert (done.stdout, done.stderr) == ("off: LINEATTN_NATIVE=off False []\n", "")


@pytest.mark.medium
@kernels
def test_required_and_there() -> None:
    done = python(CALL + "print(native.status())", LINEATTN_NATIVE="require")
    assert (done.stdout, done.stderr) == (f"on: {native.instructions()[0]}\n", "")


@pytest.mark.medium
def test_without_a_library_pytorch_computes(unbuilt: Path) -> None:
    code = CALL + "print(native.__file__); print(native.status())"
    done = python(code, PYTHONPATH=str(unbuilt), LINEATTN_NATIVE="auto")
    file, status = done.stdout.splitlines()
    assert Path(file).is_relative_to(unbuilt)
    assert status.startswith("off: the kernels were not built")


@pytest.mark.medium
@pytest.mark.parametrize(("value", "args"), [("require", ["fit", "cls"]), ("sometimes", ["bench", "scan"])])
def test_the_command_line_says_it_in_one_line(value: str, args: list[str], unbuilt: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lineattn", *args],
        env=os.environ | {"LINEATTN_NATIVE": value, "PYTHONPATH": str(unbuilt)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert re.fullmatch(rf"lineattn: LINEATTN_NATIVE={value}: .+\n", done.stderr)
    assert not list(tmp_path.iterdir())


def test_required_and_missing(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINEATTN_NATIVE", "require")
    with pytest.raises(InputError, match=r"^LINEATTN_NATIVE=require: the kernels were not built \(install .*\)$"):
        native._find()
    monkeypatch.setenv("LINEATTN_NATIVE", "auto")
    assert native._find() == "the kernels were not built (install a C++ compiler, then this package again)"


@pytest.mark.parametrize("value", ["", "on", "OFF", "1"])
def test_other_values_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINEATTN_NATIVE", value)
    with pytest.raises(InputError, match=rf"^LINEATTN_NATIVE={value}: it must be one of auto, require, off$"):
        native._find()


def test_what_is_no_library_is_not_loaded(library: Path) -> None:
    library.write_text("no library")
    assert re.fullmatch(rf"{re.escape(str(library))} can't be loaded \(.+\): install .+", str(native._load()))


def test_another_library_is_not_called(library: Path) -> None:
    shutil.copy(torch._C.__file__, library)  # one that this process has already, under another name
    assert re.fullmatch(rf"{re.escape(str(library))} can't be loaded \(.+\): install .+", str(native._load()))


@kernels
def test_a_library_of_another_interface_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "INTERFACE", native.INTERFACE + 1)
    found = native._load()
    assert isinstance(found, str) and found.endswith("is of another version: install this package again")


@pytest.mark.medium
@kernels
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_openmp_runtime() -> None:
    code = (
        CALL + "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line.split()[-1]}, sep='\\n')"
    )
    done = python(code, LINEATTN_NATIVE="require")
    assert len([path for path in done.stdout.splitlines() if re.search(r"lib[gi]?omp", path)]) == 1, done.stdout


def test_the_door_gives_the_address() -> None:
    x = torch.zeros(2, 3, 4, 5, dtype=torch.float32)
    last = x.to(memory_format=torch.channels_last)
    assert native.address("x", x, (2, 3, 4, 5)) == x.data_ptr()
    assert native.address("x", x[1:], (1, 3, 4, 5)) == x.data_ptr() + 4 * 60
    assert native.address("x", last, (2, 3, 4, 5), channels_last=True) == last.data_ptr()
    assert native.address("x", None, (2, 3)) is None


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda x: x.double(), id="float64"),
        pytest.param(lambda x: x.bfloat16(), id="bfloat16"),
        pytest.param(lambda x: x.to("meta"), id="meta"),
        pytest.param(lambda x: x[:, :, :, :4], id="narrower"),
        pytest.param(lambda x: x[0], id="one less dimension"),
        pytest.param(lambda x: torch.cat([x, x]), id="more images"),
        pytest.param(lambda x: torch.stack([x, x], 4)[..., 0], id="gaps between values"),
        pytest.param(lambda x: torch.cat([x, x], 1)[:, :3], id="gaps between images"),
        pytest.param(lambda x: x[:1].expand(2, 3, 4, 5), id="an image twice"),
        pytest.param(lambda x: x.mT.contiguous().mT, id="rows and columns exchanged"),
    ],
)
def test_the_door_refuses(make: Callable[[Tensor], Tensor], channels_last: bool) -> None:
    order = torch.channels_last if channels_last else torch.contiguous_format
    x = make(torch.zeros(2, 3, 4, 5, dtype=torch.float32).to(memory_format=order))
    with pytest.raises(ValueError, match=r"^a name: ") as refused:
        native.address("a name", x, (2, 3, 4, 5), channels_last=channels_last)
    assert "\n" not in str(refused.value)


def test_the_door_refuses_the_other_order() -> None:
    x = torch.zeros(2, 3, 4, 5, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^x: strides \(60, 20, 5, 1\) are not those of a dense torch.channels_last"):
        native.address("x", x, x.shape, channels_last=True)
    with pytest.raises(
        ValueError, match=r"^x: strides \(60, 1, 15, 3\) are not those of a dense torch.contiguous_format"
    ):
        native.address("x", x.to(memory_format=torch.channels_last), x.shape)


def test_no_memory_is_an_error() -> None:
    native.check(0)
    with pytest.raises(MemoryError):
        native.check(1)


class Sub(Tensor):
    """Whatever it overrides, a kernel would pass by."""


def single(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.float32)


@kernels
def test_usable_for_plain_tensors() -> None:
    assert native.usable() and native.usable(None)
    assert native.usable(single(2), None, nn.Parameter(single(3)), single(4, 4).t())
    with torch.inference_mode():
        assert native.usable(single(2))


@kernels
@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.ones(2, dtype=torch.float64), id="float64"),
        pytest.param(torch.ones(2, dtype=torch.float16), id="float16"),
        pytest.param(single(2).as_subclass(Sub), id="subclass"),
        pytest.param(single(2).to("meta"), id="meta"),
        pytest.param(single(2, 2).to_sparse(), id="sparse"),
    ],
)
def test_unusable_tensors(tensor: Tensor) -> None:
    assert not native.usable(tensor)
    assert not native.usable(single(2), None, tensor)


@pytest.mark.medium
@kernels
@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:FutureWarning")
def test_unusable_while_somebody_watches() -> None:
    answers: list[bool] = []

    def ask(x: Tensor) -> Tensor:
        answers.append(native.usable(single(2)))
        return 2 * x

    with FlopCounterMode(display=False):
        ask(single(2))
    torch.func.vmap(ask)(single(2, 2))
    torch.func.grad(lambda x: ask(x).sum())(single(2))
    with forward_ad.dual_level():
        ask(single(2))
    torch.jit.trace(ask, single(2), check_trace=False)
    assert answers == [False] * 5
    ask(single(2))
    assert answers.pop()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=range(len(native.instructions())), ids=native.instructions())
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    native.library().lineattn_choose(request.param)
    yield
    native.library().lineattn_choose(0)


@kernels
@pytest.mark.usefixtures("threads", "instructions")
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1),
        (2, 3, 1, 1),
        (3, 1, 5, 7),
        (2, 5, 3, 1),
        (1, 16, 4, 4),
        (3, 17, 5, 13),
        (2, 65, 7, 9),
        (2, 130, 8, 8),
    ],
)
def test_both_orders(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float32)
    last = x.to(memory_format=torch.channels_last)
    for found, order in (
        (native.channels_last(x), torch.channels_last),
        (native.contiguous(last), torch.contiguous_format),
    ):
        assert torch.equal(found, x)
        assert found.is_contiguous(memory_format=order)
    assert native.channels_last(last) is last
    assert native.contiguous(x) is x


@kernels
def test_neither_order_is_refused() -> None:
    x = torch.randn(2, 6, 4, 5, dtype=torch.float32)[:, ::2]
    with pytest.raises(ValueError, match="strides"):
        native.channels_last(x)
    with pytest.raises(ValueError, match="strides"):
        native.contiguous(x)

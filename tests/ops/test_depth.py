from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from lineattn.ops.depth import Norm, accumulate, attend, attend_folded, attend_plain, mix, running_mean

B, C, HEADS, H, W = 2, 4, 2, 3, 4

OPTIONS = list(itertools.product((True, False), repeat=4))  # value, gate, shortcut, relu
training = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
scaled = pytest.mark.parametrize(("gain", "drop"), list(itertools.product((True, False), repeat=2)))


def arguments(*, value=True, gate=True, shortcut=True, gain=True, drop=True) -> dict[str, Tensor]:
    """Tensors for `attend`; all but the drop path, which is a draw, take a gradient."""
    given = {"x": torch.randn(B, C, H, W), "read": torch.randn(B, C, H, W)}
    given |= {"value": torch.randn(C, 1, 3, 3)} if value else {}
    given |= {"gate": torch.randn(B, C)} if gate else {}
    given |= {"shortcut": torch.randn(B, C, H, W), "decay": torch.randn(C)} if shortcut else {}
    given |= {"gain": torch.randn(C)} if gain else {}
    given |= {"weight": torch.randn(C), "bias": torch.randn(C)}
    given = {name: t.requires_grad_() for name, t in given.items()}
    return given | ({"drop": torch.tensor([0.0, 1.25])} if drop else {})


def call(function: Any, given: dict[str, Tensor], relu: bool, training: bool, norm: Norm | None = None) -> Tensor:
    rest = {name: given.get(name) for name in ("gain", "drop", "shortcut", "decay")}
    if norm is None:
        stats = torch.linspace(-1, 1, C).to(given["weight"]), torch.linspace(0.5, 2, C).to(given["weight"])
        norm = Norm(given["weight"], given["bias"], *stats, training, 0.1, 1e-5)
    return function(given["x"], given["read"], given.get("value"), given.get("gate"), norm, relu=relu, **rest)


def gradients(out: Tensor, given: dict[str, Tensor], cotangent: Tensor, **kw: Any) -> list[Tensor]:
    return list(torch.autograd.grad(out, [t for t in given.values() if t.requires_grad], cotangent, **kw))


def close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> bool:
    return all((f - e).abs().max() <= tolerance * max(1, e.abs().max()) for f, e in zip(found, expected, strict=True))


@scaled
@training
def test_attend_is_attend_plain(gain: bool, drop: bool, training: bool):
    for value, gate, shortcut, relu in OPTIONS:
        given = arguments(value=value, gate=gate, shortcut=shortcut, gain=gain, drop=drop)
        found, expected = (call(f, given, relu, training) for f in (attend, attend_plain))
        cotangent = torch.randn_like(found)
        assert close([found], [expected], 1e-13)
        assert close(gradients(found, given, cotangent), gradients(expected, given, cotangent), 1e-11)


@training
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("check", [gradcheck, pytest.param(gradgradcheck, marks=pytest.mark.medium)])
def test_derivatives_of_attend(check: Any, scale: bool, training: bool):
    for value, gate, shortcut, relu in OPTIONS:
        given = arguments(value=value, gate=gate, shortcut=shortcut, gain=scale, drop=scale)
        names = [name for name in given if name != "drop"]

        def function(*tensors: Tensor, names=names, given=given, relu=relu) -> Tensor:
            return call(attend, given | dict(zip(names, tensors, strict=True)), relu, training)

        assert check(function, [given[name] for name in names], fast_mode=True)


@training
@pytest.mark.parametrize("read", [lambda x: x, torch.sin], ids=["x itself", "of x"])
def test_arguments_that_come_from_one_another(read: Any, training: bool):
    """As in a chain; each path counts once, in the backward that can be differentiated again too."""
    given = arguments()
    tied = given | {"read": read(given["x"]), "gate": given["gate"] * given["x"].mean((2, 3))}
    free = {name: tensor for name, tensor in given.items() if name != "read"}
    out, plain = (call(f, tied, True, training) for f in (attend, attend_plain))
    cotangent = torch.randn_like(out)
    expected = gradients(plain, free, cotangent, retain_graph=True)
    assert close(gradients(out, free, cotangent, retain_graph=True), expected, 1e-11)
    assert close(gradients(out, free, cotangent, create_graph=True), expected, 1e-11)


@training
@pytest.mark.parametrize("wanted", [name for name in arguments() if name != "drop"])
def test_one_gradient_alone(wanted: str, training: bool):
    """A frozen backbone or a frozen method: what is asked for stays the same."""
    given = arguments()
    cotangent = torch.randn(B, C, H, W)
    out = call(attend, given, True, training)
    (expected,) = torch.autograd.grad(out, given[wanted], cotangent)
    frozen = {name: t.detach().requires_grad_(name == wanted) for name, t in given.items()}
    call(attend, frozen, True, training).backward(cotangent)
    assert torch.equal(frozen[wanted].grad, expected)


def test_the_backward_uses_the_statistics_of_its_forward():
    """Evaluation, then a training step that moves the running statistics in place, then the first one's backward."""
    given, cotangent = arguments(), torch.randn(B, C, H, W)
    norm = Norm(given["weight"], given["bias"], torch.zeros(C), torch.ones(C), False, 0.1, 1e-5)
    expected = gradients(call(attend, given, True, False, norm), given, cotangent)
    out = call(attend, given, True, False, norm)
    call(attend, given, True, True, norm._replace(training=True))
    assert not torch.equal(norm.running_mean, torch.zeros(C))
    assert close(gradients(out, given, cotangent), expected, 0)


@training
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_leaves_attend_alone(dtype: torch.dtype, training: bool):
    """The types of the arguments decide, in a backward inside the autocast region too."""
    given = {name: t.detach().to(dtype).requires_grad_(t.requires_grad) for name, t in arguments().items()}
    out = call(attend, given, True, training)
    cotangent = torch.randn_like(out)
    expected = gradients(out, given, cotangent)
    with torch.autocast("cpu", torch.bfloat16):
        inside = call(attend, given, True, training)
        found = gradients(inside, given, cotangent)
    assert torch.equal(inside, out) and all(map(torch.equal, found, expected))


@pytest.mark.medium  # PyTorch imports much for its first meta kernel
def test_meta_tensors_have_shapes():
    given = {name: t.detach().to("meta") for name, t in arguments().items()}
    assert call(attend, given, True, False).shape == (B, C, H, W)


def test_one_value_a_channel_has_no_statistics():
    given = arguments(gate=False, shortcut=False, drop=False)
    given |= {"x": torch.randn(1, C, 1, 1), "read": torch.randn(1, C, 1, 1)}
    norm = Norm(given["weight"], given["bias"], torch.zeros(C), torch.ones(C), True, 0.1, 1e-5)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        call(attend, given, True, True, norm)
    assert torch.equal(norm.running_var, torch.ones(C))


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_attend_folded(relu: bool, turned: bool):
    given = arguments(shortcut=False, drop=False, gain=False)
    sign = torch.tensor([1.0, -1.0, 0.0, 1.0], dtype=torch.float64) if turned else None
    norm = Norm(torch.ones(C), given["bias"], torch.zeros(C), torch.ones(C), False, 0.1, 0.0)
    expected = call(attend_plain, given | ({"gain": sign} if turned else {}), relu, False, norm)
    scale = None if sign is None else sign[None]
    parts = (given[name] for name in ("x", "read", "value", "gate", "bias"))
    found = attend_folded(*parts, relu=relu, scale=scale)
    assert close([found], [expected], 1e-13)


def test_running_mean_of_log_weights_is_the_weighted_mean():
    """The naive quotient, where nothing overflows: spec section 9, point 2."""
    maps, scores = torch.randn(6, B, C, H, W), 5 * torch.randn(6, B, HEADS)
    mean, log_norm = maps[0], scores[0]
    for t in range(1, 6):
        log_norm, share = accumulate(log_norm, scores[t])
        mean = running_mean(mean, maps[t], share)
        weights = scores[: t + 1].exp()
        assert close([log_norm.exp(), share], [weights.sum(0), weights[-1] / weights.sum(0)], 1e-13)
        weights = weights.repeat_interleave(C // HEADS, dim=2)[..., None, None]
        assert close([mean], [(weights * maps[: t + 1]).sum(0) / weights.sum(0)], 1e-13)


def test_gradients_of_the_mean():
    """``dm/dx_s = a_s``, ``dm/dS_s = a_s (x_s - m)``: spec 2.3."""
    maps = torch.randn(3, B, C, H, W, requires_grad=True)
    scores = torch.randn(3, B, C, requires_grad=True)
    mean, log_norm = maps[0], scores[0]
    for x, score in zip(maps[1:], scores[1:], strict=True):
        log_norm, share = accumulate(log_norm, score)
        mean = running_mean(mean, x, share)
    cotangent = torch.randn_like(mean)
    by_map, by_score = torch.autograd.grad(mean, (maps, scores), cotangent)
    a = torch.softmax(scores, 0)[..., None, None]
    assert close([by_map, by_score], [a * cotangent, (a * (maps - mean) * cotangent).sum((-2, -1))], 1e-13)


def test_accumulate_at_the_ends():
    log_norm = torch.tensor([0.0, 1e4, -1e4, 80.0], requires_grad=True)
    score = torch.tensor([1e4, 0.0, -1e4, 80.0], requires_grad=True)
    after, share = accumulate(log_norm, score)
    assert torch.equal(after, torch.tensor([1e4, 1e4, -1e4, 80]) + torch.tensor([0, 0, 1, 1]) * torch.tensor(2.0).log())
    assert torch.equal(share, torch.tensor([1.0, 0.0, 0.5, 0.5]))
    (after.sum() + share.sum()).backward()
    assert log_norm.grad.isfinite().all() and score.grad.isfinite().all()


def test_derivatives_of_the_mixing():
    maps = [torch.randn(B, C, H, W, requires_grad=True) for _ in range(3)]
    heads = [torch.randn(B, HEADS, requires_grad=True) for _ in range(2)]
    shares = torch.rand(B, HEADS, 3, requires_grad=True)
    cases = [(accumulate, heads), (running_mean, [*maps[:2], heads[0]]), (lambda a, *m: mix(m, a), [shares, *maps])]
    for function, inputs in cases:
        assert gradcheck(function, inputs, fast_mode=True) and gradgradcheck(function, inputs, fast_mode=True)


def test_mix_is_the_weighted_sum():
    maps, shares = torch.randn(5, B, C, H, W), torch.randn(B, HEADS, 5)
    wide = shares.repeat_interleave(C // HEADS, dim=1)
    assert close([mix(list(maps), shares)], [torch.einsum("lbchw,bcl->bchw", maps, wide)], 1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_maps_into_a_float_mean(dtype: torch.dtype):
    """The same numbers as from a converted map, without keeping that copy."""
    mean, x, share = torch.randn(B, C, H, W).float(), torch.randn(B, C, H, W).to(dtype), torch.rand(B, HEADS).float()
    x.requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = running_mean(mean.requires_grad_(), x, share.requires_grad_())
    assert found.dtype == torch.float32
    assert close([found], [running_mean(mean, x.float(), share)], 1e-6)
    assert {t.data_ptr() for t in kept if t.numel() == x.numel()} == {mean.data_ptr(), x.data_ptr()}

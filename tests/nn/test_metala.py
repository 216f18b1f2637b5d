"""MetaLA alone: its size, its start, its parameters' names, and the faults of the published code."""

from __future__ import annotations

import pytest
import torch

from lineattn.errors import InputError
from lineattn.nn.token.metala import MetaLA


def test_parameters_at_the_sizes_of_the_published_models():
    """4 C² + C for the gate's bias, C / 2 for the self-augmentation, 4 C for the convolution."""
    for width in (16, 1024, 2048):
        with torch.device("meta"):
            count = sum(p.numel() for p in MetaLA(width).parameters())
        assert count == 4 * width**2 + width + width // 2 + 4 * width


def test_names_and_shapes_are_those_of_the_published_layer():
    shapes = {name: tuple(t.shape) for name, t in MetaLA(16, heads=2).state_dict().items()}
    assert shapes == {
        "q_proj.weight": (8, 16),
        "k_gate.weight": (8, 16),
        "v_proj.weight": (16, 16),
        "g_proj.weight": (16, 16),
        "g_proj.bias": (16,),
        "out_proj.weight": (16, 16),
        "aug_balance": (8,),
        "conv1d.weight": (16, 1, 4),
    }


def test_the_start_is_that_of_the_published_model():
    mixer = MetaLA(256)
    for layer in (mixer.q_proj, mixer.k_gate, mixer.v_proj, mixer.g_proj, mixer.out_proj):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert not mixer.g_proj.bias.any() and not mixer.aug_balance.any()
    assert mixer.conv1d.weight.abs().max() <= 0.5 and mixer.conv1d.weight.std().item() == pytest.approx(
        12**-0.5, rel=0.1
    )


def test_the_start_of_the_layer_itself():
    mixer = MetaLA(256, init_std=None)
    bound = 2**-2.5 * (6 / (256 + 128)) ** 0.5
    for layer in (mixer.q_proj, mixer.k_gate):
        assert 0.99 * bound < layer.weight.abs().max() <= bound
    assert 0.99 / 16 < mixer.v_proj.weight.abs().max() <= 1 / 16


def test_self_augmentation_starts_as_nothing():
    """It adds one half to all channels of a head, which the head's norm takes away."""
    mixer, x = MetaLA(16, heads=2), torch.randn(2, 9, 16)
    plain = MetaLA(16, heads=2, augmentation="none")
    plain.load_state_dict(mixer.state_dict(), strict=False)
    torch.testing.assert_close(mixer(x), plain(x), rtol=1e-12, atol=1e-12)


def test_half_life():
    """A logit of zero halves in tau tokens, and the state is made of what is forgotten: keys are one minus decays."""
    parts = MetaLA(16, heads=2).parts(torch.zeros(1, 1, 16))
    assert (16 * parts.g).exp().flatten().tolist() == pytest.approx([0.5] * 8)
    torch.testing.assert_close(parts.k, torch.full_like(parts.k, 1 - 0.5 ** (1 / 16)))


def test_a_constant_value_is_taken_up_as_a_telescope():
    r"""With values of one and keys of one minus the decays, a channel of the state is :math:`1 - \prod a`."""
    mixer = MetaLA(16, heads=2, conv=0, augmentation="none")
    torch.nn.init.normal_(mixer.k_gate.weight)
    x = torch.randn(1, 20, 16)
    parts = mixer.parts(x)
    from lineattn.ops.scan import scan

    _, state = scan(parts.q, parts.k, torch.ones_like(parts.v), parts.g)
    expected = 1 - parts.g.sum(1).exp()
    torch.testing.assert_close(state, expected[..., None].expand_as(state), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_channels_that_forget_slowly_write_in_half_precision(dtype: torch.dtype):
    """Published, a key was 1 - exp(g) in half precision: zero from a logit of 3.45 on in bfloat16, 5.55 in float16."""
    mixer = MetaLA(4, heads=1, conv=0).to(dtype)
    with torch.no_grad():
        mixer.k_gate.weight.copy_(torch.eye(2, 4) * 8)
    g = torch.nn.functional.logsigmoid(torch.tensor(8.0, dtype=dtype)) / 16
    assert 1 - g.exp() == 0  # the published way
    k = mixer.parts(torch.ones(1, 1, 4, dtype=dtype)).k
    exact = -torch.expm1(torch.nn.functional.logsigmoid(torch.tensor(8.0).double()) / 16)
    torch.testing.assert_close(k.double(), exact.expand_as(k), rtol=1e-6, atol=0)


def test_heads_and_tokens_are_not_mixed_up():
    """Published, a later kernel took heads for tokens: what a head's value is made from shows in no other head."""
    mixer, x = MetaLA(16, heads=4, conv=0), torch.randn(1, 6, 16)  # 4 heads, 6 tokens
    torch.nn.init.eye_(mixer.out_proj.weight)
    before, _ = mixer(x)
    with torch.no_grad():
        mixer.v_proj.weight[4:8] += torch.randn(4, 16)
    change = (mixer(x)[0] - before).abs().amax((0, 1))
    assert change[4:8].min() > 1e-6 and not change[:4].any() and not change[8:].any()


def test_strong_decays_are_finite():
    mixer, x = MetaLA(16, heads=2, tau=1.0).float(), torch.randn(2, 100, 16).float()
    with torch.no_grad():
        mixer.k_gate.weight.mul_(1e6)
    x.requires_grad_()
    for form in ("auto", "parallel", "chunked", "loop"):
        out, state = mixer(x, form=form)
        grads = torch.autograd.grad(out.square().sum(), [x, *mixer.parameters()])
        assert out.isfinite().all() and state.memory.isfinite().all() and all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 0}, "heads is 0"),
        ({"heads": 8}, "key_width is 4"),
        ({"key_width": 3, "heads": 2}, "key_width is 3"),
        ({"heads": 2, "conv": -1}, "conv is -1"),
        ({"heads": 2, "augmentation": "silu"}, "augmentation is 'silu'"),
        ({"heads": 2, "tau": 0.0}, "tau is 0.0"),
    ],
)
def test_arguments_are_checked(arguments: dict, message: str):
    with pytest.raises(InputError, match=message):
        MetaLA(8, **arguments)

"""The language model: any mixer, in pieces, padded, and what it is made of."""

from __future__ import annotations

import pytest
import torch

from lineattn import registry
from lineattn.errors import InputError
from lineattn.models.language import LanguageModel, Norm

MIXERS = registry.list_methods("token")
mixers = pytest.mark.parametrize("mixer", MIXERS)


def small(mixer: str = "metala", **arguments: object) -> LanguageModel:
    return LanguageModel(11, 16, 2, mixer=mixer, **arguments)  # pyright: ignore[reportArgumentType]


@mixers
def test_a_sequence_in_pieces_is_the_whole(mixer: str):
    net, tokens = small(mixer), torch.randint(11, (2, 9))
    whole, end = net(tokens)
    states, outs = None, []
    for piece in tokens.split([4, 1, 4], 1):
        logits, states = net(piece, states)
        outs.append(logits)
    torch.testing.assert_close(torch.cat(outs, 1), whole)
    torch.testing.assert_close(states, end)


@mixers
def test_padding_on_the_left_changes_nothing(mixer: str):
    net, tokens = small(mixer), torch.randint(11, (1, 6))
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), tokens], 1)
    mask = torch.arange(9)[None] >= 3
    torch.testing.assert_close(net(padded, mask=mask)[0][:, 3:], net(tokens)[0])


@mixers
def test_every_parameter_gets_a_gradient(mixer: str):
    net = small(mixer)
    tokens = torch.randint(11, (2, 9))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    net(tokens)[0].square().sum().backward()
    assert [name for name, p in net.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_only_the_last_logits():
    net, tokens = small(), torch.randint(11, (2, 9))
    torch.testing.assert_close(net(tokens, keep=2)[0], net(tokens)[0][:, -2:])


@pytest.mark.parametrize("norm", ["simple_rms", "rms", "layer"])
def test_norms(norm: Norm):
    found = dict(small(norm=norm).named_parameters())
    assert ("final_norm.weight" in found) == (norm != "simple_rms")
    assert ("final_norm.bias" in found) == (norm == "layer")


def test_weights_are_tied_or_not():
    tied, apart = small(), small(tied=False)
    assert tied.lm_head is None and apart.lm_head is not None
    features = torch.randn(2, 16)
    torch.testing.assert_close(tied.logits(features), features @ tied.embed_tokens.weight.T)
    torch.testing.assert_close(apart.logits(features), features @ apart.lm_head.weight.T)


def test_without_an_mlp():
    assert not [name for name, _ in small(hidden=0).named_parameters() if "channel" in name]


def test_the_size_of_the_state_is_what_it_holds():
    net, tokens = small(), torch.randint(11, (1, 9))
    states = net(tokens)[1]
    assert net.state_size(9) == sum(tensor.numel() for state in states for tensor in state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocabulary": 0}, "vocabulary is 0"),
        ({"depth": 0}, "depth is 0"),
        ({"hidden": -1}, "hidden is -1"),
        ({"dropout": 1.5}, "dropout is 1.5"),
        ({"init_std": -1.0}, "init_std is -1.0"),
        ({"norm": "batch"}, "norm is 'batch'"),
        ({"mixer": "metal"}, "metala"),
        ({"mixer_args": {"head": 2}}, "metala can't be built with {'head': 2}"),
        ({"mixer_args": {"heads": 3}}, "heads is 3"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict, message: str):
    with pytest.raises(InputError, match=message):
        LanguageModel(**{"vocabulary": 11, "channels": 16, "depth": 2, **arguments})

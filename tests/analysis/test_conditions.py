"""The conditions are those of the paper for the methods that we have, and what is broken on purpose is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lineattn import registry
from lineattn.analysis import conditions
from lineattn.analysis.anatomy import dissect, interaction, shaken
from lineattn.analysis.conditions import CHANNELS, Conditions, measure
from lineattn.analysis.static_map import ENOUGH, fit, softmax_maps
from lineattn.nn.token.base import Row
from lineattn.nn.token.gla import GLA
from lineattn.nn.token.metala import MetaLA
from lineattn.nn.token.recurrent import Parts, RecurrentState
from lineattn.nn.token.retention import Retention

VERDICTS = {  # C0, C1, C2, C3 of the paper's table
    "metala": (True, True, True, True),
    "gla": (True, True, True, False),
    "linear_attention": (True, False, True, False),
    "retention": (True, False, False, False),
    "softmax_attention": (False, True, True, False),
}


@pytest.fixture
def few(monkeypatch):
    """Maps of four tokens are enough where what counts is something else."""
    monkeypatch.setattr(conditions, "TOKENS", (4, 4))


def verdicts(found: Conditions) -> tuple[bool | None, ...]:
    return found.linear, found.dynamic, found.static, found.least


@pytest.mark.medium
@pytest.mark.parametrize("method", VERDICTS)
def test_the_papers_table(method: str):
    found = measure(method, registry.get(method, axis="token").cls(CHANNELS))
    assert verdicts(found) == VERDICTS[method]
    assert found.faults == ()
    if found.keys is not None:
        assert found.rank == found.keys < found.block


@pytest.mark.medium
@pytest.mark.parametrize("method", registry.list_methods("token"))
def test_what_a_method_says_of_itself_is_what_is_measured(method: str, few):
    """Whichever methods there are; none has to be named here."""
    assert measure(method, registry.get(method, axis="token").cls(CHANNELS)).faults == ()


def test_what_keys_cost():
    """Without keys there are no spare numbers, and the paper's count of parameters."""
    wide, draws = CHANNELS // 2, torch.Generator().manual_seed(0)
    expected = {
        MetaLA: 2 * CHANNELS * wide,
        GLA: 2 * CHANNELS * wide + 16 * (CHANNELS + wide) + wide,
    }
    for cls, count in expected.items():
        assert conditions.made_with(cls(CHANNELS), draws) == count


class WrongRow(MetaLA):
    row = Row(query="input", key="input", value="input", decay="input")


class FixedDecay(GLA):
    """Says that its decays are of the token, and they are parameters."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__(channels, heads)
        self.logits = nn.Parameter(torch.zeros(heads, self.key_width // heads))

    def parts(self, x: Tensor) -> Parts:
        parts = super().parts(x)
        return parts._replace(g=nn.functional.logsigmoid(self.logits).expand_as(parts.g))


class OtherWeights(FixedDecay):
    """Shows other decays than it computes with."""

    def weights(self, x: Tensor) -> dict[str, Tensor]:
        found = super().weights(x)
        return found | {"g": GLA.parts(self, x).g}


class ScalarDecay(GLA):
    def parts(self, x: Tensor) -> Parts:
        parts = super().parts(x)
        return parts._replace(g=parts.g.mean(-1, keepdim=True).expand_as(parts.g))


class SharedStep(GLA):
    """As Mamba: the decays of a head are powers of one number."""

    def parts(self, x: Tensor) -> Parts:
        parts = super().parts(x)
        return parts._replace(g=parts.g[..., :1] * torch.arange(1, parts.g.shape[-1] + 1))


class GrowingState(GLA):
    def mix(self, x: Tensor, state: RecurrentState | None, *rest: Any) -> tuple[Tensor, RecurrentState]:
        out, after = super().mix(x, state, *rest)
        return out, after._replace(recent=x if state is None else torch.cat([state.recent, x], 1))


class AllPairs(GLA):
    """A small state, and the work of softmax attention."""

    def mix(self, x: Tensor, state: RecurrentState | None, lengths: Tensor | None, form: Any) -> Any:
        return super().mix(x, state, lengths, "parallel")


class ConstantQuery(MetaLA):
    def parts(self, x: Tensor) -> Parts:
        parts = super().parts(x)
        return parts._replace(q=torch.ones_like(parts.q))


class OtherTie(MetaLA):
    """A key that is not what the row says: one minus the square of the decay."""

    def parts(self, x: Tensor) -> Parts:
        parts = super().parts(x)
        return parts._replace(k=-torch.expm1(2 * parts.g))


class ReadBefore(GLA):
    """As RWKV: reads before it writes, with a share of its own for what the token writes."""

    def weights(self, x: Tensor) -> dict[str, Tensor]:
        found = super().weights(x)
        q, k, g = found["q"], found["k"], found["g"]
        before = conditions.own_map({"q": q[:, 1:], "k": k[:, :-1], "g": g[:, :-1]})
        attention = nn.functional.pad(before, (0, 1, 1, 0))
        return found | {"attention": attention + 0.3 * (q * k).sum(-1).transpose(1, 2).diag_embed()}


class SomethingElse(GLA):
    """Attention with a term that queries, keys and decays don't say."""

    def weights(self, x: Tensor) -> dict[str, Tensor]:
        found = super().weights(x)
        return found | {"attention": found["attention"].exp().tril()}


BROKEN = [
    (WrongRow, (True, True, True, True), "its row says key: input, and measured is key: decay"),
    (FixedDecay, (True, False, False, False), "its row says decay: input, and measured is decay: fixed"),
    (OtherWeights, (True, False, True, False), "what forward keeps of a token does not depend on later ones"),
    (ScalarDecay, (True, False, True, False), None),
    (SharedStep, (True, False, True, False), None),
    (GrowingState, (False, True, True, False), "state_size says (64, 64) for 64 and 1024 tokens"),
    (AllPairs, (False, True, True, False), None),
    (ConstantQuery, (True, True, False, False), "its row says query: input, and measured is query: one"),
    (OtherTie, (True, True, True, False), "its row says key: decay, and measured is key: input"),
    (ReadBefore, (True, True, True, False), None),
    (SomethingElse, (True, True, True, None), None),
]


@pytest.mark.medium
@pytest.mark.parametrize(("cls", "expected", "fault"), BROKEN, ids=[cls.__name__ for cls, *_ in BROKEN])
def test_what_is_broken_is_found(cls: Any, expected: tuple[bool | None, ...], fault: str | None, few):
    found = measure("broken", cls(16, 2))
    assert verdicts(found) == expected
    assert (fault in "; ".join(found.faults)) if fault else found.faults == ()
    assert any("move together" in note for note in found.notes) == (cls in (ScalarDecay, SharedStep))


def test_fixed_decays_need_keys_that_grow():
    """The nearer to one, the longer a key can be made up for it."""
    draws = torch.Generator().manual_seed(0)
    anatomy = dissect(Retention(16, heads=2), draws)
    assert anatomy is not None and anatomy.row.decay == "fixed"
    errors = [fit(anatomy._replace(decays=anatomy.decays * much), 4, draws).error for much in (1, 1e-5)]
    assert errors[0] > 0.1 and errors[1] < ENOUGH


def test_tied_keys_fail_with_one_decay_a_head():
    """All channels of the state are the same then."""
    draws = torch.Generator().manual_seed(0)
    anatomy = dissect(MetaLA(16, 2), draws)
    assert anatomy is not None
    assert fit(anatomy, 4, draws).error < ENOUGH
    assert fit(anatomy._replace(together=True), 4, draws).error > 0.01


def test_keys_of_both_signs_do_the_work_of_queries():
    """Against the paper's table, where (key, decay) fails: exact with channels c that forget all behind token c."""
    (goal,) = softmax_maps(1, 6, torch.Generator().manual_seed(0))
    keys = (goal - nn.functional.pad(goal, (0, 0, 0, 1))[1:]).mT.triu()  # of token s in channel c
    decays = torch.ones(6, 6, dtype=torch.float64).triu().log()  # of token j in channel c: one up to c
    weights = {"q": torch.ones_like(keys), "k": keys, "g": decays}
    found = conditions.own_map({name: part[None, :, None] for name, part in weights.items()})
    torch.testing.assert_close(found[0, 0], goal)
    assert keys.norm(dim=1).max() < 2**0.5


def test_maps_are_those_of_softmax_attention():
    maps = softmax_maps(3, 5, torch.Generator().manual_seed(0))
    assert not maps.triu(1).any()
    torch.testing.assert_close(maps.sum(-1), torch.ones(3, 5, dtype=torch.float64))


def test_the_mixer_is_left_as_it_is():
    mixer = MetaLA(16, 2)
    before = {name: tensor.clone() for name, tensor in mixer.state_dict().items()}
    noisy = shaken(mixer, torch.Generator().manual_seed(0))
    interaction(mixer, 4, torch.Generator().manual_seed(0))
    for name, tensor in mixer.state_dict().items():
        assert torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype
        assert not torch.equal(noisy.state_dict()[name], tensor.double()), name

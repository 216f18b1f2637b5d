from __future__ import annotations

import pytest
import torch
from torch import nn

from lineattn.errors import InputError
from lineattn.hosts.site import StateScope, derive
from lineattn.hosts.step import Step


def walked(*stages: tuple[int, int, int]) -> list[tuple[Step, torch.Size]]:
    """Stages of so many blocks, of such a width and height, behind a stem."""
    steps = [(Step("stem", nn.Identity()), torch.Size([2, 3, 64, 64]))]
    for s, (blocks, channels, height) in enumerate(stages):
        for i in range(blocks):
            step = Step(f"{s}.{i}", nn.Identity(), site=True, stage_end=i == blocks - 1)
            steps.append((step, torch.Size([2, channels, height, height])))
    return steps


def entries(scope: str | None, *, carries: bool, blocks: int = 4) -> list[str]:
    reach = StateScope.parse(scope, carries=carries)
    found = derive(walked((blocks, 8, 32), (blocks, 16, 16)), reach, carries=carries)
    return [site.entry[0] for site in found.values()]


def test_carry_goes_through_a_transition() -> None:
    sites = derive(walked((2, 8, 32), (2, 16, 16), (1, 16, 16)), StateScope(), carries=True)
    assert list(sites) == ["0.0", "0.1", "1.0", "1.1", "2.0"]
    assert [(s.stage, s.index, s.channels) for s in sites.values()] == [
        (0, 0, 8), (0, 1, 8), (1, 0, 16), (1, 1, 16), (2, 0, 16)
    ]  # fmt: skip
    assert [s.entry for s in sites.values()] == ["start", "continue", "transition", "continue", "transition"]
    assert (sites["1.0"].prev_channels, sites["1.0"].stride) == (8, 2)
    assert (sites["2.0"].prev_channels, sites["2.0"].stride) == (16, 1)  # neither changes: summed up as one layer
    assert (sites["1.1"].prev_channels, sites["1.1"].stride) == (None, 1)


def test_scopes() -> None:
    assert entries(None, carries=True) == entries("carry", carries=True) == list("sccctccc")
    assert entries(None, carries=False) == entries("per_stage", carries=True) == list("scccsccc")
    assert entries("every=2", carries=True) == list("sctctctc")
    assert entries("every=2", carries=False) == list("scscscsc")
    assert entries("anchors=1,3", carries=True) == list("stctttct")
    assert entries("anchors=1", carries=False) == list("ssccsscc")


def test_anchors_are_counted_in_each_stage() -> None:
    sites = derive(walked((3, 8, 32), (23, 8, 16)), StateScope.parse("anchors=11"), carries=True)
    assert [path for path, site in sites.items() if site.entry == "transition"] == ["1.0", "1.11"]
    assert (sites["1.11"].prev_channels, sites["1.11"].stride) == (8, 1)


@pytest.mark.parametrize("words", ["stage", "every=0", "every=", "anchors=", "anchors=1;2", "every=-1"])
def test_other_words_are_refused(words: str) -> None:
    with pytest.raises(InputError, match=r"scope is .*'carry', 'per_stage', 'every=6' or 'anchors=11'"):
        StateScope.parse(words)


def test_carry_needs_a_method_that_can() -> None:
    with pytest.raises(InputError, match="use 'per_stage'"):
        StateScope.parse("carry", carries=False)

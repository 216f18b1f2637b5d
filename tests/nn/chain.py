"""Chains of sites to test methods on: the blocks between them are left out, what they put out is drawn."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lineattn import registry
from lineattn.nn.depth.base import DepthAttention, Site
from lineattn.nn.depth.pooled import PooledAttention
from tests.oracles import channel, dla, kcla_extensions, mixing
from tests.oracles import depth as oracle

STAGES = (  # what changes where the stage begins; channels, height and width, blocks
    ("first stage", 8, (19, 15), 3),
    ("width and stride, of an odd size that is rounded down", 12, (9, 7), 1),
    ("width and stride, of an odd size that is rounded up", 16, (5, 4), 2),
    ("width only", 24, (5, 4), 1),
    ("stride only", 24, (3, 2), 2),
    ("neither", 24, (3, 2), 2),
)


@dataclass(frozen=True)
class Case:
    """A method with its arguments, and the oracle for it.

    ``learns`` names parameters that get a gradient with these arguments, though the method's card excuses them.
    """

    method: str
    oracle: Callable[..., list[Tensor]]
    arguments: dict[str, Any] = field(default_factory=dict)
    reads_shortcut: bool = False
    learns: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return "-".join([self.method, *map(str, self.arguments.values())])

    @property
    def cls(self) -> type[DepthAttention]:
        return registry.get(self.method).cls

    def expected(self, modules: Sequence[nn.Module], outs: Sequence[Tensor], shortcuts: Sequence[Tensor], **kw: Any):
        """What the oracle puts out."""
        return self.oracle(modules, outs, *([shortcuts] if self.reads_shortcut else []), **kw)

    def takes(self, argument: str) -> bool:
        return argument in inspect.signature(self.cls).parameters

    @property
    def has_norm(self) -> bool:
        """Whether a norm stands before the gain, which can take it up."""
        return issubclass(self.cls, PooledAttention)

    def make(self, site: Site, *, head_dim: int | None = 4, drop_path: float = 0.0, **kw: Any) -> DepthAttention:
        """The module at a site, ``head_dim=None`` for one head; an argument that the method has not is left out."""
        given = {"head_dim": site.channels if head_dim is None else head_dim, "drop_path": drop_path}
        return self.cls(site, **{name: v for name, v in given.items() if self.takes(name)} | self.arguments | kw)


CASES = [
    *(Case("kcla", partial(oracle.kcla, variant=v), {"variant": v}) for v in oracle.KCLA_FORMS),
    Case("layer_softmax", oracle.layer_softmax),
    Case("mrla_base", oracle.mrla_base),
    *(Case("mrla_light", oracle.mrla_light, {"source": source}, True) for source in ("shortcut", "attention")),
    Case("layer_linear", mixing.linear, learns=("query.weight", "key.weight")),
    Case("layer_linear", partial(mixing.linear, normalise=True), {"normalise": True}),
    Case("layer_hydra", mixing.hydra),
    Case("layer_focused", mixing.focused),
    Case("layer_linformer", mixing.linformer),
    Case("layer_performer", mixing.performer),
    Case("attnres", mixing.attnres),
    Case("attnres", partial(mixing.attnres, block=2), {"block": 2}),
    Case("dla_base", dla.base, {"reduction": 2}),
    Case("dla_light", dla.light, {"reduction": 2}, True),
    Case("kcla_temperature", kcla_extensions.temperature),
    Case("kcla_write", kcla_extensions.write),
    Case("kcla_decay", kcla_extensions.decay),
    Case("kcla_corrected", kcla_extensions.corrected),
    *(Case("kcla_bank", partial(kcla_extensions.bank, copies=n), {"copies": n}) for n in (1, 2, 3)),
    Case("kcla_no_exp", kcla_extensions.no_exp),
    Case("kcla_no_gate", kcla_extensions.no_gate),
    Case("kcla_static_value", kcla_extensions.static_value),
    Case("se", channel.se),
    Case("eca", channel.eca),
    Case("dianet", channel.dianet),
]
KCLA_CASES = [case for case in CASES if case.method == "kcla"]


def sites(*, carries: bool, stages: Sequence[tuple] = STAGES) -> list[Site]:
    found: list[Site] = []
    size = stages[0][2]
    for stage, (_, channels, new_size, blocks) in enumerate(stages):
        for index in range(blocks):
            site = Site(channels, stage, index, "continue")
            if not found or (index == 0 and not carries):
                site = replace(site, entry="start")
            elif index == 0:
                stride = round(size[0] / new_size[0])
                site = replace(site, entry="transition", prev_channels=found[-1].channels, stride=stride)
            found.append(site)
        size = new_size
    return found


def build(
    case: Case, *, head_dim: int | None = 4, stages: Sequence[tuple] = STAGES, drop_path: float = 0.0, **kw: Any
) -> nn.ModuleList:
    """A module a site, its parameters drawn at random; ``head_dim=None`` is one head."""
    places = sites(carries=case.cls.carries, stages=stages)
    return randomise(nn.ModuleList(case.make(site, head_dim=head_dim, drop_path=drop_path, **kw) for site in places))


def randomise(chain: nn.ModuleList) -> nn.ModuleList:
    with torch.no_grad():
        for parameter in chain.parameters():
            parameter.normal_()
        for norm in (m for m in chain.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    return chain


def draw(*, batch: int = 3, stages: Sequence[tuple] = STAGES) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of the blocks and their shortcuts; channels have means, so that keys have some length."""

    def maps() -> list[Tensor]:
        shapes = [(channels, *size) for _, channels, size, blocks in stages for _ in range(blocks)]
        return [torch.randn(batch, *shape) + 3 * torch.randn(batch, shape[0], 1, 1) for shape in shapes]

    return [x.requires_grad_() for x in maps()], [x.requires_grad_() for x in maps()]


def run(chain: nn.ModuleList, outs: Sequence[Tensor], shortcuts: Sequence[Tensor]) -> list[Tensor]:
    return run_with_states(chain, outs, shortcuts)[0]


def run_with_states(chain: nn.ModuleList, outs: Sequence[Tensor], shortcuts: Sequence[Tensor]):
    results, states, state = [], [], None
    for module, x, shortcut in zip(chain, outs, shortcuts, strict=True):
        if getattr(module, "site", None) is not None and module.site.entry == "start":
            state = None
        result, state = module(x, shortcut, state)
        results.append(result)
        states.append(state)
    return results, states


def worst(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest difference of any pair, in units of the pair's largest number."""
    scales = [max(1.0, e.abs().max().item()) for e in expected]
    return max((f - e).abs().max().item() / s for f, e, s in zip(found, expected, scales, strict=True))

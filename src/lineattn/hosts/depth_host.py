"""A backbone with attention over depth: the untouched network, and the methods beside it."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.hosts.checkpointing import checkpointed
from lineattn.hosts.fold import fold_batch_norms
from lineattn.hosts.step import Plan, Step, run_split
from lineattn.nn.depth.base import DepthAttention


def site_key(path: str) -> str:
    """The name under ``sites.`` of what stands behind the step at ``path``."""
    return path.replace(".", "_")


class DepthHost(nn.Module):
    r"""A network whose blocks look back at the blocks before them.

    .. math:: x_t = block_t(\tilde x_{t-1}), \qquad \tilde x_t, s_t = site_t(x_t, s_{t-1})

    The network keeps its class and its parameters' names under ``backbone.``; the methods are under ``sites.``. The
    host walks the steps of the plan at each call, reading them from the network, and hands the state on as an
    argument. `lineattn.attach` builds one.

    Args:
        backbone: The network.
        plan: How it is walked.
        sites: The method behind each step, by the step's path; steps that are left out stay plain.
        feature_info: Of each map of `features`, ``num_chs``, ``reduction`` and ``module``.
        num_features: Channels of what `forward_features` returns, as in timm.
        head_hidden_size: Channels that the classifier reads, as in timm.

    Shape:
        - Input and output: those of the network.
    """

    def __init__(
        self,
        backbone: nn.Module,
        plan: Plan,
        sites: Mapping[str, DepthAttention],
        feature_info: Sequence[Mapping[str, Any]],
        num_features: int,
        head_hidden_size: int,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.sites = nn.ModuleDict({site_key(path): module for path, module in sites.items()})
        self.plan = plan
        self.feature_info = [dict(info) for info in feature_info]
        self.num_features, self.head_hidden_size = num_features, head_hidden_size
        self.needs_split = any(module.needs_split for module in sites.values())
        self.grad_checkpointing = False
        self._starts = frozenset(site_key(path) for path, module in sites.items() if module.site.entry == "start")

    @property
    def num_classes(self) -> int:
        """Outputs of the classifier; 0 without one."""
        return getattr(self.get_classifier(), "out_features", 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """What the head reads, in the network's own layout."""
        return self._walk(x, keep=())[0]

    def features(self, x: Tensor) -> list[Tensor]:
        """The map at the end of each stage, with attention; the levels are those of `feature_info`."""
        return self._walk(x, keep=range(len(self.feature_info)))[1]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """From the last map to the logits, or with ``pre_logits`` to what the classifier reads."""
        return self.plan.head(self.backbone, x, pre_logits)

    @overload
    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = ...,
        norm: bool = ...,
        stop_early: bool = ...,
        output_fmt: str = ...,
        intermediates_only: Literal[False] = ...,
    ) -> tuple[Tensor, list[Tensor]]: ...

    @overload
    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = ...,
        norm: bool = ...,
        stop_early: bool = ...,
        output_fmt: str = ...,
        *,
        intermediates_only: Literal[True],
    ) -> list[Tensor]: ...

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Maps at the ends of stages, with timm's arguments.

        Args:
            x: Input of the network.
            indices: Which stages: their indices (negative ones count from the end), the last ``n``, or all.
            norm: Without effect where a network has no norm behind its maps, and refused where it has one.
            stop_early: Leave out the steps behind the last stage that is asked for.
            output_fmt: ``NCHW``.
            intermediates_only: Return the maps alone.

        Returns:
            The last map that was computed, and the list of the maps asked for.

        Raises:
            InputError: There is no such stage, or another format or a norm is asked for.
        """
        if norm and self.plan.norm == "layer":
            raise InputError(f"norm=True: these are the maps before the last norm of the {self.plan.family}")
        if output_fmt != "NCHW":
            raise InputError(f"output_fmt is {output_fmt!r}; these maps are 'NCHW'")
        keep = self._levels(indices)
        x, maps = self._walk(x, keep, stop=keep[-1] if stop_early or intermediates_only else None)
        return maps if intermediates_only else (x, maps)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] | None = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Takes out, in place, what the maps asked for don't need: later blocks with their sites, and the head.

        For timm's ``features_only=True``: every parameter that is left gets a gradient.

        Args:
            indices: Which stages, as for `forward_intermediates`.
            prune_norm: Without effect: the norm behind the last map goes in any case.
            prune_head: Without effect: so does the head.

        Returns:
            The indices, counted from 0.
        """
        keep = self._levels(indices)
        names = {module: name for name, module in self.backbone.named_modules()}
        level, paths = 0, list(self.plan.stem)
        for step in self.plan.steps(self.backbone):
            paths.append(names.get(cast(nn.Module, step.module), step.path))  # what was put in has a name of its own
            level += step.is_feature
            if level > keep[-1]:
                break
        for key in self.sites.keys() - {site_key(path) for path in paths}:
            del self.sites[key]
        for name, module in list(self.backbone.named_modules()):
            own = next(module.parameters(recurse=False), None) is not None
            inside = any(f"{name}.".startswith(f"{path}.") for path in paths)
            around = any(path.startswith(f"{name}.") for path in paths)
            if own and name and not inside and not around:
                self.backbone.set_submodule(name, nn.Identity())
                paths.append(name)  # with it go the modules inside
        return keep

    def get_classifier(self) -> nn.Module:
        """The network's classifier; of a distilled one, that of the class token; an identity where there is none."""
        paths = self.plan.classifiers(self.backbone)
        return self.backbone.get_submodule(paths[0]) if paths else nn.Identity()

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Puts a new classifier in; with ``num_classes=0`` the pooled features come out.

        Raises:
            InputError: Another pooling is asked for, which belongs to the network, or the classifier isn't linear, or
                the network can't have one.
        """
        if global_pool is not None:
            raise InputError(f"global_pool is {global_pool!r}; the pooling of the {self.plan.family} can't be changed")
        like = next(self.backbone.parameters())
        paths = self.plan.classifiers(self.backbone)
        if num_classes and not paths:
            raise InputError(f"num_classes is {num_classes}; a {self.plan.family} has no classifier")
        for path in paths:
            present = self.backbone.get_submodule(path)
            if not isinstance(present, nn.Linear | nn.Identity):
                raise InputError(
                    f"the classifier {path!r} is a {type(present).__name__}; only a Linear can be replaced"
                )
            new = nn.Linear(self.head_hidden_size, num_classes) if num_classes else nn.Identity()
            self.backbone.set_submodule(path, new.to(like).train(present.training))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block and its site in the backward pass, instead of keeping what is inside.

        Gradients and running statistics are those of the ordinary pass. Under `torch.compile` this has no effect:
        the compiler chooses what to recompute.
        """
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, list[tuple[str, tuple[int]]]]:
        """timm's groups of parameters by depth, for layer-wise learning rates: stem, then blocks or stages in order.

        A site is in the group of the block that it stands behind; the head is in none, which is the last.
        """
        stem = [(rf"^backbone\.{re.escape(name)}$", (0,)) for name in self.plan.stem]
        groups: dict[str, list[tuple[str, tuple[int]]]] = {"stem": stem, "blocks": []}
        stage = block = 0
        for step in self.plan.steps(self.backbone):
            path, key = step.path.replace(".", r"\."), site_key(step.path)
            pattern = rf"^(?:backbone\.{path}|sites\.{key})\."
            if step.site or groups["blocks"]:
                groups["blocks"].append((pattern, (stage if coarse else block,)))
                block += 1
            else:
                groups["stem"].append((pattern, (0,)))
            stage += step.stage_end
        return groups

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that the network wants without weight decay, for timm's optimisers."""
        theirs = getattr(self.backbone, "no_weight_decay", None)
        return set() if theirs is None else {f"backbone.{name}" for name in theirs()}

    def fuse(self, *, trunk: bool = True) -> DepthHost:
        """A copy for evaluation with equal outputs, where everything constant is folded.

        Args:
            trunk: Also fold the network's batch norms into the convolutions before them.

        Returns:
            An independent host in evaluation mode, without gradients.
        """
        fused = copy.deepcopy(self).eval().requires_grad_(False)
        for key, module in fused.sites.items():
            fused.sites[key] = cast(DepthAttention, module).fuse()
        if trunk:
            fold_batch_norms(list(self.plan.steps(fused.backbone)), fused.backbone)
        return fused

    def fold_gain(self) -> None:
        """Turns ``init="identity"`` into ``init="paper"`` at every site, in place, at the same outputs.

        Raises:
            InputError: A site has no exact form without its gain; then none is changed.
        """
        for sites in (copy.deepcopy(self.sites), self.sites):  # the first is the trial
            for key, module in sites.items():
                try:
                    cast(DepthAttention, module).fold_gain()
                except InputError as error:
                    raise InputError(f"sites.{key}: {error}") from error

    def extra_repr(self) -> str:
        return f"plan={self.plan.family!r}, sites={len(self.sites)}"

    def _levels(self, indices: int | Sequence[int] | None) -> list[int]:
        """Which maps are asked for, counted from 0 and in order."""
        stages = len(self.feature_info)
        if indices is None or isinstance(indices, int):
            indices = range(-(stages if indices is None else indices), 0)
        keep = sorted({i + stages if i < 0 else i for i in indices})
        if not keep or keep[0] < 0 or keep[-1] >= stages:
            raise InputError(f"indices {list(indices)}: this network has stages 0 to {stages - 1}")
        return keep

    def _walk(self, x: Tensor, keep: Sequence[int], stop: int | None = None) -> tuple[Tensor, list[Tensor]]:
        """What the head reads, and the maps of the pyramid that are in ``keep``."""
        maps: list[Tensor] = []
        state: Any = None
        level, size = 0, (x.shape[2], x.shape[3])
        checkpoint = self.grad_checkpointing and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        for step in self.plan.steps(self.backbone):
            if checkpoint and step.site:
                x, state = checkpointed(self._step, self._modules_at(step), step, x, size, state)
            else:
                x, state = self._step(step, x, size, state)
            if step.is_feature:
                if level in keep:
                    maps.append(step.show(x, size))
                if level == stop:
                    break
                level += 1
        return x, maps

    def _step(self, step: Step, x: Tensor, size: tuple[int, int], state: Any) -> tuple[Tensor, Any]:
        """One step, and what stands at it."""
        key = site_key(step.path)
        if not step.site or key not in self.sites:
            return step.module(x), state
        method = cast(DepthAttention, self.sites[key])
        if key in self._starts:
            state = None
        if step.split is None or not self.needs_split:
            out = step.module(x)
            maps, state = method(step.show(out, size), None, state)
        elif method.position == "branch":
            branch, shortcut, act = step.split(cast(nn.Module, step.module), x)
            maps, state = method(step.show(branch, size), step.show(shortcut, size), state)
            return act(step.put_back(branch, maps) + shortcut), state
        else:
            out, shortcut = run_split(step.split, step.module, x)
            maps, state = method(step.show(out, size), step.show(shortcut, size), state)
        return step.put_back(out, maps), state

    def _modules_at(self, step: Step) -> list[nn.Module]:
        key = site_key(step.path)
        modules = [step.module] if isinstance(step.module, nn.Module) else []
        return [*modules, self.sites[key]] if key in self.sites else modules

"""What a site keeps for the backward, beside the maps that the blocks of the network keep anyway."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lineattn.ops import native
from tests.nn.chain import CASES, Case, build, draw, run

SITES, CHANNELS, SIZE = 6, 16, 64
MAPS = {  # a site: what it keeps
    "kcla": 1,  # the mean, in PyTorch's operators
    "layer_softmax": 1,  # the mixed map
    "mrla_base": 2,  # the value, which is state, and the mixed map
    "mrla_light-shortcut": 0,
    "layer_linear": 1,  # the mixed map, as all that follow
    "layer_hydra": 1,
    "layer_focused": 1,
    "layer_linformer": 1,
    "layer_performer": 2,  # the value, which is state, and the mixed map
    "attnres": 1,  # how far the mixed map is from the block's output
    "dla_base": 2,  # the value, which is state, and the mixed map
    "dla_light": 1,  # the refreshed shortcut
    "mrla_light-attention": 2,  # the value and the state
}
CHAINS = {  # the chain: what it keeps of float32 maps, and of bfloat16 ones (state is float32)
    "kcla_temperature": (5, 12),  # the mean, of which the first is the first output
    "kcla_write": (5, 12),
    "kcla_decay": (5, 12),
    "kcla_bank-1": (5, 12),
    "kcla_bank-2": (15, 34),  # each mean, and their mix
    "kcla_bank-3": (20, 46),
    "kcla_no_exp": (5, 12),
    "kcla_no_gate": (5, 12),
    "kcla_static_value": (11, 17),  # the value and the mean, of which the first is the first value
    "kcla_corrected": (19, 40),  # the mean, the covariance and what both are made of
    "se": (0, 0),
    "eca": (0, 0),
    "dianet": (0, 0),
}


class Kept:
    """Storages that autograd saves, each once, without those of the tensors given."""

    def __init__(self, *without: Tensor) -> None:
        self.without = {t.untyped_storage().data_ptr() for t in without}
        self.storages: dict[int, torch.UntypedStorage] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.without:
            self.storages[storage.data_ptr()] = storage  # held, so that no address comes twice
        return tensor

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_kept_maps(case: Case, training: bool, dtype: torch.dtype):
    stage = (("", CHANNELS, (SIZE, SIZE), SITES),)
    chain = build(case, stages=stage).float().train(training)
    outs, shortcuts = ([x.detach().to(dtype).requires_grad_() for x in maps] for maps in draw(stages=stage))
    kept = Kept(*outs, *shortcuts, *chain.parameters())
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda t: t),
    ):
        run(chain, outs, shortcuts)
    if case.id in CHAINS:
        maps = CHAINS[case.id][dtype != torch.float32]
    else:
        maps = SITES * MAPS.get(case.id, MAPS.get(case.method))
    if case.method == "kcla":
        if dtype != torch.float32:
            maps *= 2  # its mean is float32
        elif native.enabled and case.arguments["variant"] != "ref-det0":
            maps = 0  # the mean is made again from the blocks' outputs
        else:
            maps -= 1  # the first mean is the first output
    slack = 0.05
    if case.method == "attnres":  # scores of a position: of each layer seen two numbers, two of the layer itself
        slack += (SITES + 3) / CHANNELS * (1 if dtype == torch.float32 else 2.5)  # in float32, and the shares twice
    assert maps <= kept.bytes / outs[0].nbytes < maps + slack * SITES


@pytest.mark.skipif(not native.enabled, reason="the native kernels are off")
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=["channels_last", "contiguous"])
def test_kcla_keeps_every_eighth_mean(layout: torch.memory_format):
    """However deep: what attention adds is an eighth of a map a layer."""
    sites = 33
    stage = (("", CHANNELS, (SIZE, SIZE), sites),)
    chain = build(CASES[0], stages=stage).float()
    outs = [x.detach().float().to(memory_format=layout).requires_grad_() for x in draw(stages=stage)[0]]
    kept = Kept(*outs, *chain.parameters())
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda t: t):
        run(chain, outs, outs)
    means = (sites - 2) // 8  # the first is an output, the last is not read any more
    assert means <= kept.bytes / outs[0].nbytes < means + 0.02 * sites

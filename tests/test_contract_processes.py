"""Every method on every family in two processes: DDP without unused parameters, and FSDP."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint
import torch.multiprocessing
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchvision.models.resnet import BasicBlock

from tests.cells import CELLS, build, example, is_slow

pytestmark = pytest.mark.medium


def in_two_processes(work: Callable[..., None], folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_start, (port, str(folder), work), nprocs=2)


def _start(rank: int, port: int, folder: str, work: Callable[..., None]) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    work(rank, Path(folder))
    torch.distributed.destroy_process_group()


WALKED = [cell for cell in CELLS if not is_slow(*cell)]


def _train_two_steps(rank: int, folder: Path) -> None:
    totals = {}
    for cell in WALKED:
        host = build(*cell).train()
        x: Tensor = example(host) + rank
        parallel = DistributedDataParallel(host)
        for step in range(2):  # the second forward pass is where unused parameters are found
            parallel(x + step).square().sum().backward()
        totals["-".join(cell)] = torch.cat([p.grad.flatten() for p in host.parameters()]).double().sum()
    torch.save(totals, folder / f"{rank}.pt")


def test_two_processes_use_every_parameter(tmp_path: Path) -> None:
    in_two_processes(_train_two_steps, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first.keys() == {"-".join(cell) for cell in WALKED}
    for cell, total in first.items():
        assert total.isfinite() and total == second[cell], cell


SHARDED = ("kcla", "torchvision_basic")


def _shard_train_save_load(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def sharded() -> torch.nn.Module:
        host = build(*SHARDED).train()
        for step in host.plan.steps(host.backbone):
            if step.site:
                fully_shard(step.module, mesh=mesh)
        return fully_shard(host, mesh=mesh)

    host = sharded()
    x = example(build(*SHARDED)) + rank
    optimizer = torch.optim.SGD(host.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        host(x).square().mean().backward()
        optimizer.step()
    assert all(p.grad is not None for p in host.parameters())
    for buffer in host.buffers():
        torch.distributed.broadcast(buffer, 0)  # running statistics are each process's own; DDP does this itself
    distributed_checkpoint.save(get_model_state_dict(host), checkpoint_id=folder / "sharded")

    other = sharded()
    state = get_model_state_dict(other)
    distributed_checkpoint.load(state, checkpoint_id=folder / "sharded")
    set_model_state_dict(other, state)
    with torch.no_grad():
        assert torch.equal(host.eval()(x), other.eval()(x))
    whole = get_model_state_dict(host, options=StateDictOptions(full_state_dict=True))
    torch.save(whole, folder / f"{rank}.pt")


def test_sharded_over_two_processes(tmp_path: Path) -> None:
    """Parameters and gradients in two halves: trained, saved, and loaded into a new network."""
    in_two_processes(_shard_train_save_load, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    start = build(*SHARDED).state_dict()
    assert first.keys() == start.keys()
    for name, _ in build(*SHARDED).named_parameters():
        assert torch.equal(first[name], second[name])
    assert any(not torch.equal(first[name], start[name]) for name in start if name.endswith("gain"))


def test_lightnings_sharding_is_ready_where_there_is_a_gpu() -> None:
    """Lightning's FSDP refuses a CPU: it is built, with our blocks as units, and says so."""
    strategy = FSDPStrategy(auto_wrap_policy={BasicBlock}, state_dict_type="sharded")
    with pytest.raises(ValueError, match="requires a GPU"):
        Trainer(accelerator="cpu", strategy=strategy, logger=False)

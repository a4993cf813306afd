"""A loop with DistributedDataParallel that begins its epochs in evaluation mode, or does what hetopt's shares need not.

``ddp_script.py usual|compiled|accumulates|scaled|sum|public_hook|own_hook|no_rank|sharded``
"""

import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hetopt

(way,) = sys.argv[1:]
parts = 1 + (way == "accumulates")
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(203, 8)
data = TensorDataset(x, (x[:, 0] > 0).long())
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
halves = {"0": ColwiseParallel(), "2": RowwiseParallel()}
mesh = init_device_mesh("cpu", (2,))
model: Any = parallelize_module(net, mesh, halves) if way == "sharded" else DistributedDataParallel(net)
if way == "own_hook":
    model.register_comm_hook(None, allreduce_hook)
if way in ("public_hook", "sum"):
    model.register_comm_hook(hetopt.CommState(model, weight="sum" if way == "sum" else None), hetopt.comm_hook)
if way == "no_rank":
    loader = DataLoader(Subset(data, range(dist.get_rank(), 202, 2)), batch_size=24, shuffle=True)
else:
    loader = DataLoader(data, batch_size=24 // parts, sampler=DistributedSampler(data))
call = torch.compile(model, backend="eager") if way == "compiled" else model
scaler = torch.amp.GradScaler("cpu", enabled=way == "scaled")
optimizer: Any = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
for _ in range(2):
    for number, (inputs, targets) in enumerate(loader):
        model.train()
        ends = number % parts == parts - 1 or number == len(loader) - 1
        loss: Any = cross_entropy(call(inputs), targets) / (1 if ends and number % parts == 0 else parts)
        if way == "sum":  # over a count of the whole batch, as a loss over tokens is
            count = torch.tensor(float(len(targets)))
            dist.all_reduce(count)
            loss = loss * len(targets) * dist.get_world_size() / count
        with nullcontext() if ends else model.no_sync():
            scaler.scale(loss).backward()
        if ends:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    model.eval()
    for batch in DataLoader(data, batch_size=20):
        net(batch[0])
dist.destroy_process_group()

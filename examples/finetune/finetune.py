"""Fine-tunes a Llama-like model that is sharded by `fully_shard`; `torchrun` and `hetopt launch` run it as it is.

The weights are random and small, so that it runs anywhere: load your own where it says so. With --lora an adapter of
that rank is trained beside frozen weights. It goes on from its newest whole checkpoint, on any number of devices.
"""

import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Linear(nn.Module):
    """A matrix, and beside it an adapter of low rank if one is asked for (Hu et al. 2022)."""

    def __init__(self, rows, columns, rank):
        super().__init__()
        self.whole = nn.Linear(rows, columns, bias=False)
        self.rank = rank
        if rank:
            self.whole.requires_grad_(False)
            self.down, self.up = nn.Linear(rows, rank, bias=False), nn.Linear(rank, columns, bias=False)
            nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.whole(x) + self.up(self.down(x)) if self.rank else self.whole(x)


class Block(nn.Module):
    def __init__(self, width, heads, rank):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attend, self.merge = Linear(width, 3 * width, rank), Linear(width, width, rank)
        self.gate, self.inner = Linear(width, 3 * width, rank), Linear(width, 3 * width, rank)
        self.outer = Linear(3 * width, width, rank)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.attend(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).reshape(batch, length, width))
        y = self.between(x)
        return x + self.outer(F.silu(self.gate(y)) * self.inner(y))


class Llama(nn.Module):
    def __init__(self, words, width, layers, heads, rank):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads, rank) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        if rank:
            self.embed.requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


def texts(words, count, length):
    """Return sequences with a rule that can be learned: each word follows from the one before, but for one in ten."""
    draw = torch.Generator().manual_seed(1)
    follows = torch.randperm(words, generator=draw)
    columns = [torch.randint(words, (count,), generator=draw)]
    for _ in range(length):
        strays = torch.rand(count, generator=draw) < 0.1
        columns.append(torch.where(strays, torch.randint(words, (count,), generator=draw), follows[columns[-1]]))
    return TensorDataset(torch.stack(columns, dim=1))


def newest(folder):
    """Return the newest complete checkpoint, as torch writes the file .metadata last; None if there is none."""
    whole = [path for path in folder.glob("step-*") if (path / ".metadata").exists()]
    return max(whole, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64, help="of all devices together")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--lora", type=int, default=0, help="rank of an adapter; 0 trains all weights")
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model = Llama(512, args.width, args.layers, args.width // 16, args.lora).to(device)
    # Your own weights: model.load_state_dict(torch.load("weights.pt"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if cuda else None
    options = {"mp_policy": policy} if policy else {}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)

    folder = Path(os.environ.get("HETOPT_OUTPUT", ".")) / "checkpoints"
    step, checkpoint = 0, newest(folder)
    if checkpoint is not None:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        step = int(checkpoint.name.removeprefix("step-"))

    data = texts(512, args.samples, 32)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size // dist.get_world_size(), sampler=sampler, drop_last=True)
    for epoch in range(step // len(loader), args.epochs):
        sampler.set_epoch(epoch)
        for number, (batch,) in enumerate(loader, start=epoch * len(loader)):
            if number < step:  # of an epoch that was left in its middle
                continue
            batch = batch.to(device)
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            step = number + 1
            if step % args.save_every == 0:
                model_state, optimizer_state = get_state_dict(model, optimizer)
                dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / f"step-{step}")
                if dist.get_rank() == 0:
                    for old in sorted(folder.glob("step-*"), key=lambda path: path.stat().st_mtime)[:-2]:
                        shutil.rmtree(old)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1} step {step} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

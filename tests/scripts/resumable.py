"""A script that saves and resumes, as people write them: tests launch it, kill its workers, and look at its model."""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetopt import session

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--save-every", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--wait", type=float, default=0.0, help="seconds in each step, as of a larger model")
args = parser.parse_args()

torch.manual_seed(1)
inputs = torch.randn(320, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
extra = {"schedule": schedule}
with session(model, optimizer) as run:
    loader = run.loader(loader)
    for epoch in range(run.resume(extra), args.epochs):
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            time.sleep(args.wait)
            run.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            if number % args.save_every == args.save_every - 1:
                run.checkpoint(extra)
        schedule.step()
        print(f"epoch {epoch} is over")

"""Train a network on handwritten digits with DistributedDataParallel, before hetopt."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, train_set, test_set, args):
        self.args = args
        self.rank = dist.get_rank()
        self.model = DistributedDataParallel(model)
        self.optimizer = optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)
        self.sampler = DistributedSampler(train_set)
        self.train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=self.sampler)
        self.test_loader = DataLoader(test_set, batch_size=256)

    def step(self, images, labels):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def test(self):
        self.model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in self.test_loader:
                correct += (self.model(images).argmax(dim=1) == labels).sum().item()
        return correct / len(self.test_loader.dataset)

    def fit(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for images, labels in self.train_loader:
                loss = self.step(images, labels)
            dist.all_reduce(loss, op=dist.ReduceOp.AVG)
            accuracy = self.test()
            if self.rank == 0:
                print(f"epoch {epoch} loss {loss.item():.4f} accuracy {accuracy:.4f}")
                if self.args.save:
                    torch.save(self.model.module.state_dict(), self.args.save)
            dist.barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--save", default="")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    if int(os.environ["LOCAL_RANK"]) == 0:
        print(f"{dist.get_world_size()} workers")
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    train_set, test_set = random_split(TensorDataset(images, torch.tensor(digits.target)), [1500, 297])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    Trainer(model, train_set, test_set, args).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

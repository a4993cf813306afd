"""Train a network on handwritten digits, as `hetopt convert` makes it of `ddp_train.py`."""

import argparse
import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset, random_split

from hetopt import session


class Trainer:
    def __init__(self, model, train_set, test_set, args):
        self.args = args
        self.rank = int(os.environ.get("RANK", "0"))
        self.model = model
        self.optimizer = optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)
        self.train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
        self.test_loader = DataLoader(test_set, batch_size=256)

    def step(self, images, labels):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        self.train_loader.run.backward(loss)
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
        with session(self.model, self.optimizer) as run:
            self.train_loader = run.loader(self.train_loader)
            for epoch in range(self.args.epochs):
                self.model.train()
                for images, labels in self.train_loader:
                    loss = self.step(images, labels)
                loss.fill_(run.mean(loss))
                accuracy = self.test()
                if self.rank == 0:
                    print(f"epoch {epoch} loss {loss.item():.4f} accuracy {accuracy:.4f}")
                    if self.args.save:
                        torch.save(self.model.state_dict(), self.args.save)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--save", default="")
    args = parser.parse_args()

    torch.manual_seed(1)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{int(os.environ.get('WORLD_SIZE', '1'))} workers")
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    train_set, test_set = random_split(TensorDataset(images, torch.tensor(digits.target)), [1500, 297])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    Trainer(model, train_set, test_set, args).fit()


if __name__ == "__main__":
    main()

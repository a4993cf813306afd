"""A loop of Accelerate learns handwritten digits; `hetopt launch` runs it as it is."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    train, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [1500, 297])
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.7)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    exam = DataLoader(test, batch_size=128)

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    model, optimizer, loader, exam, schedule = accelerator.prepare(model, optimizer, loader, exam, schedule)
    for epoch in range(args.epochs):
        model.train()
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            right = [accelerator.gather_for_metrics(model(images).argmax(1) == labels) for images, labels in exam]
        accelerator.print(f"epoch {epoch} accuracy {torch.cat(right).float().mean():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

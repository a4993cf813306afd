"""Training scripts in the forms that people write them in, each small enough to be run in the blink of an eye.

All of them train the same network on the same samples; what differs is where model, optimizer, loader and loop are.
"""

from __future__ import annotations

_NET = """import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def samples():
    torch.manual_seed(3)
    return TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))


torch.manual_seed(1)
"""

_SEED = "torch.manual_seed(1)\n"

_DDP = """import os
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data.distributed import DistributedSampler

"""

_BODIES = {
    "functions with parameters": '''
def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for number, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(F.log_softmax(model(data), dim=1), target)
        loss.backward()
        optimizer.step()


def test(model, device, test_loader):
    model.eval()
    for data, target in test_loader:
        model(data.to(device))


def main():
    device = torch.device("cpu")
    train_loader = DataLoader(samples(), **{"batch_size": 16})
    test_loader = DataLoader(samples(), batch_size=48)
    model = Net().to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, 3):
        train(None, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
''',
    "variables of the file": '''
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
train_loader = DataLoader(samples(), batch_size=16, shuffle=True)


def loss_of(outputs, targets):
    return F.cross_entropy(outputs, targets)


def train(epoch):
    model.train()
    total = 0
    for number, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        total += loss.item()
        optimizer.step()


def main():
    """Train."""
    for epoch in range(1, 3):
        train(epoch)


if __name__ == "__main__":
    main()
''',
    "a class": '''
class Trainer:
    def __init__(self, lr):
        self.model = Net()
        self.loader = DataLoader(samples(), batch_size=16, shuffle=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.criterion = nn.CrossEntropyLoss()

    def step(self, batch):
        inputs, targets = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def fit(self, epochs):
        for epoch in range(epochs):
            for batch in self.loader:
                self.step(batch)


Trainer(0.1).fit(2)
''',
    "a class under torchrun": _DDP
    + '''
class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, path):
        self.gpu_id = int(os.environ["LOCAL_RANK"])
        self.model = model
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.path = path
        self.model = DDP(self.model)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        size = len(next(iter(self.train_data))[0])
        print(f"[{self.gpu_id}] epoch {epoch}: {size} of {len(self.train_data)}")
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def _save(self, epoch):
        torch.save(self.model.module.state_dict(), self.path)

    def train(self, epochs):
        for epoch in range(epochs):
            self._run_epoch(epoch)
            if self.gpu_id == 0 and epoch % self.save_every == 0:
                self._save(epoch)


def load():
    model = Net()
    return samples(), model, torch.optim.SGD(model.parameters(), lr=0.1)


def prepare(dataset, batch_size):
    return DataLoader(dataset, batch_size=batch_size, shuffle=False, sampler=DistributedSampler(dataset))


def main(epochs, batch_size):
    init_process_group(backend="gloo")
    dataset, model, optimizer = load()
    trainer = Trainer(model, prepare(dataset, batch_size), optimizer, 1, os.devnull)
    trainer.train(epochs)
    destroy_process_group()


if __name__ == "__main__":
    main(2, 16)
''',
    "weights that nobody seeds": '''
model = Net()
optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(samples(), batch_size=16)
for inputs, targets in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
''',
    "phases": '''
def train_model(model, criterion, optimizer, scheduler, dataloaders, num_epochs=2):
    for epoch in range(num_epochs):
        for phase in ["train", "val"]:
            if phase == "train":
                model.train()
            else:
                model.eval()
            total = 0.0
            for inputs, labels in dataloaders[phase]:
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    outputs = model(inputs)
                    loss = criterion(outputs, labels)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                total += loss.item()
            if phase == "val":
                scheduler.step(total)
    return model


loaders = {name: DataLoader(samples(), batch_size=16) for name in ("train", "val")}
net = Net()
sgd = torch.optim.SGD(net.b.parameters(), lr=0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, patience=0)
train_model(net, nn.CrossEntropyLoss(), sgd, plateau, loaders)
''',
    "accumulation, a schedule and compilation": '''
steps = 2
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
loader = DataLoader(samples(), batch_size=8)
schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=6)
net = torch.compile(net, backend="eager")
for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(net(x), y) / steps
        loss.backward()
        if (i + 1) % steps == 0 or i + 1 == len(loader):
            opt.step()
            schedule.step()
            opt.zero_grad()
''',
    "a step that knows no loader": '''
def learn(net, opt, x, y):
    opt.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    opt.step()
    return loss


def fit(net, opt, loader, epochs):
    for _ in range(epochs):
        for x, y in loader:
            learn(net, opt, x, y)


def main():
    net = Net()
    fit(net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(samples(), batch_size=16), 2)


main()
''',
    "two networks": '''
net_d = Net()
net_g = nn.Linear(2, 6)
optimizer_d = torch.optim.Adam(net_d.parameters(), lr=1e-3, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(net_g.parameters(), lr=1e-3, betas=(0.5, 0.999))
loader = DataLoader(samples(), batch_size=16)
for epoch in range(2):
    for i, (real, label) in enumerate(loader, 0):
        net_d.zero_grad()
        loss_real = F.cross_entropy(net_d(real), label)
        loss_real.backward()
        fake = net_g(real[:, :2])
        loss_fake = F.cross_entropy(net_d(fake.detach()), torch.zeros_like(label))
        loss_fake.backward()
        optimizer_d.step()
        net_g.zero_grad()
        loss_g = F.cross_entropy(net_d(fake), label)
        loss_g.backward()
        optimizer_g.step()
''',
    "a closure": '''
net = Net().double()
opt = torch.optim.LBFGS(net.parameters(), max_iter=2)
data = TensorDataset(samples().tensors[0].double(), samples().tensors[1])
loader = DataLoader(data, batch_size=16)
for epoch in range(1):
    for x, y in loader:
        def closure():
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss

        opt.step(closure)
''',
    "dropout of all kinds": '''
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(3, 8)
        self.attend = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.3, batch_first=True)
        self.recur = nn.LSTM(8, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.drop, self.leave = nn.Dropout1d(0.3), nn.Linear(8, 3)

    def forward(self, x):
        x = self.attend(self.enter(x.view(len(x), 2, 3)))
        kept = x.new_empty(len(x), 1, 1).bernoulli_(0.8) / 0.8
        return self.leave(F.alpha_dropout(self.drop(self.recur(x * kept)[0])[:, -1], 0.1, self.training))


loader = DataLoader(samples(), batch_size=16, shuffle=True)
model = Deep()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
''',
    "a training for each fold": '''
for fold in range(2):
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(samples(), batch_size=16)
    for epoch in range(2):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            opt.step()
''',
    "names that are taken, and a bar": '''
def session(run):
    """Two names that are taken."""


def epoch(shown, net, opt, every):
    for i, (x, y) in enumerate(tqdm(shown)):
        (F.cross_entropy(net(x), y)
            / every
        ).backward(retain_graph=False)
        if (i + 1) % every == 0:
            opt.step(); opt.zero_grad()


def fit(tqdm=iter):
    net, batches = Net(), DataLoader(samples(), batch_size=8)
    parameters = [p for p in net.parameters() if p.requires_grad]
    opt = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(2):
        epoch(batches, net=net, opt=opt, every=2)


tqdm = iter
fit()
''',
    "a bar in the place of the loader": '''
def train(net, opt, loader):
    loader = iter(loader)
    for x, y in loader:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()


net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
train(net, opt, DataLoader(samples(), batch_size=16))
''',
    "a string of several lines": '''
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
loader = DataLoader(samples(), batch_size=16)
for x, y in loader:
    text = """ä
  b"""; F.cross_entropy(net(x), y).backward()
    opt.step()
''',
    "a loss that is a sum": '''
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
loader = DataLoader(samples(), batch_size=16)
for x, y in loader:
    opt.zero_grad()
    (net(x) - F.one_hot(y, 3)).square().sum().backward()
    opt.step()
''',
    "batches of a function": '''
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
loader = DataLoader(samples(), batch_size=16)
batches = iter(loader)
while (batch := next(batches, None)) is not None:
    opt.zero_grad()
    F.cross_entropy(net(batch[0]), batch[1]).backward()
    opt.step()
''',
    "two loops": '''
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
loader = DataLoader(samples(), batch_size=16)
for x, y in loader:
    F.cross_entropy(net(x), y).backward()
    opt.step()
for x, y in loader:
    F.mse_loss(net(x), F.one_hot(y, 3).float()).backward()
    opt.step()
''',
    "two loaders side by side": '''
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
loader, other = DataLoader(samples(), batch_size=16), DataLoader(samples(), batch_size=16)
for (x, y), (z, _) in zip(loader, other):
    F.cross_entropy(net(x + z), y).backward()
    opt.step()
''',
    "a loader for each epoch": '''
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    loader = DataLoader(samples(), batch_size=16)
    for x, y in loader:
        F.cross_entropy(net(x), y).backward()
        opt.step()
''',
    "its own group of processes": '''
import torch.distributed as dist

dist.init_process_group("gloo")
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in DataLoader(samples(), batch_size=16):
    F.cross_entropy(net(x), y).backward()
    dist.all_reduce(net.a.weight.grad)
    opt.step()
''',
    "a model of an object": '''
class Trainer:
    def __init__(self):
        self.model = Net()

    def fit(self, loader):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            optimizer.step()


Trainer().fit(DataLoader(samples(), batch_size=16))
''',
}  # fmt: skip

DIFFERS = ("a loss that is a sum",)
"""Forms of which shares differ from one machine, as they do under DistributedDataParallel."""

BY_HAND = {
    "a class under torchrun": "by DistributedDataParallel: it runs as it is: hetopt launch PLAN -- script.py",
    "a class": "gives no optimizer of a model's parameters a name in one function",
    "a bar in the place of the loader": "is of a loader that train is not given",
    "a string of several lines": "the loop shares a line, or holds a string of several lines",
    "a step that knows no loader": "gives no optimizer of a model's parameters a name",
    "phases": "line 37: the backward pass is in no `for` loop over a loader that has a name",
    "a closure": "line 32: the backward pass is in closure, which is called in 0 places",
    "batches of a function": "is in no `for` loop over a loader that has a name",
    "two loops": "line 30: the backward pass is of another loop than that of line 27",
    "two loaders side by side": "is in no `for` loop over a loader that has a name",
    "a loader for each epoch": "loader is made anew each time",
    "its own group of processes": "joins other processes by itself",
}
"""Forms into which nothing is written, and why."""

FORMS = {name: (_NET.replace(_SEED, "") if "nobody seeds" in name else _NET) + text for name, text in _BODIES.items()}

"""Scripts as tutorials of the field have them, with a session in the place of what a plain script does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from .scripts import Open, loop, net, points, sgd, shuffled


def drawn(*size: int, high: int = 0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(high, size, generator=generator) if high else torch.randn(*size, generator=generator)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class SmallGPT(nn.Module):
    def __init__(self, words: int = 32, width: int = 16, length: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, 2)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        x = x + self.attention(self.norm(x))
        logits = self.head(x + self.mlp(x))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1)


def nanogpt(open_: Open) -> None:
    """`get_batch`, gradient accumulation in micro-steps, decay groups, clipping and a cosine by hand."""
    data, length, batch, window = drawn(400, high=32), 12, 8, 2
    torch.manual_seed(0)
    model = SmallGPT()
    groups = [
        {"params": [one for one in model.parameters() if one.dim() >= 2], "weight_decay": 0.1},
        {"params": [one for one in model.parameters() if one.dim() < 2], "weight_decay": 0.0},
    ]
    opt = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    torch.manual_seed(1)
    with open_(model, opt, accumulate=window) as run:

        def get_batch() -> tuple[Tensor, Tensor]:
            rows = run.split(torch.randint(len(data) - length, (batch,)))
            x = torch.stack([data[row : row + length] for row in rows])
            return x, torch.stack([data[row + 1 : row + 1 + length] for row in rows])

        for step in range(5):
            for group in opt.param_groups:
                group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / 5))
            for _ in range(window):
                x, y = get_batch()
                run.backward(model(x, y) / window)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)


def dcgan(open_: Open) -> None:
    """Three backward passes over two networks with BatchNorm; the noise is the samples', so that it is the same."""
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.ConvTranspose2d(4, 8, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 3, 2), nn.Tanh()
    )
    critic = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2), nn.LeakyReLU(0.2), nn.Conv2d(8, 8, 2), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 1)
    )
    opt_d = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    data = TensorDataset(drawn(90, 1, 5, 5), drawn(90, 4, 1, 1, seed=1))
    with open_((generator, critic), (opt_d, opt_g), batch_norm="synchronized") as run:
        for images, noise in run.loader(shuffled(data)):
            critic.zero_grad()
            real = torch.full((len(images),), 1.0)
            run.backward(criterion(critic(images).view(-1), real))
            fake = generator(noise)
            run.backward(criterion(critic(fake.detach()).view(-1), torch.zeros(len(images))))
            opt_d.step()
            generator.zero_grad()
            run.backward(criterion(critic(fake).view(-1), real))
            opt_g.step()


def rollout() -> tuple[Tensor, ...]:
    """Observations, actions, log probabilities then, returns, advantages."""
    return drawn(64, 8), drawn(64, high=4), -1.4 + 0.1 * drawn(64, seed=2), drawn(64, seed=3), drawn(64, seed=4)


def ppo(open_: Open, normalises: str = "all") -> None:
    """The clipped objective over minibatches that the script permutes by itself."""
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    opt = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-3, eps=1e-5)
    observed, actions, before, returns, advantages = rollout()
    if normalises == "all":
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    with open_((actor, critic), opt) as run:
        for epoch in range(2):
            order = torch.randperm(64, generator=torch.Generator().manual_seed(epoch))
            for start in range(0, 64, 16):
                rows = run.split(order[start : start + 16])
                policy = torch.distributions.Categorical(logits=actor(observed[rows]))
                ratio = (policy.log_prob(actions[rows]) - before[rows]).exp()
                gain = advantages[rows]
                if normalises == "minibatch":
                    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                elif normalises == "gathered":
                    whole = run.gather(gain)
                    gain = (gain - whole.mean()) / (whole.std() + 1e-8)
                surrogate = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
                value = 0.5 * (critic(observed[rows]).squeeze(1) - returns[rows]).square().mean()
                opt.zero_grad()
                run.backward(surrogate + 0.5 * value - 0.01 * policy.entropy().mean())
                nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
                opt.step()


def ppo_minibatch(open_: Open) -> None:
    """Advantages are normalised by the minibatch, of which each worker has a part."""
    ppo(open_, "minibatch")


def ppo_gathered(open_: Open) -> None:
    ppo(open_, "gathered")


def views() -> TensorDataset:
    return TensorDataset(drawn(70, 8), drawn(70, 8, seed=1))


def nt_xent(first: Tensor, second: Tensor) -> Tensor:
    features = functional.normalize(torch.cat([first, second]), dim=1)
    likeness = features @ features.T / 0.5
    likeness = likeness.masked_fill(torch.eye(len(features), dtype=torch.bool), -1e9)
    rows = len(first)
    return functional.cross_entropy(likeness, torch.cat([torch.arange(rows) + rows, torch.arange(rows)]))


def simclr(open_: Open, gathers: bool = True) -> None:
    """Two views in one pass, and the loss over all pairs."""
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with open_(model, opt) as run:
        for x1, x2 in run.loader(shuffled(views())):
            opt.zero_grad()
            first, second = model(torch.cat([x1, x2])).chunk(2)
            if gathers:
                first, second = run.gather(first), run.gather(second)
            run.backward(nt_xent(first, second))
            opt.step()


def simclr_ungathered(open_: Open) -> None:
    simclr(open_, gathers=False)


class Columns(Dataset[tuple[Tensor, Tensor]]):
    """A corpus in parallel columns, as word language models read it: batch `i` follows `i - 1` in each of them."""

    def __init__(self, columns: int) -> None:
        self.data = drawn(columns, 40, high=20)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


class WordModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.out = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 20)

    def forward(self, x: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        y, hidden = self.lstm(self.words(x), hidden)
        return self.out(y), hidden


def word_language_model(open_: Open) -> None:
    """The hidden state goes on from batch to batch, detached: a column stays with its worker."""
    torch.manual_seed(0)
    model, data = WordModel(), Columns(8).data
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    with open_(model, opt) as run:
        hidden: Any = None
        for start in range(0, 36, 6):
            rows = run.split(8)
            x, y = data[rows, start : start + 6], data[rows, start + 1 : start + 7]
            opt.zero_grad()
            hidden = None if hidden is None else tuple(one.detach() for one in hidden)
            logits, hidden = model(x, hidden)
            run.backward(functional.cross_entropy(logits.reshape(-1, 20), y.reshape(-1)))
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            opt.step()


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.log = nn.Linear(8, 16), nn.Linear(16, 2), nn.Linear(16, 2)
        self.decode = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = functional.relu(self.encode(x))
        mean, log = self.mean(h), self.log(h)
        return torch.sigmoid(self.decode(mean + noise * (0.5 * log).exp())), mean, log


def vae(open_: Open, mean: bool = False, states: bool = False) -> None:
    """Both terms of the loss are sums, as the example of pytorch has them."""
    torch.manual_seed(0)
    model = VAE()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.sigmoid(drawn(70, 8)), drawn(70, 2, seed=1))
    with open_(model, opt) as run:
        for x, noise in run.loader(shuffled(data)):
            opt.zero_grad()
            again, middle, log = model(x, noise)
            divergence = -0.5 * torch.sum(1 + log - middle.pow(2) - log.exp())
            if mean:
                loss = functional.mse_loss(again, x) + 0.01 * divergence / len(x)
            else:
                loss = functional.binary_cross_entropy(again, x, reduction="sum") + divergence
            run.backward(loss, **({"weight": len(x)} if states else {}))
            opt.step()


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = functional.relu(self.down(x))
        middle = functional.relu(self.middle(functional.max_pool2d(skip, 2)))
        return self.out(torch.cat([skip, self.up(middle)], 1))


def masks() -> TensorDataset:
    """Pixels of three classes, those of the border left out, and more of them on some images than on others."""
    labels = drawn(50, 8, 8, high=3)
    for number, one in enumerate(labels):
        one[: number % 8] = 255
    return TensorDataset(drawn(50, 1, 8, 8), labels)


def unet(open_: Open) -> None:
    torch.manual_seed(0)
    model = UNet()
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3, weight_decay=1e-8, momentum=0.9)
    criterion = nn.CrossEntropyLoss(ignore_index=255)
    with open_(model, opt) as run:
        for images, labels in run.loader(shuffled(masks(), batch=8)):
            opt.zero_grad()
            run.backward(criterion(model(images), labels))
            opt.step()


def unet_dice(open_: Open, gathers: bool = False) -> None:
    """A dice loss over the whole batch is a ratio of sums over it."""
    torch.manual_seed(0)
    model = UNet()
    opt = sgd(model)
    with open_(model, opt) as run:
        for images, labels in run.loader(shuffled(masks(), batch=8)):
            opt.zero_grad()
            logits, kept = model(images), labels.clamp(max=2)
            if gathers:
                logits, kept = run.gather(logits), run.gather(kept)
            chances, truth = logits.softmax(1), functional.one_hot(kept, 3).permute(0, 3, 1, 2).float()
            both = (chances * truth).sum((0, 2, 3))
            dice = (2 * both + 1e-6) / ((chances + truth).sum((0, 2, 3)) + 1e-6)
            run.backward(functional.cross_entropy(logits, kept) + 1 - dice.mean())
            opt.step()


def unet_dice_gathered(open_: Open) -> None:
    unet_dice(open_, gathers=True)


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(4, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(x)[0]).log_softmax(2)


def spoken() -> list[tuple[Tensor, Tensor]]:
    lengths = drawn(60, high=8, seed=5).tolist()
    return [(drawn(10 + n, 4, seed=n), 1 + drawn(2 + n % 3, high=5, seed=n)) for n in lengths]


def ctc(open_: Open, reduction: str = "mean") -> None:
    """Time first: the batch is the second dimension; the mean is of each sample's loss by its length."""
    torch.manual_seed(0)
    model = Speech()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)

    def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        inputs, targets = zip(*items, strict=True)
        longest = nn.utils.rnn.pad_sequence(list(targets), batch_first=True)
        sizes = torch.tensor([len(one) for one in inputs]), torch.tensor([len(one) for one in targets])
        return nn.utils.rnn.pad_sequence(list(inputs)), longest, *sizes

    criterion = nn.CTCLoss(reduction=reduction, zero_infinity=True)
    with open_(model, opt) as run:
        for x, y, n, m in run.loader(shuffled(spoken(), collate_fn=collate)):
            opt.zero_grad()
            run.backward(criterion(model(x), y, n, m))
            opt.step()


def ctc_sum(open_: Open) -> None:
    ctc(open_, "sum")


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, packed: Any) -> Tensor:
        return self.out(self.lstm(packed)[0].data)


def packed(open_: Open, last: bool = False, states: bool = False) -> None:
    """Sequences of different lengths: a mean over all places of them, or over the last of each."""
    torch.manual_seed(0)
    model = Tagger()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = [(drawn(2 + n, 4, seed=n), drawn(2 + n, high=3, seed=n)) for n in drawn(60, high=9, seed=5).tolist()]

    def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Any, Any]:
        items = sorted(items, key=lambda one: -len(one[0]))
        return tuple(nn.utils.rnn.pack_sequence(list(one)) for one in zip(*items, strict=True))  # type: ignore[return-value]  # two

    with open_(model, opt) as run:
        for x, y in run.loader(shuffled(data, collate_fn=collate)):
            opt.zero_grad()
            if last:
                hidden = model.lstm(x)[1][0][-1]
                ends = nn.utils.rnn.pad_packed_sequence(y, batch_first=True)
                loss = functional.cross_entropy(model.out(hidden), ends[0][torch.arange(len(hidden)), ends[1] - 1])
            else:
                loss = functional.cross_entropy(model(x), y.data)
            run.backward(loss, **({"weight": len(y.data)} if states else {}))
            opt.step()


def packed_stated(open_: Open) -> None:
    packed(open_, states=True)


def detection(open_: Open, apart: bool = False) -> None:
    """Two heads: one term over all cells, one over the positives alone, each by its own count."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4 + 4)
    opt = sgd(model)
    with open_(model, opt) as run:
        for x, y in run.loader(shuffled()):
            opt.zero_grad()
            out = model(x)
            positive = y > 1
            boxes = functional.smooth_l1_loss(out[positive, 4:], x[positive, :4], reduction="sum")
            number = int(positive.sum())
            if apart:
                run.backward(functional.cross_entropy(out[:, :4], y), retain_graph=True)
                run.backward(boxes / max(1, number), weight=number)
            else:
                run.backward(functional.cross_entropy(out[:, :4], y) + boxes / max(1, number))
            opt.step()


class Spread(nn.Module):
    """The discriminator of StyleGAN tells how alike the samples of a batch are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        spread = hidden.std(0).mean().expand(len(hidden), 1)
        return self.last(torch.cat([hidden, spread], 1))


def minibatch_deviation(open_: Open) -> None:
    loop(open_, model := Spread(), sgd(model))


class Lines(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(points(75))


def loaders(open_: Open) -> None:
    """A sampler, a batch sampler, `drop_last`, a collate function, a stream: one after the other."""
    model = net()
    opt = sgd(model)
    data = points(75)
    weights = torch.linspace(0.1, 1, 75).tolist()
    torch.manual_seed(1)
    several = [
        DataLoader(data, batch_size=16, sampler=WeightedRandomSampler(weights, 75)),
        DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(range(75), 16, drop_last=False)),
        DataLoader(data, batch_size=16, shuffle=True, drop_last=True),
        DataLoader(data, batch_size=16, collate_fn=lambda items: [torch.stack(one) for one in zip(*items)]),  # noqa: B905
        DataLoader(Lines(), batch_size=16),
    ]
    with open_(model, opt) as run:
        for one in several:
            for x, y in run.loader(one):
                opt.zero_grad()
                run.backward(functional.cross_entropy(model(x), y))
                opt.step()


def two_phases(open_: Open) -> None:
    """The head first; then everything, by an optimizer that is made then, in a session of its own."""
    model = net()
    for one in model[0].parameters():
        one.requires_grad_(False)
    loop(open_, model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    for one in model.parameters():
        one.requires_grad_(True)
    groups = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[2].parameters()}]
    loop(open_, model, torch.optim.AdamW(groups, lr=1e-2))


def compiled(open_: Open) -> None:
    """The backend that compiles nothing: what dynamo does to the graph is what counts here."""
    model = net()
    fast = torch.compile(model, backend="eager")
    opt = sgd(model)
    with open_(model, opt) as run:
        for x, y in run.loader(shuffled()):
            opt.zero_grad()
            run.backward(functional.cross_entropy(fast(x), y))
            opt.step()


def in_place_loss(open_: Open) -> None:
    """Losses of a window are added up, and backward runs once over all of them."""
    model = net()
    opt = sgd(model)
    with open_(model, opt) as run:
        loss = torch.zeros(())
        for number, (x, y) in enumerate(run.loader(shuffled())):
            loss = loss + functional.cross_entropy(model(x), y) / 2
            if number % 2:
                opt.zero_grad()
                run.backward(loss)
                opt.step()
                loss = torch.zeros(())


REMEDIES = (ppo_minibatch, minibatch_deviation, unet_dice, simclr_ungathered)
"""Whose loss couples samples."""

EXACT = (packed, packed_stated, detection, ppo_gathered, unet_dice_gathered, simclr)

MORE = (
    nanogpt, dcgan, ppo, word_language_model, vae, unet, ctc, ctc_sum, loaders, two_phases, compiled, in_place_loss,
)  # fmt: skip
"""Exact as well."""

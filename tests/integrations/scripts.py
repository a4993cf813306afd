"""Scripts as people write them with a framework; what differs with hetopt is where `Way` is asked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "frameworks"
QUIET = {"enable_progress_bar": False, "enable_model_summary": False}


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a script runs: ``plain``, ``alone`` in a session, or as one of ``two`` workers; and where it may write."""

    name: str
    folder: Path

    @property
    def is_plain(self) -> bool:
        return self.name == "plain"


def import_all() -> None:
    """Before children are forked: an import of each takes seconds."""
    import lightning  # noqa: F401
    import transformers
    from transformers import BertForSequenceClassification, GPT2LMHeadModel  # noqa: F401

    import hetopt.integrations.accelerate
    import hetopt.integrations.lightning
    import hetopt.integrations.transformers  # noqa: F401

    transformers.utils.logging.set_verbosity_error()


# transformers


def language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=1, eos_token_id=1))


def texts(count: int) -> list[dict[str, Tensor]]:
    """Of very unequal lengths, so that workers have unequal shares of the tokens of a batch."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 25, (count,), generator=generator).tolist()
    return [{"ids": torch.randint(1, 50, (length,), generator=generator)} for length in lengths]


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([row["ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def arguments(way: Way, **told: Any) -> Any:
    from transformers import TrainingArguments

    usual = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "remove_unused_columns": False}
    usual |= {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 8, "save_strategy": "no"}
    return TrainingArguments(str(way.folder), **{**usual, **told})


def trainer_of(way: Way) -> Any:
    if way.is_plain:
        from transformers import Trainer
    else:
        from hetopt.integrations.transformers import Trainer
    return Trainer


def told_by(trainer: Any) -> dict[str, Any]:
    """Figures that must be those of one machine, step by step."""
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_hits", "num_input_tokens_seen", "step", "epoch")
    history = [{name: row[name] for name in kept if name in row} for row in trainer.state.log_history]
    weights = torch.cat([one.detach().flatten() for one in trainer.model.parameters()])
    return {"history": history, "weights": weights}


def trainer_tokens(way: Way) -> Any:
    """A language model: losses over tokens, windows of three batches and a rest of one, clipping, warm-up, AdamW."""
    options = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5, "warmup_steps": 2, "eval_strategy": "epoch"}
    told = arguments(way, num_train_epochs=2, **options, include_num_input_tokens_seen="non_padding")
    model, data = language_model(), texts(97)  # the last batch is of one sample, so that a worker has none
    trainer = trainer_of(way)(model, told, data_collator=padded, train_dataset=data, eval_dataset=data[:30])
    trainer.train()
    return told_by(trainer)


def classes(count: int) -> list[dict[str, Any]]:
    ids = torch.randint(5, 60, (count, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": int(row[0] > 30)} for row in ids]


def hits(prediction: Any) -> dict[str, float]:
    return {"hits": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def trainer_resumed(way: Way) -> Any:
    """A classifier that is interrupted within an epoch and goes on from transformers' own checkpoint."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    figures = []
    for stop in (3, -1):
        torch.manual_seed(0)
        model = BertForSequenceClassification(BertConfig(**sizes, **drops, intermediate_size=32))
        steps = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
        best = {"load_best_model_at_end": True, "metric_for_best_model": "hits", "save_total_limit": 1}
        told = arguments(way, gradient_accumulation_steps=2, num_train_epochs=2, **steps, **best, max_steps=stop)
        data = classes(150)
        trainer = trainer_of(way)(model, told, train_dataset=data, eval_dataset=data[:30], compute_metrics=hits)
        trainer.train(resume_from_checkpoint=stop < 0)
        figures.append(told_by(trainer))
    saved = sorted(one.relative_to(way.folder).as_posix() for one in way.folder.rglob("*.*") if one.is_file())
    return {"parts": figures, "saved": saved}


def trainer_smoothed(way: Way) -> Any:
    """Labels that are smoothed, as an argument says; evaluated before, between and after two trainings."""
    told = arguments(way, num_train_epochs=1, gradient_accumulation_steps=2, label_smoothing_factor=0.1)
    data = texts(97)
    trainer = trainer_of(way)(language_model(), told, data_collator=padded, train_dataset=data, eval_dataset=data[:30])
    exams = [trainer.evaluate()]
    for _ in range(2):
        trainer.train()
        exams.append(trainer.evaluate())
    exams.append(trainer.predict(data[:8]).metrics)
    return {**told_by(trainer), "exams": [{name: row[name] for name in row if "loss" in name} for row in exams]}


# What a batch's samples have to do with each other


def standardised(loss: Tensor, gain: Tensor) -> Tensor:
    """A loss that no parts add up to: a statistic of the batch comes back to each of its samples."""
    return (loss * (gain - gain.mean()) / gain.std()).mean()


def trainer_statistic(way: Way) -> None:
    class Ours(trainer_of(way)):  # type: ignore[misc]  # a class that is made here
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
            logits = model(inputs["input_ids"]).logits[:, -1]
            return standardised(cross_entropy(logits, inputs["labels"], reduction="none"), inputs["labels"].float())

    data = [{**row, "input_ids": row["input_ids"] % 50} for row in classes(64)]
    Ours(language_model(), arguments(way, num_train_epochs=1), train_dataset=data).train()


def accelerated_statistic(way: Way) -> None:
    accelerator = accelerator_of(way)
    model, optimizer, loader = accelerator.prepare(model := net(), sgd(model), DataLoader(points(), batch_size=16))
    for x, y in loader:
        accelerator.backward(standardised(cross_entropy(model(x), y, reduction="none"), x[:, 0]))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


def lightning_statistic(way: Way) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def configure_optimizers(self) -> Any:
            return sgd(self)

        def training_step(self, batch: Any, index: int) -> Any:
            return standardised(cross_entropy(self.net(batch[0]), batch[1], reduction="none"), batch[0][:, 0])

    lightning_of(way, max_epochs=1).fit(Module(), DataLoader(points(), batch_size=16))


def lightning_weighted(way: Way) -> None:
    """A mean over some of the samples, whose backward pass the module calls: what a refusal says may be done."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.count = net(), 0

        def configure_optimizers(self) -> Any:
            return sgd(self)

        def training_step(self, batch: Any, index: int) -> Any:
            chosen = batch[1] > 0
            self.count = int(chosen.sum())
            each = cross_entropy(self.net(batch[0]), batch[1], reduction="none")
            return (each * chosen).sum() * (1 / max(1, self.count))

        def backward(self, loss: Any) -> None:
            run = getattr(self.trainer.strategy, "run", None)
            if run is None:
                loss.backward()
            else:
                run.backward(loss, weight=self.count)

    lightning_of(way, max_epochs=1).fit(Module(), DataLoader(points(), batch_size=16))


# Accelerate


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def accelerator_of(way: Way, **options: Any) -> Any:
    if way.is_plain:
        from accelerate import Accelerator
    else:
        from hetopt.integrations.accelerate import Accelerator
    return Accelerator(cpu=True, **options)


def accelerated_tokens(way: Way) -> Any:
    """A window of batches is read ahead, and its losses are divided by the tokens of all of them."""
    accelerator = accelerator_of(way, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
    loader = DataLoader(texts(96), batch_size=16, collate_fn=padded)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    batches = iter(loader)
    for _ in range(len(loader) // 2):
        window = [next(batches) for _ in range(2)]
        tokens = sum(int((one["labels"] >= 0).sum()) for one in window)
        tokens = tokens if way.is_plain else accelerator.run.total(tokens)
        for one in window:
            with accelerator.accumulate(model):
                out = model(one["input_ids"]).transpose(1, 2)
                accelerator.backward(2 * cross_entropy(out, one["labels"], reduction="sum") / tokens)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.end_training()
    return {"weight": model[1].weight.detach()}


def accelerated_exam_first(way: Way) -> None:
    """The loader that was prepared first is not the one that trains."""
    accelerator = accelerator_of(way)
    _, loader = accelerator.prepare(DataLoader(points(), batch_size=8), DataLoader(points(), batch_size=16))
    model, optimizer = accelerator.prepare(model := net(), sgd(model))
    for x, y in loader:
        accelerator.backward(cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


def points(samples: int = 128) -> TensorDataset:
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def accelerated(way: Way) -> Any:
    """Accelerate's usual loop: windows of two batches and a rest, clipping, a schedule, figures, its own checkpoint."""
    accelerator = accelerator_of(way, gradient_accumulation_steps=2)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    torch.manual_seed(1)
    loader, exam = DataLoader(points(97), batch_size=16, shuffle=True), DataLoader(points(70), batch_size=16)
    loader, exam = accelerator.prepare(loader, exam)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    figures: dict[str, list[float]] = {"loss": [], "right": [], "rate": [], "exam": []}

    def train(batches: Any) -> None:
        model.train()
        for x, y in batches:
            with accelerator.accumulate(model):
                out = model(x)
                loss = cross_entropy(out, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            figures["loss"].append(float(accelerator.reduce(loss.detach(), "mean")))
            guess, truth = accelerator.gather_for_metrics((out.argmax(1), y))
            figures["right"].append(float((guess == truth).float().mean()))
            figures["rate"].append(schedule.get_last_lr()[0])
        model.eval()
        right = [accelerator.gather_for_metrics((model(x).argmax(1) == y).float()) for x, y in exam]
        figures["exam"].append(float(torch.cat(right).mean()))

    for epoch in range(2):
        loader.set_epoch(epoch)
        train(loader)
    accelerator.save_state(str(way.folder))
    accelerator.wait_for_everyone()
    accelerator.load_state(str(way.folder))
    train(accelerator.skip_first_batches(loader, 2))
    train(loader)
    accelerator.end_training()
    return figures


# Lightning


def lightning_of(way: Way, **options: Any) -> Any:
    import lightning

    from hetopt.integrations.lightning import HetoptStrategy

    return lightning.Trainer(
        accelerator="cpu", devices=1, strategy="auto" if way.is_plain else HetoptStrategy(),
        **{"logger": False, "enable_checkpointing": False, **QUIET, **options},
    )  # fmt: skip


def lightning_scheduled(way: Way) -> Any:
    """A schedule over as many steps as the Trainer expects, which it asks for before there are optimizers; BatchNorm
    that is synchronised, as the Trainer's argument says; fitted twice."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))

        def configure_optimizers(self) -> Any:
            steps = int(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer := sgd(self), 0.2, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def training_step(self, batch: Any, index: int) -> Any:
            return cross_entropy(self.net(batch[0]), batch[1])

    trainer = lightning_of(way, max_epochs=1, accumulate_grad_batches=2, sync_batchnorm=not way.is_plain)
    steps = []
    for _ in range(2):
        torch.manual_seed(1)
        trainer.fit(Module(), DataLoader(points(98), batch_size=16, shuffle=True))
        steps.append(trainer.global_step)
        trainer.fit_loop.max_epochs += 1
    return {"steps": steps}


def lightning_skipped(way: Way) -> None:
    """A batch without a loss."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def configure_optimizers(self) -> Any:
            return sgd(self)

        def training_step(self, batch: Any, index: int) -> Any:
            return None if index == 2 else cross_entropy(self.net(batch[0]), batch[1])

    lightning_of(way, max_epochs=1).fit(Module(), DataLoader(points(), batch_size=16))


def lightning_module(way: Way) -> Any:
    """Lightning's own loop: windows of two batches and a rest, clipping, a schedule, early stopping, the best model."""
    import lightning
    import torchmetrics
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.right, self.seen = torchmetrics.MeanMetric(), torchmetrics.SumMetric()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "exam"}}

        def training_step(self, batch: Any, index: int) -> Any:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
            self.log("count", float(len(batch[0])), sync_dist=True, on_step=False, on_epoch=True, reduce_fx="sum")
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            out = self.net(batch[0])
            self.log("exam", cross_entropy(out, batch[1]), sync_dist=True)
            self.right.update((out.argmax(1) == batch[1]).float())
            self.seen.update(len(out))
            self.log_dict({"right": self.right, "seen": self.seen})

    figures: list[dict[str, Any]] = []
    for epochs, path in ((2, None), (6, "best")):
        torch.manual_seed(1)
        module = Module()
        data = DataLoader(points(101), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(epochs))
        best = ModelCheckpoint(monitor="exam", save_top_k=1, save_last=True)
        stop = EarlyStopping("exam", patience=1)
        trainer = lightning_of(
            way, max_epochs=epochs, callbacks=[best, stop], accumulate_grad_batches=2, gradient_clip_val=0.5,
            log_every_n_steps=1, num_sanity_val_steps=1, logger=CSVLogger(way.folder), enable_checkpointing=True,
        )  # fmt: skip
        where = None if path is None else figures[-1]["best"]
        trainer.fit(module, data, DataLoader(points(70), batch_size=16), ckpt_path=where)
        told = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
        figures.append({"told": told, "steps": trainer.global_step, "best": best.best_model_path})
    return figures


def lightning_manual(way: Way) -> Any:
    """Manual optimisation of two optimizers in turn, whose steps Lightning gives a closure that does nothing."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.maker, self.judge = nn.Linear(8, 8), nn.Linear(8, 1)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (self.maker, self.judge)]

        def training_step(self, batch: Any, index: int) -> None:
            makes, judges = self.optimizers()
            for optimizer, sign in ((judges, 1.0), (makes, -1.0)):
                self.toggle_optimizer(optimizer)
                made, real = self.judge(self.maker(batch[0])), self.judge(batch[0])
                optimizer.zero_grad()
                self.manual_backward(sign * (made - real).tanh().mean())
                optimizer.step()
                self.untoggle_optimizer(optimizer)

    torch.manual_seed(0)
    trainer = lightning_of(way, max_epochs=1)
    trainer.fit(Module(), DataLoader(points(101), batch_size=16))
    return {"steps": trainer.global_step}


# Experiment trackers


class WandbRun:
    """As a run of Weights & Biases takes figures: ``log(data, step=None, commit=None)``."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.rows.append([step, dict(data)])


class Mlflow:
    """As the module mlflow takes them: ``log_metrics(metrics, step=None, synchronous=None)``."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, synchronous: bool | None = None) -> None:
        self.rows.append([step, dict(metrics)])


def logged(way: Way) -> Any:
    """A loop that logs to every kind of tracker; TensorBoard's own writer where it is installed."""
    from lightning.pytorch.loggers import CSVLogger

    from hetopt import session

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(points(101), batch_size=16)
    rows: dict[str, list[Any]] = {"wandb": [], "mlflow": [], "function": []}
    trackers: list[Any] = [WandbRun(rows["wandb"]), Mlflow(rows["mlflow"])]
    trackers.append(lambda figures, step: rows["function"].append([step, figures]))
    csv = CSVLogger(way.folder, version=f"{torch.initial_seed()}")
    trackers += [csv, *tensorboard(way)]

    def figures(loss: Tensor, out: Tensor, y: Tensor) -> dict[str, Any]:
        return {"loss": loss.detach(), "right": (out.argmax(1) == y).float().mean()}

    if way.is_plain:
        for step, (x, y) in enumerate(loader, 1):
            optimizer.zero_grad()
            loss = cross_entropy(out := model(x), y)
            loss.backward()
            optimizer.step()
            told = {name: float(value) for name, value in figures(loss, out, y).items()}
            trackers[2](told, step)
        return {"rows": rows["function"]}
    with session(model, optimizer) as run:
        for x, y in run.loader(loader):
            optimizer.zero_grad()
            run.backward(loss := cross_entropy(out := model(x), y))
            optimizer.step()
            for tracker in trackers:
                told = run.log(figures(loss, out, y), to=tracker if run.is_leader else None)
        csv.save()
    return {"rows": rows, "last": told, "csv": [dict(row) for row in csv.experiment.metrics]}


def tensorboard(way: Way) -> list[Any]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return []
    return [SummaryWriter(str(way.folder))]


# The examples


CHANGED = {
    "with_transformers": {"from hetopt.integrations.transformers import": "from transformers import"},
    "with_accelerate": {"from hetopt.integrations.accelerate import": "from accelerate import"},
    "with_lightning": {
        "from hetopt.integrations.lightning import HetoptStrategy\n": "",
        "        strategy=HetoptStrategy(),\n": "",
    },
}
"""What makes the plain script of an example: all that its user changed."""


def example(name: str, way: Way, *arguments: str) -> Any:
    """Run an example, or the plain script that it was."""
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    for ours, plain in CHANGED[name].items():
        assert ours in source
        source = source.replace(ours, plain) if way.is_plain else source
    sys.argv = [name, *arguments]
    exec(compile(source, name, "exec"), {"__name__": "__main__"})
    return sorted(one.name for one in way.folder.rglob("*.*")) if way.folder.exists() else []


def with_transformers(way: Way) -> Any:
    return example("with_transformers", way, "--samples", "300", "--epochs", "1", "--output", str(way.folder))


def with_accelerate(way: Way) -> Any:
    return example("with_accelerate", way, "--epochs", "1")


def with_lightning(way: Way) -> Any:
    return example("with_lightning", way, "--epochs", "1", "--output", str(way.folder))


CASES: tuple[Callable[[Way], Any], ...] = (
    trainer_tokens,
    trainer_resumed,
    trainer_smoothed,
    trainer_statistic,
    accelerated,
    accelerated_tokens,
    accelerated_statistic,
    accelerated_exam_first,
    lightning_module,
    lightning_manual,
    lightning_scheduled,
    lightning_statistic,
    lightning_weighted,
    lightning_skipped,
    logged,
    with_transformers,
    with_accelerate,
    with_lightning,
)

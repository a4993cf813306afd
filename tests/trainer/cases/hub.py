"""Scripts as people write them with transformers, peft, Lightning and Accelerate."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from .scripts import Open, loop, net, points, sgd, shuffled

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def _language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def _texts() -> TensorDataset:
    return TensorDataset(torch.randint(1, 50, (64, 12), generator=torch.Generator().manual_seed(0)))


def low_rank_adapters(open_: Open) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(_language_model(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    opt = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    with open_(model, opt) as run:
        for (ids,) in run.loader(shuffled(_texts())):
            opt.zero_grad()
            run.backward(model(input_ids=ids, labels=ids).loss)
            opt.step()


def lightning_module(open_: Open) -> None:
    """Lightning's own loop, which asks for batches ahead and steps by a closure."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def configure_optimizers(self) -> Any:
            return self.__dict__["opt"]

        def backward(self, loss: Any) -> None:
            self.__dict__["run"].backward(loss)

        def training_step(self, batch: Any, index: int) -> Any:
            return cross_entropy(self.net(batch[0]), batch[1])

    module = Module()
    opt = module.__dict__["opt"] = sgd(module)
    with open_(module, opt) as run, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.__dict__["run"] = run
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, gradient_clip_val=0.5, **QUIET)
        trainer.fit(module, run.loader(shuffled(points(101))))


def accelerated(open_: Open) -> None:
    from accelerate import Accelerator

    model = net()
    _, opt, loader = Accelerator(cpu=True).prepare(net(), sgd(model), DataLoader(points(), batch_size=16))
    loop(open_, model, opt, loader)


def accelerated_loader(open_: Open) -> None:
    from accelerate import Accelerator

    loop(open_, model := net(), sgd(model), Accelerator(cpu=True).prepare(DataLoader(points(), batch_size=16)))


def hub_trainer(open_: Open) -> None:
    """transformers' Trainer wraps the model by itself where several processes run."""
    from transformers import Trainer, TrainingArguments

    model = _language_model()
    opt = sgd(model)
    rows = [{"input_ids": ids, "labels": ids} for (ids,) in _texts()]
    with open_(model, opt) as run:

        class Ours(Trainer):
            def get_train_dataloader(self) -> Any:
                return run.loader(DataLoader(rows, batch_size=16, collate_fn=self.data_collator))

            def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
                loss = self.compute_loss(model, inputs)
                run.backward(loss)
                return loss.detach()

        told = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
        arguments = TrainingArguments(tempfile.mkdtemp(), num_train_epochs=1, per_device_train_batch_size=16, **told)
        Ours(model, arguments, train_dataset=rows, optimizers=(opt, None)).train()


EXACT = (low_rank_adapters, lightning_module)

REFUSED = {
    accelerated: ("AcceleratedOptimizer", "leave the session out"),
    accelerated_loader: ("DataLoaderShard", "leave the session out"),
    hub_trainer: (
        "wrapped in DistributedDataParallel since the session began",
        "leave the session out",
    ),
}
"""What the sentence has to name."""

"""transformers' Trainer teaches a small language model to add; `hetopt launch` runs it as it is."""

import argparse

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

SIGNS = "0123456789+="


def sums(count, seed):
    draw = torch.Generator().manual_seed(seed)
    pairs = torch.randint(0, 1000, (count, 2), generator=draw).tolist()
    return [{"input_ids": [SIGNS.index(sign) + 1 for sign in f"{a}+{b}={a + b}"]} for a, b in pairs]


def collate(rows):
    ids = pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--output", default="trained-by-transformers")
    args = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": len(SIGNS) + 1}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0))
    settings = TrainingArguments(
        args.output,
        per_device_train_batch_size=args.batch_size,  # under `hetopt launch` the plan's global batch counts
        gradient_accumulation_steps=2,
        num_train_epochs=args.epochs,
        learning_rate=3e-3,
        warmup_steps=5,
        max_grad_norm=1.0,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=10,
        remove_unused_columns=False,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model,
        settings,
        data_collator=collate,
        train_dataset=sums(args.samples, seed=1),
        eval_dataset=sums(100, seed=2),
    )
    trainer.train()


if __name__ == "__main__":
    main()

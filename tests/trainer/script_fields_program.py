"""One of two workers of a little script, run after run: ``script_fields_program.py RANK FOLDER``.

``FOLDER/NAME/spec.json`` says what each is planned as; what a run refuses is kept beside it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetopt.core.errors import BadInput
from hetopt.core.run_folder import read_spec
from hetopt.trainer.session import session

WORKERS, BATCH, EPOCHS = 2, 64, 3


def script(folder: Path) -> None:
    """Train as a person's script does, planned as the folder says."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(6 * BATCH, 6, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with session(model, optimizer, spec=read_spec(folder), folder=folder) as run:
        loader = run.loader(DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh()), batch_size=BATCH))
        for _ in range(EPOCHS):
            for batch, targets in loader:
                optimizer.zero_grad()
                run.backward(nn.functional.mse_loss(model(batch), targets))
                optimizer.step()


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    # As torchrun sets them; nobody meets there, as the group is made here.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORKERS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(WORKERS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), WORKERS), rank=rank, world_size=WORKERS)
    for place in sorted(path.parent for path in folder.glob("*/spec.json")):
        try:
            script(place)
        except BadInput as error:
            (place / f"refused-{rank}").write_text(str(error))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

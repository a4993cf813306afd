"""Brings the model of a rented run into its folder: whole or not at all, and checked by its size."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from hetopt.backends.ec2.objects import S3Objects
from hetopt.backends.ec2.protocol import MODELS_FOLDER
from hetopt.backends.ec2.renter.order import Order
from hetopt.core.errors import BadInput, CloudRefused
from hetopt.core.run_folder import MODEL_FILE, UNFINISHED_MODEL_FILE


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A model that is here.

    Attributes:
        path: of the file; its name says whether it was trained to the end.
        url: where the bucket keeps it.
    """

    path: Path
    url: str


def fetch_model(order: Order, run_dir: Path) -> Fetched:
    """Bring the model into the run's folder, if it is not there already: the trained one, else the unfinished one.

    Raises:
        BadInput: the run has no model, or there is no room for it.
        CloudRefused: it cannot be read.
    """
    prefix = f"{MODELS_FOLDER}/{order.run_id}"
    objects = S3Objects.connect(region=order.region, bucket=order.bucket, prefix=prefix, account_id=order.account_id)
    folder, again = f"s3://{order.bucket}/{prefix}", f"`hetopt fetch {order.run_id}`"
    for name in (MODEL_FILE, UNFINISHED_MODEL_FILE):
        size = objects.size_bytes(name)
        if size is not None:
            break
    else:
        raise BadInput(
            f"there is no model in {folder} that these credentials may read.",
            hint=f"a run has one when it has ended: look with `hetopt status {order.run_id}`, then {again}",
        )
    fetched = Fetched(path=run_dir / name, url=f"{folder}/{name}")
    if fetched.path.is_file() and fetched.path.stat().st_size == size:
        return fetched
    free = shutil.disk_usage(run_dir).free
    if free < size:
        raise BadInput(
            f"the model has {size:,} bytes, and {run_dir} has room for {free:,}.", hint=f"make room, then {again}"
        )
    if not objects.fetch(name, fetched.path) or fetched.path.stat().st_size != size:
        fetched.path.unlink(missing_ok=True)
        raise CloudRefused(f"{fetched.url} could not be read to its end.", hint=f"try again: {again}")
    return fetched

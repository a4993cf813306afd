"""What every file that flows through hetopt has in common: a schema version, strict fields, and one readable JSON form.

Artifacts come from disk and from other people, so they are validated on the way in; a bad file becomes one sentence
that names the file, the field and what to do. They are written whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetopt.profiler.errors import BadInput


class Record(BaseModel):
    """A frozen fact inside an artifact: unknown fields, NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Artifact(Record):
    """A record that is a file of its own. ``schema_version`` grows whenever an older reader would misread the file."""

    KIND: ClassVar[str]
    VERSION: ClassVar[int]
    MADE_BY: ClassVar[str]

    kind: str = ""
    schema_version: int = Field(default=0, ge=0)

    def model_post_init(self, context: Any, /) -> None:
        """Stamp the kind and version of records made in this process (files bring their own)."""
        if not self.kind:
            object.__setattr__(self, "kind", type(self).KIND)
            object.__setattr__(self, "schema_version", type(self).VERSION)

    @classmethod
    def from_json(cls, text: str, *, origin: str) -> Self:
        """Read the artifact from ``text``; ``origin`` (usually the path) is named in errors.

        Raises:
            BadInput: not JSON, another kind of artifact, a newer schema, or a field that cannot be.
        """
        again = f"make it again with `{cls.MADE_BY}`"
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise BadInput(
                f"{origin} is not complete JSON (line {error.lineno}: {error.msg.lower()}).", hint=again
            ) from None
        if not isinstance(data, dict) or data.get("kind") != cls.KIND:
            found = data.get("kind") if isinstance(data, dict) else None
            what = f"a {found}" if isinstance(found, str) and found else "something else"
            raise BadInput(f"{origin} holds {what}, not a {cls.KIND}.", hint=again)
        version = data.get("schema_version")
        if isinstance(version, int) and version > cls.VERSION:
            raise BadInput(
                f"{origin} was written with {cls.KIND} schema {version}; this hetopt reads up to {cls.VERSION}.",
                hint="install the newer hetopt that wrote it",
            )
        if version != cls.VERSION:
            raise BadInput(f"{origin} has {cls.KIND} schema {version!r}, which this hetopt cannot read.", hint=again)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            reason = first["msg"].removeprefix("Value error, ")
            raise BadInput(
                f"{origin}: {where}: {reason[:1].lower()}{reason[1:]}.", hint=f"correct that field or {again}"
            ) from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the artifact from a file (see `from_json`)."""
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise BadInput(f"{path} does not exist.", hint=f"make it with `{cls.MADE_BY}`") from None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise BadInput(f"{path} cannot be read: {reason}.", hint="name another file") from None
        return cls.from_json(text, origin=str(path))

    def to_json(self) -> str:
        """The artifact as indented JSON, ending in a newline."""
        return self.model_dump_json(indent=2) + "\n"

    def save(self, path: Path) -> None:
        """Write the artifact to ``path``, whole or not at all."""
        write_atomically(path, self.to_json())


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``content`` (text as UTF-8) beside ``path``, flush it to disk, then rename it into place.

    A link is followed; a device or pipe such as ``/dev/stdout`` is written to, never replaced.

    Raises:
        BadInput: the folder is missing or cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    path = path.resolve()
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as stream:
            stream.write(data)
        return
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    except OSError as error:
        raise BadInput(
            f"{path} cannot be written: {error.strerror}.", hint="name a file in a folder that you can write to"
        ) from None
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise BadInput(f"{path} cannot be written: {error.strerror}.", hint="name another file") from None
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise

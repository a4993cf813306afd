"""The base of hetopt's JSON files (profile, plan, report, ...): schema version, strict fields, and whole writes.

Artifacts come from disk and from other people, so they are validated on the way in; a bad file becomes one sentence
that names the file, the field and what to do. They are written whole or not at all.
"""

import fcntl
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

from pydantic import (
    VERSION,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    ValidationError,
    model_serializer,
    model_validator,
)

from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.paths import (
    HOST_PATTERN,
    MOST_BYTES,
    RUN_PATTERN,
    MissingFile,
    parse_json,
    read_json,
    read_text,
    shortened,
)
from hetopt.core.plain_text import fault_of, one_line, texts_in, typed

CleanText = Annotated[str, BeforeValidator(lambda value: one_line(value) if isinstance(value, str) else value)]
"""Text from a machine, a library or a log: cleaned to one printable line when a record is made, never refused."""


HostName = Annotated[str, StringConstraints(pattern=HOST_PATTERN)]
"""The name of a machine in its run: it becomes a folder, a key and a word on command lines."""
RunName = Annotated[str, StringConstraints(pattern=RUN_PATTERN)]
"""The name of a run: it becomes a folder, a key and a tag."""


class PlainText(BaseModel):
    """A record that refuses, when it is made, texts that are not one line of at most 4,000 printable characters.

    Texts inside lists and mappings count, keys too; the refusal is pydantic's ValidationError.
    """

    @model_validator(mode="after")
    def _plain(self) -> Self:
        """Return the record; raise `ValueError` on a text in it, at any depth, that is not one printable line."""
        for name, value in self.__dict__.items():
            for text in texts_in(value):
                fault = fault_of(text)
                if fault is not None:
                    raise ValueError(f"{name} {fault}")
        return self


DEFERS = tuple(map(int, VERSION.split(".")[:2])) >= (2, 14)
"""Whether threads that need the validator of a record first wait for one of them to build it, as of pydantic 2.14."""


class Record(PlainText):
    """A frozen `PlainText` that refuses unknown fields, NaN and infinity.

    What it refuses raises pydantic's ValidationError. Its validator is built when the first record is made: a command
    needs a few of all kinds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=DEFERS)


class RecordLeavingOut(Record):
    """A record whose JSON leaves out fields that have their default values.

    Left out are the fields named in ``LEFT_OUT``, or, where that is empty, all but those named in ``WRITTEN``. Other
    fields are always written.
    """

    LEFT_OUT: ClassVar[tuple[str, ...]] = ()
    WRITTEN: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Serialize the record without the fields that stand at their defaults and are listed in ``LEFT_OUT``.

        With an empty ``LEFT_OUT`` these are all fields but those in ``WRITTEN``.
        """
        written: dict[str, object] = handler(self)
        fields = type(self).model_fields
        left_out = self.LEFT_OUT or fields.keys() - set(self.WRITTEN)
        return {
            name: value
            for name, value in written.items()
            if name not in left_out or getattr(self, name) != fields[name].default
        }


AnyRecord = TypeVar("AnyRecord", bound=Record)


class Artifact(Record):
    """A record kept as a JSON file of its own, with its kind and schema version.

    Attributes:
        KIND: name of the kind of artifact, which its file states.
        VERSION: schema version that is read and written; it grows whenever an older reader would misread the file.
        MADE_BY: the command that makes such a file, for hints.
        kind: the file's kind; a record made here gets ``KIND``.
        schema_version: the file's version; a record made here gets ``VERSION``.
    """

    KIND: ClassVar[str]
    VERSION: ClassVar[int]
    MADE_BY: ClassVar[str]
    SHOWN_BY: ClassVar[str] = ""
    """The function that makes a notebook's document, as ``module:function``; empty: a notebook shows the text."""

    kind: str = ""
    schema_version: int = Field(default=0, ge=0)

    def model_post_init(self, context: Any, /) -> None:
        """Stamp the kind and version of records made in this process (files bring their own)."""
        if not self.kind:
            object.__setattr__(self, "kind", type(self).KIND)
            object.__setattr__(self, "schema_version", type(self).VERSION)

    def _repr_html_(self) -> str | None:
        """Return the document as a notebook shows it, the artifact's page in a frame; None: this kind has no page."""
        module, _, function = type(self).SHOWN_BY.partition(":")
        if not module:
            return None
        return str(import_module("hetopt.reports.html").notebook(getattr(import_module(module), function)(self)))

    @classmethod
    def from_json(cls, text: str, *, origin: str) -> Self:
        """Parse and validate the artifact from JSON ``text``; errors name ``origin``, usually the path.

        Raises:
            BadInput: the text is not JSON, another kind of artifact or of another schema version, or a field is
                missing, unknown or invalid.
        """
        again = f"make it again with `{cls.MADE_BY}`"
        is_script = Path(origin).suffix == ".py"
        what_first = f"profile it first: `hetopt profile -- {typed(origin)}`" if is_script else again
        data = parse_json(text, origin=origin, hint=what_first)
        origin = shortened(origin)
        if not isinstance(data, dict) or data.get("kind") != cls.KIND:
            kind = data.get("kind") if isinstance(data, dict) else None
            what = f"a {shortened(kind, 40)}" if isinstance(kind, str) and kind else "something else"
            raise BadInput(f"{origin} holds {what}, not a {cls.KIND}.", hint=again)
        version = data.get("schema_version")
        if version != cls.VERSION:
            is_newer = isinstance(version, int) and version > cls.VERSION
            why = f"; this hetopt reads up to {cls.VERSION}" if is_newer else ", which this hetopt cannot read"
            raise BadInput(
                f"{origin} has {cls.KIND} schema {shortened(repr(version), 40)}{why}.",
                hint="install the newer hetopt that wrote it" if is_newer else again,
            )
        return validated(cls, data, origin=origin, hint=f"correct that field or {again}")

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read and validate the artifact from a JSON file of at most 64 MB.

        Raises:
            MissingFile: the file does not exist; the hint says how it is made.
            BadInput: the file cannot be read, or is not such an artifact (see `from_json`).
        """
        try:
            text = read_text(Path(path))
        except MissingFile as missing:
            raise MissingFile(missing.message, hint=f"make it with `{cls.MADE_BY}`") from None
        return cls.from_json(text, origin=str(path))

    def to_json(self) -> str:
        """Return the artifact as indented JSON, ending in a newline."""
        return self.model_dump_json(indent=2) + "\n"

    def save(self, path: Path | str) -> None:
        """Write the artifact as JSON to ``path``, whole or not at all; a file there is replaced.

        Raises:
            BadInput: the file cannot be written, or would be larger than the 64 MB that are read back.
        """
        text = self.to_json()
        if len(text) > MOST_BYTES // 2 and len(text.encode()) > MOST_BYTES:
            raise BadInput(
                f"{shortened(str(path))} would be larger than the {MOST_BYTES / 1e6:g} MB that hetopt reads.",
                hint="leave some of the samples out",
            )
        write_atomically(Path(path), text)


AnyArtifact = TypeVar("AnyArtifact", bound=Artifact)


def update_artifact(
    kind: type[AnyArtifact], path: Path, change: Callable[[AnyArtifact | None], AnyArtifact]
) -> AnyArtifact:
    """Read an artifact's file under a lock, change it, write it back, and return the changed artifact.

    The file's folder and a lock file beside it are made where they are not there. Another process that holds the lock
    is waited for. The file stays as it is where ``change`` raises.

    Args:
        kind: class of the artifact.
        path: path of the artifact's file, which need not exist.
        change: returns the new artifact, given the one in the file; None: there is no file yet.

    Raises:
        BadInput: the file cannot be read or written, or holds something else.
        OSError: the folder or the lock file cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        artifact = change(kind.load(path) if path.exists() else None)
        artifact.save(path)
    return artifact


def kind_in(path: Path) -> str | None:
    """Return the kind of artifact that a JSON file states, such as ``plan``; None: it states none or cannot be read."""
    try:
        data = read_json(path)
    except BadInput:
        return None  # reading it as the artifact that is wanted says what is wrong
    kind = data.get("kind") if isinstance(data, dict) else None
    return kind if isinstance(kind, str) else None


def read_record(kind: type[AnyRecord], path: Path, *, hint: str) -> AnyRecord:
    """Read a record of class ``kind`` from a JSON file that states no kind or version; errors end with ``hint``.

    Args:
        kind: class of the record.
        path: path of the file.
        hint: what a person can do about an error.

    Raises:
        MissingFile: the file does not exist.
        BadInput: the file cannot be read, is not JSON, or a field is missing, unknown or invalid.
    """
    return validated(kind, read_json(path, hint=hint), origin=str(path), hint=hint)


class ReplacedRecord(Generic[AnyRecord]):
    """A reader of the newest readable record in a small JSON file that others replace; nothing is raised.

    A file that vanished or is damaged leaves the record of before. It is parsed again only after a replacement.

    Args:
        kind: class of the record.
        path: path of the file, which need not exist.
    """

    def __init__(self, kind: type[AnyRecord], path: Path) -> None:
        """Remember class and path; the file is read by `now`."""
        self._kind, self._path = kind, path
        self._seen: tuple[int, int] | None = None
        self._record: AnyRecord | None = None

    def now(self) -> AnyRecord | None:
        """Return the newest record that could be read; None: none could be read yet.

        A file that has vanished or is damaged leaves the last record in place; nothing is raised. Where nothing
        changed, one system call is made.
        """
        with suppress(OSError, BadInput):  # it is not there, or cannot be read as this record
            status = os.stat(self._path)
            identity = (status.st_ino, status.st_mtime_ns)
            if identity != self._seen:
                self._record = read_record(self._kind, self._path, hint="launch the run again")
                self._seen = identity
        return self._record


def validated(kind: type[AnyRecord], data: Any, *, origin: str, hint: str) -> AnyRecord:
    """Validate parsed JSON into a record of class ``kind``; errors name ``origin`` and end with ``hint``.

    Args:
        kind: class of the record.
        data: plain values, as JSON gives them.
        origin: what errors call the data, usually the path.
        hint: what a person can do about an error.

    Raises:
        BadInput: a field is missing, unknown or invalid; the sentence names the first such field.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise BadInput(f"{shortened(origin)}: {faults(error)[0]}.", hint=hint) from None
    except RecursionError:
        raise BadInput(f"{shortened(origin)} is nested too deeply.", hint=hint) from None


def parse_from_peer(kind: type[AnyRecord], data: bytes | str, who: str) -> AnyRecord:
    """Parse JSON from another machine into a record of class ``kind``, whose name in errors is ``who``.

    Nothing that a peer sends is trusted: numbers are finite and within bounds, lists nested no deeper than the record
    says, texts one line each. The caller limits how many bytes are read.

    Raises:
        RunFailed: the data is not JSON, or no record of this class.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise RunFailed(f"{who} says what cannot be ({faults(error)[0]}).", hint="see what runs there") from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``content`` (text as UTF-8) whole or not at all, by a flushed file and a rename; a file there is replaced.

    A link is followed; a device or pipe such as ``/dev/stdout`` is written to, never replaced. In a folder that only
    its owner may read, only the owner may read the file; permissions of a replaced file are not kept.

    Raises:
        BadInput: the folder is missing or cannot be written, or the disk is full.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        path = path.resolve()
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(data)
            return
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
        try:
            # In a folder that is private, what was learned is its owner's alone.
            mode = 0o666 if path.parent.stat().st_mode & 0o077 else 0o600
            with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(
            f"{shortened(str(path))} cannot be written: {error.strerror}.",
            hint="make room, or name a file in a folder that you can write to",
        ) from None


_RULE = "Input should be "


def faults(
    error: ValidationError, names: Mapping[str, str] | None = None, texts: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return one phrase for each invalid field of a record, such as ``workers must be greater than 0, got -1``.

    The branches of a union make one phrase. Of a list that is too short since items are invalid, only the items are
    named.

    Args:
        error: pydantic's error for the record.
        names: by field, what whoever wrote the value calls the field; None or absent: the field's own name.
        texts: by field, the text that was written for it; None or absent: the value that the record was given.
    """
    by_field: dict[tuple[str, ...], list[Any]] = {}
    for fault in error.errors(include_url=False):
        # A branch of a union, in pydantic's location, is not in the file.
        parts = [part for part in map(str, fault["loc"]) if not part.startswith("constrained-") and "[" not in part]
        where = tuple(repr(part)[1:-1] for part in parts)
        by_field.setdefault(where, []).append(fault)
    sentences = []
    for where, errors in by_field.items():
        if errors[0]["type"] == "too_short" and any(
            other[: len(where)] == where for other in by_field if other != where
        ):
            continue  # an item that cannot be is not counted
        field = where[0] if where else ""
        name = ".".join(((names or {}).get(field, field), *where[1:]))
        got = repr(texts[field]) if texts and field in texts else _shown(errors[0]["input"])
        sentences.append(_in_words(shortened(name, 80), errors, shortened(got, 80)))
    return tuple(sentences)


def _in_words(named: str, errors: list[Any], got: str) -> str:
    """Describe the faults of one value as a part of a sentence; of a union each branch has its own.

    Args:
        named: what the sentence calls the value.
        errors: pydantic's, at least one.
        got: the value as shown.
    """
    first = errors[0]
    rules = list(dict.fromkeys(error["msg"] for error in errors))
    match first["type"]:
        case "missing":
            return f"{named} is missing"
        case "extra_forbidden":
            return f"{named} is no field of it"
        case "too_short" | "too_long":
            limit = first["ctx"].get("min_length", first["ctx"].get("max_length"))
            least = "least" if first["type"] == "too_short" else "most"
            return f"{named} must have at {least} {limit} item{'s' * (limit != 1)}, got {first['ctx']['actual_length']}"
    if all(rule.startswith(_RULE) for rule in rules):
        rule = " or ".join(rule.removeprefix(_RULE).partition(", unable")[0] for rule in rules)
        return f"{named or 'it'} must be {rule}, got {got}"
    sentence = next(rule for rule in rules if not rule.startswith(_RULE)).removeprefix("Value error, ").rstrip(".")
    sentence = f"{sentence[:1].lower()}{sentence[1:]}" if sentence[1:2].islower() else sentence
    return f"{named}: {sentence}" if named else sentence


def _shown(value: object) -> str:
    """Return what an error shows of a value: its repr; of None, objects and lists only the kind, in JSON's words."""
    match value:
        case None:
            return "null"
        case Mapping():
            return "an object"
        case list() | tuple():
            return "a list"
        case _:
            return repr(value)

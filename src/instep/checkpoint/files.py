"""Files and directories that are either there, whole and on the disk, or not at all.

A checkpoint is one directory. ``save`` writes it under a name that nobody reads (``make_unfinished``): each file and
the directory are flushed to the disk, and one rename makes it a checkpoint (``publish``). A process that is killed, or
a machine that is switched off, at any point of this leaves the checkpoints that were there. ``load`` reads files that
anybody may have put there, and compares each of them with its digest.
"""

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from instep._optim.values import bytes_of
from instep.errors import CheckpointError, DamagedCheckpointError

MANIFEST, DIGEST = "manifest.json", "manifest.json.sha256"
_UNFINISHED, _REMOVED = ".saving-", ".removing-"
_CHECKPOINT = re.compile(r"step-(\d{12,18})(?:\.(\d{1,6}))?")
_BLOCK = 1 << 22
_logger = logging.getLogger("instep")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointDir:
    """A directory whose name is that of a checkpoint of ``step``. A step that was saved once more has a later
    ``attempt``. The order is that of age."""

    step: int
    attempt: int
    path: Path


def checkpoints_in(directory: Path) -> list[CheckpointDir]:
    """The checkpoints in ``directory``, by their names, the newest first."""
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            match = _CHECKPOINT.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                found.append(CheckpointDir(int(match[1]), int(match[2] or 0), directory / entry.name))
    return sorted(found, reverse=True)


def step_in_name(directory: Path) -> int | None:
    """The step in the name of a checkpoint; ``None`` for a checkpoint that was given another name."""
    match = _CHECKPOINT.fullmatch(directory.name)
    return int(match[1]) if match else None


def require_directory(path: Path) -> None:
    """Raise ``CheckpointError`` if ``path`` is there and is no directory."""
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"path={str(path)!r} is a file: give the directory that checkpoints are kept in")


def make_unfinished(directory: Path, step: int) -> Path:
    """Make an empty directory to write in, under a name that no checkpoint has. Remove what killed saves have left."""
    if not directory.exists():
        directory.mkdir(parents=True)
        flush_directory(directory.parent)
    for name in os.listdir(directory):
        if name.startswith((_UNFINISHED, _REMOVED)):
            shutil.rmtree(directory / name, ignore_errors=True)
    unfinished = directory / f"{_UNFINISHED}{step}-{secrets.token_hex(4)}"
    unfinished.mkdir()
    return unfinished


def publish(unfinished: Path, step: int) -> Path:
    """Rename ``unfinished``, whose files are on the disk, to a checkpoint of ``step``. Returns the new path."""
    # Before the rename: or else a checkpoint might have its name on the disk, and not yet all of its files.
    flush_directory(unfinished)
    directory = unfinished.parent
    taken = [found.attempt for found in checkpoints_in(directory) if found.step == step]
    suffix = f".{max(taken) + 1}" if taken else ""
    final = directory / f"step-{step:012d}{suffix}"
    os.rename(unfinished, final)
    try:
        flush_directory(directory)
    except OSError:
        os.rename(final, unfinished)  # or else it might be gone again once the machine is switched off
        raise
    return final


def flush_directory(path: Path) -> None:
    """Return when the directory's own entries, the names of its files, are on the disk."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def remove_older(directory: Path, step: int, keep: int) -> None:
    """Remove all checkpoints up to ``step`` but those of the newest ``keep`` steps, and of each of these but the last
    attempt. An error is a warning: the new checkpoint stands."""
    kept: set[int] = set()
    try:
        for found in checkpoints_in(directory):
            if found.step > step:
                continue
            if found.step not in kept and len(kept) < keep:
                kept.add(found.step)
                continue
            # Half a checkpoint must not go by the name of one.
            removed = directory / f"{_REMOVED}{found.path.name}"
            os.rename(found.path, removed)
            shutil.rmtree(removed)
    except OSError as error:
        _logger.warning("older checkpoints in %s could not be removed: %s", directory, error)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file as it was written: its size in bytes, and the SHA-256 of its bytes in hexadecimal digits."""

    size: int
    sha256: str


def write(path: Path, pieces: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file, and return when it is on the disk. The digest is that of ``pieces``: it is not read back, so
    that a disk that has stored something else is found out."""
    digest, size = hashlib.sha256(), 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            rest = memoryview(piece)
            while rest:
                # May write less than it is given, as on a disk that is nearly full.
                written = os.write(file, rest[:_BLOCK])
                if written <= 0:
                    raise OSError(f"nothing could be written to {path}")
                rest = rest[written:]
        os.fsync(file)
    finally:
        os.close(file)
    return FileRecord(size, digest.hexdigest())


# safetensors' names. It has no complex numbers: each is written as its two parts.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "F32",
    torch.complex128: "F64",
}


def stored_shape(shape: Sequence[int], dtype: torch.dtype) -> list[int]:
    """The shape that safetensors has for a tensor: complex numbers have a dimension for their parts."""
    return [*shape, 2] if dtype.is_complex else list(shape)


def write_tensors(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> FileRecord:
    """Write a safetensors file, one tensor at a time: host memory is needed for the largest alone. (safetensors' own
    ``save_file`` takes all of them in host memory.)"""
    # The widest elements first: then every tensor is aligned.
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        shape = stored_shape(tensor.shape, tensor.dtype)
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for _, tensor in ordered:
            yield _bytes_of(tensor)

    return write(path, pieces())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return bytes_of(tensor.detach().resolve_conj().resolve_neg().cpu()).numpy().data


def digest_line(manifest: str) -> bytes:
    """The content of the file beside the manifest, in the form that ``sha256sum -c`` reads."""
    return f"{manifest}  {MANIFEST}\n".encode()


def require_as_recorded(path: Path, record: FileRecord, *, digest: bool) -> None:
    """Raise ``DamagedCheckpointError`` unless the file is the one that was written.

    Args:
        digest: compare the content, too, and not the size alone.
    """
    with _opened(path) as (file, size):
        if size != record.size:
            raise DamagedCheckpointError(f"{path} has {size} bytes in place of {record.size}")
        if digest and _digest_of(file) != record.sha256:
            raise DamagedCheckpointError(f"{path} is not what was saved: its SHA-256 is another")


def _digest_of(file: int) -> str:
    digest = hashlib.sha256()
    while block := os.read(file, _BLOCK):
        digest.update(block)
    return digest.hexdigest()


def read_small(path: Path, limit: int) -> bytes:
    """The content of a file of at most ``limit`` bytes; ``DamagedCheckpointError`` for a longer one."""
    with _opened(path) as (file, size):
        if size > limit:
            raise DamagedCheckpointError(f"{path} has {size} bytes, more than {limit}")
        # Not past the limit, however the file grows meanwhile.
        blocks, left = [], limit + 1
        while left > 0 and (block := os.read(file, min(left, _BLOCK))):
            blocks.append(block)
            left -= len(block)
        return b"".join(blocks)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """The descriptor and the size of a plain file; ``DamagedCheckpointError`` for anything else, and for one that
    cannot be read."""
    try:
        # Not through a link, out of the directory; and without waiting for somebody to write into a pipe.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise DamagedCheckpointError(f"{path} is not a file")
            yield file, found.st_size
        finally:
            os.close(file)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}") from error

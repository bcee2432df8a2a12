"""The tensors of one checkpoint on the disk, read whole or in part once all of its files are known to be intact."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from instep.checkpoint import manifest as manifests
from instep.checkpoint.boxes import Box, whole
from instep.checkpoint.files import DTYPES, require_as_recorded, step_in_name, stored_shape
from instep.checkpoint.manifest import Manifest, TensorRecord, is_of_a_model
from instep.errors import DamagedCheckpointError


class CheckpointReader:
    """Reads one checkpoint. The files may have been made up by anybody: what a file says is compared with the manifest,
    and every error of safetensors or torch is a ``DamagedCheckpointError``.

    Args:
        rank: of ``size`` ranks, which share out the work of computing the files' digests. Each of them must make a
            reader, and tell the others whether it was made.

    Raises:
        DamagedCheckpointError: a file is missing, or is not as it was written.
    """

    def __init__(self, directory: Path, rank: int, size: int) -> None:
        self.directory = directory
        self.manifest: Manifest = manifests.read(directory)
        named = step_in_name(directory)
        if named is not None and named != self.manifest.step:
            raise DamagedCheckpointError(f"{directory} holds step {self.manifest.step}: it has been renamed")
        for number, (name, record) in enumerate(sorted(self.manifest.files.items())):
            require_as_recorded(directory / name, record, digest=number % size == rank)
        self._taken: set[str] = set()
        self._open: dict[str, Any] = {}

    def record(self, leaf: Mapping[str, Any]) -> tuple[str, TensorRecord]:
        """Resolve ``leaf``, which stands in an encoded value in a tensor's place. Returns the tensor's key and its
        record."""
        key = leaf["tensor"]
        # The model's tensors are read by the names of parameters and buffers alone.
        if not isinstance(key, str) or key not in self.manifest.tensors or is_of_a_model(key):
            raise DamagedCheckpointError(f"a value is the tensor {str(key)[:200]!r}, which is not there")
        # Or else a small file could be made to fill the memory.
        if key in self._taken:
            raise DamagedCheckpointError(f"two values are the same tensor {key[:200]!r}")
        self._taken.add(key)
        return key, self.manifest.tensors[key]

    def read_leaf(self, leaf: Mapping[str, Any]) -> torch.Tensor:
        """Read all of the tensor that ``leaf`` stands for, into host memory."""
        return self.read(self.record(leaf)[0])

    def read(self, key: str, box: Box | None = None) -> torch.Tensor:
        """Read a tensor, or the part of it in ``box``, into host memory."""
        record = self.manifest.tensors[key]
        box = whole(record.shape) if box is None else box
        try:
            return self._read(key, record, box)
        except DamagedCheckpointError:
            raise
        except Exception as error:  # whatever safetensors and torch say of a file that somebody made up
            raise DamagedCheckpointError(f"{self.directory}: tensor {key!r} cannot be read: {error}") from error

    def _read(self, key: str, record: TensorRecord, box: Box) -> torch.Tensor:
        found = torch.empty(box.shape, dtype=record.dtype, device="cpu")
        into = torch.view_as_real(found) if record.dtype.is_complex else found
        for file, chunk in record.chunks:
            common = chunk.common(box)
            if common is None:
                continue
            part = self._file(file).get_slice(key)
            if part.get_shape() != stored_shape(chunk.shape, record.dtype) or part.get_dtype() != DTYPES[record.dtype]:
                raise DamagedCheckpointError(
                    f"tensor {key!r} is {part.get_shape()} {part.get_dtype()} in {file}, and not what the manifest says"
                )
            if common == chunk:
                into[common.within(box)] = self._file(file).get_tensor(key)
            else:
                into[common.within(box)] = part[common.within(chunk)]
        return found

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.directory / name, framework="pt", device="cpu")
        return self._open[name]

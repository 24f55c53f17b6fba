"""A tensor that two processes on one node map at once: the tap scratch between a worker and its drafter.

On CPU it is a file in shared memory under a name the creator chose; on GPU it is CUDA IPC. Nothing is copied
and nothing orders reads against writes: that is the business of the messages which speak of the rows.

Who creates a tensor unlinks its name, once, in `close`. A creator that is killed leaves a file behind;
`remove_leftovers` deletes those of one gang by the prefix of their names. `multiprocessing.shared_memory` is
not used because before Python 3.13 every process that attaches also unlinks when it exits.
"""

import mmap
import os
import tempfile
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from torch.storage import TypedStorage

from .errors import ConfigError

DtypeName = Literal["bfloat16", "float32", "float16", "int64", "int32", "uint8"]

# /dev/shm is memory; elsewhere (macOS) a mapped temporary file means the same, at the page cache's speed
_DIRECTORY = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path(tempfile.gettempdir())


class CudaHandle(msgspec.Struct, frozen=True, kw_only=True):
    """What CUDA IPC needs to open another process's allocation; the names are PyTorch's."""

    storage_device: int
    storage_handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """How another process attaches."""

    name: str
    shape: tuple[int, ...]
    dtype: DtypeName
    cuda: CudaHandle | None = None  # None: shared memory on CPU


class SharedTensor:
    """One process's mapping. `tensor` is contiguous, zero when created, and dead after `close`."""

    def __init__(self, tensor: Tensor, descriptor: Descriptor, owned: Path | None) -> None:
        self._tensor: Tensor | None = tensor
        self.descriptor = descriptor
        self._owned = owned

    @classmethod
    def create(
        cls, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
    ) -> "SharedTensor":
        """A new tensor under `name`, which no live tensor of this node may bear.

        Raises ConfigError when shared memory is too small for it.
        """
        dtype_name = _dtype_name(dtype)
        if device is not None and device.type == "cuda":
            tensor = torch.zeros(shape, dtype=dtype, device=device)
            descriptor = Descriptor(name=name, shape=shape, dtype=dtype_name, cuda=_export(tensor))
            return cls(tensor, descriptor, None)
        path = _path(name)
        num_bytes = tensor_bytes(shape, dtype)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # allocate now: in a sparse file the first write that does not fit is a SIGBUS
            os.posix_fallocate(fd, 0, num_bytes)
            mapping = mmap.mmap(fd, num_bytes)
        except OSError as error:
            path.unlink()
            raise ConfigError(
                f"{_DIRECTORY} cannot hold {num_bytes >> 20} MiB of shared memory ({error.strerror}); "
                "enlarge it (docker: --shm-size) or lower max_num_batched_tokens"
            ) from None
        finally:
            os.close(fd)
        return cls(_view(mapping, shape, dtype), Descriptor(name=name, shape=shape, dtype=dtype_name), path)

    @classmethod
    def attach(cls, descriptor: Descriptor) -> "SharedTensor":
        """The same memory as the creator's; FileNotFoundError if its creator closed it."""
        dtype = getattr(torch, descriptor.dtype)
        if descriptor.cuda is not None:
            return cls(_import(descriptor.cuda, descriptor.shape, dtype), descriptor, None)
        fd = os.open(_path(descriptor.name), os.O_RDWR)
        try:
            mapping = mmap.mmap(fd, tensor_bytes(descriptor.shape, dtype))
        finally:
            os.close(fd)
        return cls(_view(mapping, descriptor.shape, dtype), descriptor, None)

    @property
    def tensor(self) -> Tensor:
        assert self._tensor is not None, f"shared tensor {self.descriptor.name} is closed"
        return self._tensor

    def close(self) -> None:
        """Let go of the memory; the creator also removes the name. It is freed when the last view is gone."""
        self._tensor = None
        if self._owned is not None:
            self._owned.unlink(missing_ok=True)
            self._owned = None


def remove_leftovers(prefix: str) -> int:
    """Delete the shared tensors of this node whose name starts with `prefix`; returns how many there were.

    Only for names whose creators are known to be dead.
    """
    assert len(prefix) >= 8, "a short prefix would match the tensors of others"
    leftovers = [path for path in _DIRECTORY.iterdir() if path.name.startswith(prefix)]
    for path in leftovers:
        path.unlink(missing_ok=True)
    return len(leftovers)


def tensor_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """At least one: an empty mapping does not exist."""
    return max(1, torch.Size(shape).numel() * dtype.itemsize)


def _path(name: str) -> Path:
    assert name.strip("/") == name != "", f"{name!r} is no name"
    return _DIRECTORY / name


def _view(mapping: mmap.mmap, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor keeps the mapping alive."""
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mapping, dtype=dtype, count=count).view(shape)


def _dtype_name(dtype: torch.dtype) -> DtypeName:
    return msgspec.convert(str(dtype).removeprefix("torch."), DtypeName)


def _export(tensor: Tensor) -> CudaHandle:
    """In the order of `torch.multiprocessing.reductions.reduce_tensor`."""
    shared = tensor.untyped_storage()._share_cuda_()
    return CudaHandle(
        storage_device=shared[0],
        storage_handle=shared[1],
        storage_size_bytes=shared[2],
        storage_offset_bytes=shared[3],
        ref_counter_handle=shared[4],
        ref_counter_offset=shared[5],
        event_handle=shared[6],
        event_sync_required=shared[7],
    )


def _import(handle: CudaHandle, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return rebuild_cuda_tensor(
        tensor_cls=Tensor,
        tensor_size=torch.Size(shape),
        tensor_stride=torch.empty(shape, device="meta").stride(),
        tensor_offset=0,
        storage_cls=TypedStorage,
        dtype=dtype,
        requires_grad=False,
        **msgspec.structs.asdict(handle),
    )

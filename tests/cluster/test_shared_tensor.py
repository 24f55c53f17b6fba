"""Two processes see one tensor; its name lives exactly as long as its creator wants."""

import errno
import inspect
import os
import subprocess
import sys
import uuid
from pathlib import Path

import msgspec
import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from paceline.cluster import shared_tensor
from paceline.cluster.errors import ConfigError
from paceline.cluster.shared_tensor import CudaHandle, Descriptor, SharedTensor, remove_leftovers

ADD_ONE_IN_ANOTHER_PROCESS = """
import sys, msgspec
from paceline.cluster.shared_tensor import Descriptor, SharedTensor
shared = SharedTensor.attach(msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=Descriptor))
shared.tensor.add_(1)
print(tuple(shared.tensor.shape), shared.tensor.dtype)
"""


@pytest.fixture
def name() -> str:
    return f"paceline-test-{uuid.uuid4().hex}"


def file_of(name: str) -> Path:
    return shared_tensor._DIRECTORY / name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_both_ends_see_the_same_values(name: str, dtype: torch.dtype) -> None:
    creator = SharedTensor.create(name, (4, 3, 2), dtype)
    assert creator.tensor.count_nonzero() == 0
    other = SharedTensor.attach(creator.descriptor)
    creator.tensor[2, 1, 0] = 7
    other.tensor[0, 0, 1] = 5
    assert other.tensor[2, 1, 0] == 7
    assert creator.tensor[0, 0, 1] == 5
    other.close()
    creator.close()


def test_another_process_attaches_and_its_end_does_not_remove_the_name(name: str) -> None:
    creator = SharedTensor.create(name, (5, 3), torch.bfloat16)
    packed = msgspec.msgpack.encode(creator.descriptor).hex()
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-W", "error", "-c", ADD_ONE_IN_ANOTHER_PROCESS, packed],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert run.stdout.strip() == "(5, 3) torch.bfloat16"
        assert run.stderr == "", "no complaint of a resource tracker"
    assert torch.equal(creator.tensor, torch.full((5, 3), 2, dtype=torch.bfloat16))
    assert file_of(name).exists()
    creator.close()
    assert not file_of(name).exists()


def test_only_the_creator_unlinks_and_views_outlive_close(name: str) -> None:
    creator = SharedTensor.create(name, (2,), torch.float32)
    other = SharedTensor.attach(creator.descriptor)
    view = other.tensor[1:]
    other.close()
    assert file_of(name).exists()
    creator.close()
    creator.close()
    view.fill_(3.0)
    assert view.item() == 3.0
    with pytest.raises(FileNotFoundError):
        SharedTensor.attach(creator.descriptor)
    with pytest.raises(AssertionError, match="is closed"):
        _ = other.tensor


def test_a_name_is_taken_while_it_lives(name: str) -> None:
    creator = SharedTensor.create(name, (2,), torch.float32)
    with pytest.raises(FileExistsError):
        SharedTensor.create(name, (2,), torch.float32)
    assert file_of(name).exists()
    creator.close()


def test_memory_that_does_not_fit_is_refused_before_it_is_touched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ConfigError, match=r"cannot hold 3 MiB .*No space left.*--shm-size"):
        SharedTensor.create(name, (3 << 20,), torch.uint8)
    assert not file_of(name).exists()


def test_an_empty_tensor_is_a_tensor(name: str) -> None:
    creator = SharedTensor.create(name, (4, 0, 8), torch.float32)
    assert SharedTensor.attach(creator.descriptor).tensor.shape == (4, 0, 8)
    creator.close()


def test_leftovers_of_a_gang_are_removed_and_nobody_elses(name: str) -> None:
    theirs = SharedTensor.create(f"{name}-b-taps-0", (2,), torch.float32)
    for rank in range(2):
        SharedTensor.create(f"{name}-a-taps-{rank}", (2,), torch.float32)  # its creator is killed
    assert remove_leftovers(f"{name}-a-") == 2
    assert remove_leftovers(f"{name}-a-") == 0
    assert file_of(f"{name}-b-taps-0").exists()
    theirs.close()


def test_the_cuda_handle_fits_the_installed_torch() -> None:
    """CUDA IPC cannot run here; at least every argument that will be passed exists, and none is missing."""
    handle = {field.name: None for field in msgspec.structs.fields(CudaHandle)}
    inspect.signature(rebuild_cuda_tensor).bind(
        tensor_cls=None,
        tensor_size=None,
        tensor_stride=None,
        tensor_offset=None,
        storage_cls=None,
        dtype=None,
        requires_grad=None,
        **handle,
    )
    assert callable(torch.UntypedStorage._share_cuda_)


def test_a_descriptor_with_a_cuda_handle_survives_the_wire() -> None:
    handle = CudaHandle(
        storage_device=0,
        storage_handle=b"h",
        storage_size_bytes=8,
        storage_offset_bytes=0,
        ref_counter_handle=b"r",
        ref_counter_offset=0,
        event_handle=b"e",
        event_sync_required=True,
    )
    descriptor = Descriptor(name="x", shape=(2, 2), dtype="bfloat16", cuda=handle)
    packed = msgspec.msgpack.encode(descriptor)
    assert msgspec.msgpack.decode(packed, type=Descriptor) == descriptor

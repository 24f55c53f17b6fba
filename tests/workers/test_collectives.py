"""Sums and gathers over ranks, in threads and in processes of their own."""

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drive import join_group, on_threads

from paceline.cluster.errors import ConfigError, RankLost
from paceline.workers.collectives import Solo, choose_kind, connect


def make_store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True)  # pyright: ignore[reportPrivateImportUsage]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8), (7, 576), (0, 4)])
def test_all_ranks_hold_the_same_bits(size: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Values above the capacity of 4096 bytes pass in pieces."""
    ranks = join_group(size, capacity_bytes=4096)
    values = [torch.randn(shape, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)]
    expected = torch.stack(values).sum(0)
    for _ in range(3):
        sums = on_threads([lambda r=r: ranks[r].all_reduce(values[r].clone()) for r in range(size)])
        assert all(torch.equal(total, expected) for total in sums)
        gathered = on_threads([lambda r=r: ranks[r].all_gather(values[r]) for r in range(size)])
        assert all(torch.equal(each, torch.stack(values)) for each in gathered)
    on_threads([rank.barrier for rank in ranks])
    for rank in ranks:
        rank.close()
        rank.close()


def test_many_collectives_do_not_overtake_each_other() -> None:
    ranks = join_group(2)

    def work(rank: int) -> bool:
        for number in range(500):
            total = ranks[rank].all_reduce(torch.full((3,), float(number + rank)))
            if total.tolist() != [2.0 * number + 1] * 3:
                return False
        return True

    assert on_threads([lambda: work(0), lambda: work(1)]) == [True, True]


def test_rank_that_never_comes_is_lost() -> None:
    ranks = join_group(2, timeout_s=0.2)
    with pytest.raises(RankLost, match=r"rank 1 did not join collective 2 within 0\.2 s"):
        ranks[0].all_reduce(torch.ones(1))


def _one_rank(kind: Any, rank: int, port: int, queue: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # pyright: ignore[reportPrivateImportUsage]
    ranks = connect(kind, rank=rank, size=2, store=store)
    value = torch.full((5, 4), float(rank + 1))
    total, gathered = ranks.all_reduce(value.clone()), ranks.all_gather(value)
    ranks.barrier()
    queue.put((total.tolist(), gathered.tolist()))
    ranks.close()


@pytest.mark.parametrize("kind", ["shared-memory", "gloo"])
def test_processes_meet_through_a_store(kind: str) -> None:
    store, context = make_store(), multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_one_rank, args=(kind, r, store.port, queue)) for r in range(2)]
    for process in processes:
        process.start()
    answers = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    expected = [[[float(rank + 1)] * 4] * 5 for rank in range(2)]
    assert answers == [([[3.0] * 4] * 5, expected)] * 2


def _forever(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # pyright: ignore[reportPrivateImportUsage]
    ranks = connect("shared-memory", rank=rank, size=2, store=store)
    while True:
        ranks.all_reduce(torch.ones(4))
        time.sleep(0.001)


def test_killed_ranks_leave_no_shared_memory() -> None:
    before = set(Path("/dev/shm").iterdir())
    store, context = make_store(), multiprocessing.get_context("spawn")
    processes = [context.Process(target=_forever, args=(rank, store.port)) for rank in range(2)]
    for process in processes:
        process.start()
    while not store.check(["paceline/collectives"]):
        assert all(process.is_alive() for process in processes)
        time.sleep(0.05)
    for process in processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
    left = set(Path("/dev/shm").iterdir()) - before
    assert not [path for path in left if "paceline-collectives" in path.name]


def test_kind_follows_device_and_place() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_kind(1, cuda, is_one_node=True) == "solo"
    assert choose_kind(2, cuda, is_one_node=False) == "nccl"
    assert choose_kind(2, cpu, is_one_node=False) == "gloo"
    with pytest.raises(ConfigError, match="2 ranks cannot be solo"):
        connect("solo", rank=0, size=2)
    assert isinstance(connect("solo", rank=0, size=1), Solo)

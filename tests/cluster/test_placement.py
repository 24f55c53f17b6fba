"""An engine's bundles fit a laptop, and a cluster that is too small is named with the remedy."""

import asyncio
from typing import Any

import msgspec
import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.cluster import placement
from paceline.cluster.config import EngineConfig
from paceline.cluster.errors import ConfigError
from paceline.cluster.placement import bundles, rank_device, reserve, strategy_for


def test_two_cpu_ranks_fit_two_logical_cpus() -> None:
    assert sum(bundle["CPU"] for bundle in bundles(2, "cpu")) <= 2.0
    assert all("GPU" not in bundle for bundle in bundles(2, "cpu"))


def test_worker_and_drafter_share_one_gpu_per_rank() -> None:
    head, *ranks = bundles(4, "cuda")
    assert "GPU" not in head
    assert [bundle["GPU"] for bundle in ranks] == [1.0] * 4
    assert len({id(bundle) for bundle in ranks}) == 4


def test_the_size_of_a_node_can_be_told_before_there_is_one() -> None:
    whole = EngineConfig(tensor_parallel_size=8, gpus_per_node=8)

    assert strategy_for(whole, "cuda") == "STRICT_PACK"
    assert strategy_for(msgspec.structs.replace(whole, tensor_parallel_size=16), "cuda") == "PACK"


@pytest.mark.usefixtures("ray_local")
class TestOnRay:
    def test_auto_is_cpu_where_there_are_no_gpus(self) -> None:
        assert rank_device(EngineConfig()) == "cpu"
        assert rank_device(EngineConfig(device="cuda")) == "cuda"

    def test_a_reservation_names_its_bundles_and_gives_them_back(self) -> None:
        reservation = reserve(EngineConfig(tensor_parallel_size=2), 30.0)
        assert reservation.rank_bundles == [1, 2]
        assert reservation.is_one_node
        assert reservation.ranks_share_node
        assert reservation.is_own
        assert reservation.strategy(1).placement_group_bundle_index == 1
        reservation.release()
        assert placement_group_table(reservation.group)["state"] == "REMOVED"

    def test_a_cluster_without_enough_is_refused_at_once(self) -> None:
        with pytest.raises(ConfigError, match=r"has 8 CPU, tensor_parallel_size 64 needs 25\.8 CPU; lower"):
            reserve(EngineConfig(tensor_parallel_size=64, device="cpu"), 30.0)
        with pytest.raises(ConfigError, match=r"0 GPU.*needs .* 2 GPU"):
            reserve(EngineConfig(tensor_parallel_size=2, device="cuda"), 30.0)

    def test_a_busy_cluster_is_refused_after_the_timeout(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(placement, "WORKER_CPUS", 5.0)
        first = reserve(EngineConfig(), 30.0)
        with pytest.raises(ConfigError, match=r"has free .* needs 5\.3 CPU"):
            reserve(EngineConfig(), 0.5)
        first.release()

    def test_a_serve_replicas_placement_group_is_used(self) -> None:
        class Replica:
            """Like Serve's: an async actor that starts its engine in a thread."""

            async def reserve(self) -> tuple[bool, list[int], str]:
                engine = EngineConfig(tensor_parallel_size=2)
                reservation = await asyncio.to_thread(reserve, engine, 10.0)
                reservation.release()
                return reservation.is_own, reservation.rank_bundles, reservation.group.id.hex()

        group = placement_group(bundles(2, "cpu"), strategy="STRICT_PACK")
        strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
        replica: Any = ray.remote(Replica).options(num_cpus=0.1, scheduling_strategy=strategy).remote()
        assert ray.get(replica.reserve.remote(), timeout=60) == (False, [1, 2], group.id.hex())
        assert placement_group_table(group)["state"] == "CREATED", "release left it alone"
        ray.kill(replica)
        remove_placement_group(group)

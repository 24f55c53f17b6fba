"""The placement group of one engine: bundle 0 for the replica and the scheduler, then one bundle per rank.

A rank's bundle holds the worker and the share of its drafter, twice over because a swap loads the next beside
the one that serves; all get the same GPU. Every actor names its bundle: Ray's default, "any bundle", could
put a drafter beside another rank. CPUs are counted in small fractions because Ray's logical CPUs are
bookkeeping and a laptop with two must carry two ranks; threads are set apart.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .config import EngineConfig
from .errors import ConfigError
from .topology import Strategy, order_ranks, placement_strategy

Bundle = dict[str, float]
RankDevice = Literal["cpu", "cuda"]

REPLICA_CPUS = 0.1
SCHEDULER_CPUS = 0.1
WORKER_CPUS = 0.3
DRAFTER_CPUS = 0.05
WORKER_GPUS = 0.7  # bookkeeping only: Ray does not divide a GPU's memory
DRAFTER_GPUS = 0.15
DRAFTERS_PER_RANK = 2  # one, and during a swap its successor


@dataclass(frozen=True)
class Reservation:
    """Where an engine may put its actors. Release it after the actors are gone."""

    group: PlacementGroup
    is_own: bool  # False: it belongs to the Serve replica and dies with it
    device: RankDevice
    rank_bundles: list[int]  # of rank 0, 1, ...
    rank_nodes: list[str]  # Ray node ids of rank 0, 1, ...
    head_node: str  # of bundle 0
    server_node: str  # of the process that made the reservation

    @property
    def ranks_share_node(self) -> bool:
        return len(set(self.rank_nodes)) == 1

    @property
    def is_one_node(self) -> bool:
        """Server, scheduler and ranks are all on one node."""
        return {self.head_node, *self.rank_nodes} == {self.server_node}

    def strategy(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, bundle)

    def release(self) -> None:
        if self.is_own:
            remove_placement_group(self.group)


def rank_device(engine: EngineConfig) -> RankDevice:
    """ "auto" is GPUs if the connected cluster has enough of them for all ranks."""
    if engine.device != "auto":
        return engine.device
    return "cuda" if ray.cluster_resources().get("GPU", 0) >= engine.tensor_parallel_size else "cpu"


def bundles(num_ranks: int, device: RankDevice) -> list[Bundle]:
    """The bundles of one engine, for `reserve` and for Serve's `placement_group_bundles`."""
    rank: Bundle = {"CPU": WORKER_CPUS + DRAFTERS_PER_RANK * DRAFTER_CPUS}
    if device == "cuda":
        rank["GPU"] = WORKER_GPUS + DRAFTERS_PER_RANK * DRAFTER_GPUS
    return [{"CPU": REPLICA_CPUS + SCHEDULER_CPUS}, *(dict(rank) for _ in range(num_ranks))]


def strategy_for(engine: EngineConfig, device: RankDevice) -> Strategy:
    """CPU ranks share memory, so they never span nodes; GPU ranks do when no node has enough GPUs."""
    if device == "cpu":
        return "STRICT_PACK"
    if engine.gpus_per_node is not None:
        return placement_strategy(engine.tensor_parallel_size, engine.gpus_per_node)
    per_node = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    return placement_strategy(engine.tensor_parallel_size, max(per_node, default=0))


def reserve(engine: EngineConfig, timeout_s: float) -> Reservation:
    """The replica's own placement group when there is one of this shape, else a new one.

    Blocks until the bundles are there. Raises ConfigError when the cluster cannot hold them.
    """
    device = rank_device(engine)
    wanted = bundles(engine.tensor_parallel_size, device)
    current = get_current_placement_group()
    if current is not None and current.bundle_count == len(wanted):
        return _reservation(current, False, device)
    needed = sum((Counter(bundle) for bundle in wanted), Counter[str]())
    _require(engine, needed, ray.cluster_resources(), "has")
    group = placement_group(wanted, strategy=strategy_for(engine, device))
    if not group.wait(timeout_s):
        remove_placement_group(group)
        _require(engine, needed, ray.available_resources(), "has free")
        raise ConfigError(
            f"no node of the cluster has {_resources(needed)} free together; "
            "lower tensor_parallel_size or stop what runs there"
        )
    return _reservation(group, True, device)


def _reservation(group: PlacementGroup, is_own: bool, device: RankDevice) -> Reservation:
    nodes: dict[int, str] = dict(placement_group_table(group)["bundles_to_node_id"])
    head_node = nodes.pop(0)
    rank_bundles = order_ranks(nodes, head_node)
    rank_nodes = [nodes[index] for index in rank_bundles]
    server_node = ray.get_runtime_context().get_node_id()
    return Reservation(group, is_own, device, rank_bundles, rank_nodes, head_node, server_node)


def _require(engine: EngineConfig, needed: "Counter[str]", there: Mapping[str, float], verb: str) -> None:
    if any(there.get(name, 0.0) + 1e-6 < amount for name, amount in needed.items()):
        found = _resources({name: there.get(name, 0.0) for name in needed})
        raise ConfigError(
            f"the cluster {verb} {found}, tensor_parallel_size {engine.tensor_parallel_size} needs "
            f"{_resources(needed)}; lower tensor_parallel_size or add nodes"
        )


def _resources(amounts: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:.3g} {name}" for name, amount in sorted(amounts.items()))

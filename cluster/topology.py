"""Where ranks go and what each may use: pure functions of the shape of a cluster."""

from collections.abc import Mapping
from typing import Literal

Strategy = Literal["STRICT_PACK", "PACK"]


def order_ranks(bundle_nodes: Mapping[int, str], first_node: str) -> list[int]:
    """The bundle of each rank, rank 0 first: bundles of `first_node`, then node by node.

    `bundle_nodes` maps a rank bundle's index to its node. Neighbours share a node, so that collectives cross
    the network as seldom as they can.
    """
    nodes_in_order = dict.fromkeys([first_node, *(bundle_nodes[index] for index in sorted(bundle_nodes))])
    place = {node: number for number, node in enumerate(nodes_in_order)}
    return sorted(bundle_nodes, key=lambda index: (place[bundle_nodes[index]], index))


def threads_per_rank(num_cores: int, num_ranks_on_node: int, configured: int | None) -> int:
    """Compute threads of one rank on CPU: what was configured, or the cores shared out, at least one."""
    return configured or max(1, num_cores // num_ranks_on_node)


def placement_strategy(num_ranks: int, max_ranks_per_node: int) -> Strategy:
    """One node when the whole group fits on one; else as few as Ray can find."""
    return "STRICT_PACK" if num_ranks <= max_ranks_per_node else "PACK"

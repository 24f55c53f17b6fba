"""A shard's life after loading."""

from ..cluster.channel import Link
from ..cluster.messages import ShardPlan
from ..cluster.serve_plans import serve_plans
from .runner import ShardRunner


def run_shard(link: Link, runner: ShardRunner) -> None:
    """Serve the scheduler's plans until Shutdown; blocks.

    What goes wrong is told to the scheduler, then raised: the target goes on without the shard.
    """
    serve_plans(link, f"shard{runner.shard}", runner.ready, ShardPlan, runner.execute)

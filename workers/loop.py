"""A rank's life after loading."""

from ..cluster.channel import Link
from ..cluster.messages import Ready, StepPlan
from ..cluster.serve_plans import serve_plans
from .runner import Runner


def run_rank(link: Link, runner: Runner) -> None:
    """Serve the scheduler's plans until Shutdown; blocks.

    What goes wrong is told to the scheduler, then raised: a rank that failed a step is no use to its group.
    """
    runner.grammars.load_soon()
    ready = Ready(rank=runner.rank, num_pages=runner.num_pages, step_costs=runner.step_costs)
    serve_plans(link, f"rank{runner.rank}", ready, StepPlan, runner.execute)

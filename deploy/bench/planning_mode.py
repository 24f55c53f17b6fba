"""What a scheduler has to decide besides who runs; apart, because the command line names it first."""

from enum import StrEnum


class PlanningMode(StrEnum):
    """Without drafts; with drafts that are all verified; with the draft budget choosing among them."""

    PLAIN = "plain"
    DRAFTS = "drafts"
    BUDGET = "budget"

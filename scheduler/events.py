"""What the scheduler is told and what it answers, where that is not a message by itself."""

from dataclasses import dataclass

from ..cluster.messages import (
    Cancel,
    Drafts,
    Outputs,
    Refused,
    ShardLost,
    ShardPlan,
    ShardReady,
    ShardSilent,
    Shutdown,
    StepPlan,
    StepResult,
    Submit,
)


@dataclass(frozen=True, slots=True)
class ShardUp:
    """A life of a shard is ready for its first plan."""

    peer: str
    ready: ShardReady


@dataclass(frozen=True, slots=True)
class DraftsArrived:
    """A shard has answered a plan."""

    peer: str
    drafts: Drafts


@dataclass(frozen=True, slots=True)
class DraftsOverdue:
    """The draft phase of this number has lasted `draft_deadline_s`."""

    phase: int


@dataclass(frozen=True, slots=True)
class ToShard:
    """Send this to a shard's peer."""

    peer: str
    message: ShardPlan | Shutdown


Event = Submit | Cancel | StepResult | ShardUp | ShardLost | DraftsArrived | DraftsOverdue
Command = StepPlan | ToShard | ShardSilent | Outputs | Refused

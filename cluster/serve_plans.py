"""The life of whatever executes the scheduler's plans: say ready, execute in order, end at Shutdown."""

from collections.abc import Callable
from typing import TypeVar

from .channel import Link
from .errors import ProtocolError
from .messages import Failed, Message, ShardPlan, Shutdown, StepPlan

Plan = TypeVar("Plan", StepPlan, ShardPlan)


def serve_plans(
    link: Link, name: str, ready: Message, kind: type[Plan], execute: Callable[[Plan], Message]
) -> None:
    """Answer each plan of `kind` with what `execute` makes of it, until the scheduler says Shutdown; blocks.

    What goes wrong is told to the scheduler in one line, as from `name`, and then raised.
    """
    link.send(ready)
    try:
        while True:
            message = link.recv(None)
            if isinstance(message, kind):
                link.send(execute(message))
            elif isinstance(message, Shutdown):
                return
            elif message is not None:
                raise ProtocolError(f"{name} does not take {type(message).__name__}")
    except Exception as error:
        link.send(Failed(source=name, reason=f"{type(error).__name__}: {error}"))
        raise

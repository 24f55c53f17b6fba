"""What an engine asks of whatever starts its processes: Ray's gang, or threads of this process."""

from collections.abc import Callable
from typing import Protocol

from ..cluster.channel import Link
from ..cluster.drafter_choice import DrafterChoice
from ..cluster.errors import EngineError


class Life(Protocol):
    """One epoch: a scheduler and ranks that are ready, and the server's link to them."""

    @property
    def link(self) -> Link: ...

    def watch(self, on_loss: Callable[[EngineError], None]) -> None:
        """From now on call `on_loss`, once and from any thread, when a process ends by itself."""
        ...

    def replace_shard(self, peer: str) -> None:
        """End this life of a shard, which does not answer, and start the next; does not block."""
        ...

    def close(self) -> None:
        """End every process or thread of this epoch and return when they are gone; harmless twice."""
        ...


class Launcher(Protocol):
    """Starts epochs, one at a time."""

    def launch(self, epoch: int) -> Life:
        """Start and wait until the scheduler reports; blocks. Cleans up before it raises."""
        ...

    def swap_drafter(self, choice: DrafterChoice | None) -> set[str]:
        """Load another drafter beside the one that serves and let it take over; blocks.

        Returns the peers of the new lives, which the scheduler takes up between two steps. Raises UserError
        for a drafter that does not load or fit; the old one then serves on. Later epochs begin with the new.
        """
        ...

    def abort(self) -> None:
        """Make a launch in another thread raise EngineStopped soon, and every later one at once."""
        ...

    def close(self) -> None:
        """Give back what outlives epochs; after `abort`, and after the last life was closed."""
        ...

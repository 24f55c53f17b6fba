"""A life of a shard as a Ray actor: it loads beside its rank, then executes plans until Shutdown."""

import contextlib
import faulthandler
import signal
from pathlib import Path

import torch

from ..cluster.address import Address
from ..cluster.channel import connect
from ..cluster.config import Config
from ..cluster.drafter_choice import DrafterChoice
from ..cluster.placement import RankDevice
from ..cluster.processes import STDERR_FD, ProcessId
from ..cluster.shared_tensor import Descriptor, SharedTensor
from .load import load_proposer
from .loop import run_shard
from .proposer import Proposer
from .runner import ShardRunner


class DrafterActor:
    """Called by the gang in this order: identify, load, run."""

    def __init__(
        self,
        config: Config,
        model_path: Path,
        max_model_len: int,
        choice: DrafterChoice,
        shard: int,
        device: RankDevice,
    ) -> None:
        faulthandler.register(signal.SIGUSR1, file=STDERR_FD, all_threads=True)
        self._config = config
        self._model_path = model_path
        self._max_model_len = max_model_len
        self._choice = choice
        self._shard = shard
        self._device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self._proposer: Proposer | None = None

    def identify(self) -> ProcessId:
        return ProcessId.own()

    def load(self) -> None:
        """Raises ModelError for what cannot be loaded."""
        self._proposer = load_proposer(
            self._choice, self._config, self._model_path, self._max_model_len, self._device
        )

    def run(self, address: Address, peer: str, taps: Descriptor | None) -> None:
        """Say ShardReady as `peer` and serve until Shutdown; `taps` is the scratch of the rank beside it.

        Raises EngineError when this life cannot go on.
        """
        assert self._proposer is not None, "load first"
        with contextlib.ExitStack() as stack:
            link = connect(address, peer)
            stack.callback(link.close)
            scratch = None
            if self._proposer.tap_layer_ids:
                assert taps is not None, "the proposer reads tap rows, of which there are none"
                scratch = SharedTensor.attach(taps)
                stack.callback(scratch.close)
            runner = ShardRunner(
                self._shard,
                self._proposer,
                None if scratch is None else scratch.tensor,
                check=self._config.engine.check_invariants,
            )
            run_shard(link, runner)

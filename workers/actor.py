"""A rank as a Ray actor: it meets the other ranks, loads its shard, and serves plans until Shutdown."""

import contextlib
import faulthandler
import signal
import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ..cluster.address import Address
from ..cluster.channel import connect
from ..cluster.config import Config
from ..cluster.placement import RankDevice
from ..cluster.processes import STDERR_FD, ProcessId
from ..cluster.shared_tensor import Descriptor, SharedTensor
from ..kernels.dtypes import compute_dtype
from . import collectives
from .loop import run_rank
from .runner import Runner, tap_buffer_shape
from .spec import ModelSpec

StoreAddress = tuple[str, int]  # host, port


class WorkerActor:
    """Called by the gang in this order: identify; open_taps if a drafter reads some; open_store on rank 0 of
    several; run.
    """

    def __init__(
        self,
        config: Config,
        model_path: Path,
        rank: int,
        device: RankDevice,
        ranks_share_node: bool,
        name_prefix: str,
    ) -> None:
        """`name_prefix` begins the name of every shared tensor, so that the gang finds what a crash left."""
        faulthandler.register(signal.SIGUSR1, file=STDERR_FD, all_threads=True)
        self._config = config
        self._model_path = model_path
        self._rank = rank
        self._size = config.engine.tensor_parallel_size
        self._device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self._ranks_share_node = ranks_share_node
        self._name_prefix = name_prefix
        self._tap_layer_ids: tuple[int, ...] = ()
        self._taps: SharedTensor | None = None
        self._store: dist.Store | None = None  # pyright: ignore[reportPrivateImportUsage]

    def identify(self) -> ProcessId:
        return ProcessId.own()

    def open_taps(self, tap_layer_ids: tuple[int, ...]) -> Descriptor:
        """Make the scratch that each step fills with the residual stream after these blocks.

        Before the model is loaded, so that the drafter beside this rank can load at the same time.
        """
        assert self._taps is None, "a rank has one tap scratch"
        shape = tap_buffer_shape(tap_layer_ids, ModelSpec.load(self._model_path), self._config)
        name = f"{self._name_prefix}taps-{self._rank}"
        dtype = compute_dtype(self._config.model.dtype, self._device, self._config.engine.backend)
        self._taps = SharedTensor.create(name, shape, dtype, self._device)
        self._tap_layer_ids = tap_layer_ids
        return self._taps.descriptor

    def open_store(self, host: str) -> StoreAddress:
        """Rank 0: open the rendezvous at `host`, and nowhere else, on a free port."""
        with socket.create_server((host, 0)) as listener:
            port = listener.getsockname()[1]
            self._store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                host,
                port,
                world_size=self._size,
                is_master=True,
                wait_for_workers=False,
                timeout=self._start_timeout,
                master_listen_fd=listener.detach(),
            )
        return host, port

    def run(self, address: Address, store_address: StoreAddress | None) -> None:
        """Load and serve until Shutdown.

        Raises ModelError or ConfigError for what cannot be loaded, EngineError when the epoch cannot go on.
        """
        with contextlib.ExitStack() as stack:
            link = connect(address, f"rank{self._rank}")
            stack.callback(link.close)
            joined = self._join(store_address)
            stack.callback(joined.close)
            if self._taps is not None:
                stack.callback(self._taps.close)
            runner = Runner(
                self._model_path,
                self._config,
                joined,
                device=self._device,
                tap_layer_ids=self._tap_layer_ids,
                tap_buffer=None if self._taps is None else self._taps.tensor,
            )
            run_rank(link, runner)

    def _join(self, store_address: StoreAddress | None) -> collectives.Collectives:
        kind = collectives.choose_kind(self._size, self._device, is_one_node=self._ranks_share_node)
        if store_address is None:
            return collectives.connect(kind, rank=self._rank, size=self._size)
        if self._store is None:
            host, port = store_address
            self._store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                host, port, world_size=self._size, timeout=self._start_timeout
            )
        spec = ModelSpec.load(self._model_path)
        engine = self._config.engine
        return collectives.connect(
            kind,
            rank=self._rank,
            size=self._size,
            store=self._store,
            capacity_bytes=engine.max_num_batched_tokens * spec.hidden_size * 4,
            timeout_s=engine.start_timeout_s,  # ranks load at different speeds; steps have their own deadline
        )

    @property
    def _start_timeout(self) -> timedelta:
        return timedelta(seconds=self._config.engine.start_timeout_s)

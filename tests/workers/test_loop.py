"""A rank at its channel: Ready, results, Shutdown, and what it says when it fails."""

import threading
from pathlib import Path

import pytest
from drive import make_config
from tiny import make_checkpoint

from paceline.cluster.channel import LocalHub
from paceline.cluster.errors import ProtocolError
from paceline.cluster.messages import (
    Admit,
    Cancel,
    Chunk,
    Failed,
    Message,
    Ready,
    SamplingParams,
    Shutdown,
    StepPlan,
    StepResult,
)
from paceline.workers.loop import run_rank
from paceline.workers.runner import Runner


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "llama", "llama")


def test_rank_serves_plans_until_shutdown(path: Path) -> None:
    hub = LocalHub()
    runner = Runner(path, make_config())
    thread = threading.Thread(target=run_rank, args=(hub.link("rank0"), runner), daemon=True)
    thread.start()
    ready = Ready(rank=0, num_pages=runner.num_pages, step_costs=runner.step_costs)
    assert hub.recv(10) == ("rank0", ready)
    assert {num_rows for num_rows, _ in ready.step_costs} == {1, 8, 32}
    admit = Admit(1, [4, 5, 6], 3, SamplingParams(max_tokens=2, temperature=0))
    hub.send("rank0", StepPlan(step=1, admit=[admit], chunks=[Chunk(1, 0, 3, [], [0], 1)]))
    received = hub.recv(10)
    assert received is not None
    _, result = received
    assert isinstance(result, StepResult)
    assert result.step == 1
    assert result.compute_s > 0
    assert [decision.sequence_id for decision in result.decisions] == [1]
    hub.send("rank0", Shutdown())
    thread.join(10)
    assert not thread.is_alive()
    hub.close()


@pytest.mark.parametrize("message", [StepPlan(step=5), Cancel(request_id="r")])
def test_failure_is_told_before_it_is_raised(path: Path, message: Message) -> None:
    hub = LocalHub()
    link = hub.link("rank0")
    hub.send("rank0", message)
    with pytest.raises(ProtocolError):
        run_rank(link, Runner(path, make_config()))
    hub.recv(10)
    received = hub.recv(10)
    assert received is not None
    _, failed = received
    assert isinstance(failed, Failed)
    assert failed.source == "rank0"
    assert failed.reason.startswith("ProtocolError: ")
    hub.close()

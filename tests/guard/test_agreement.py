"""The protocol by which ranks agree that a plugin failed, with ranks as threads: quick, and a hang is a failure."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forking import free_port
from trl_grpo_ext.errors import ConfigurationError, PluginOutputError, PluginRunError, TRLGRPOExtError
from trl_grpo_ext.guard.agreement import Agreement

Body = Callable[[Agreement, int], Any]


class Ranks:
    """A gather between threads that insists, as real collectives do, on equal shapes; and does not wait for ever."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.barrier = threading.Barrier(processes, timeout=5)
        self.slots: list[Any] = [None] * processes

    def meet(self, rank: int, one: Any) -> list[Any]:
        """What every rank brought."""
        self.slots[rank] = one
        self.barrier.wait()
        slots = list(self.slots)
        self.barrier.wait()
        assert len({isinstance(slot, torch.Tensor) for slot in slots}) == 1, "another collective"
        return slots

    def gather(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        slots = self.meet(rank, tensor)
        assert len({(slot.shape, slot.dtype) for slot in slots}) == 1, "a collective of unequal tensors"
        return torch.cat(slots)

    def run(self, body: Body) -> list[Any]:
        """What `body` returned or raised on each rank."""

        def one(rank: int) -> Any:
            agreement = Agreement(rank, self.processes, partial(self.gather, rank), partial(self.meet, rank))
            try:
                return body(agreement, rank)
            except (TRLGRPOExtError, KeyboardInterrupt, AssertionError, threading.BrokenBarrierError) as error:
                return error

        with ThreadPoolExecutor(self.processes) as threads:
            return [*threads.map(one, range(self.processes), timeout=20)]


def in_section(body: Body) -> Body:
    def wrapped(agreement: Agreement, rank: int) -> Any:
        with agreement.section():
            return body(agreement, rank)

    return wrapped


def raised(results: list[Any]) -> set[tuple[type, str]]:
    return {(type(result), str(result)) for result in results}


def test_gather_is_in_rank_order_and_padded() -> None:
    results = Ranks(3).run(in_section(lambda a, rank: a.gather(torch.full((2, rank + 1), float(rank + 1)))))
    expected = [[1, 0, 0], [1, 0, 0], [2, 2, 0], [2, 2, 0], [3, 3, 3], [3, 3, 3]]
    assert [result.tolist() for result in results] == [expected] * 3


def test_ranks_that_fail_before_the_others_gather_stop_all() -> None:
    def body(agreement: Agreement, rank: int) -> None:
        if rank > 0:
            raise ConfigurationError(f"too long: {rank}")
        agreement.gather(torch.ones(2))

    message = "On rank 1: too long: 1 (rank 2 failed too.)"
    assert raised(Ranks(3).run(in_section(body))) == {(ConfigurationError, message)}


def test_section_chains_foreign_exceptions_and_works_again() -> None:
    def body(agreement: Agreement, rank: int) -> Any:
        with pytest.raises(PluginRunError, match="On rank 0: ValueError: invalid") as caught, agreement.section():
            int("0" if rank else "no number")
        with pytest.raises(PluginOutputError, match=r"by rank: \(2,\).*\(3,\)"), agreement.section():
            agreement.gather(torch.ones(2 + rank))
        with agreement.section():
            return type(caught.value.__cause__), agreement.gather(torch.tensor([rank])).tolist()

    assert Ranks(2).run(body) == [(ValueError, [0, 1]), (type(None), [0, 1])]


def test_ctrl_c_and_an_exit_on_one_rank_end_all() -> None:
    def interrupted(agreement: Agreement, rank: int) -> None:
        if rank == 1:
            raise KeyboardInterrupt
        agreement.gather(torch.ones(2))

    assert raised(Ranks(2).run(in_section(interrupted))) == {(KeyboardInterrupt, "On rank 1: interrupted")}

    alone = Agreement(0, 1, lambda tensor: tensor)
    with pytest.raises(PluginRunError, match=r"SystemExit: os._exit\(0\)"), alone.section():
        os._exit(0)
    with pytest.raises(KeyboardInterrupt), alone.section():
        raise KeyboardInterrupt


def test_a_rank_whose_peer_is_gone_raises_its_own_error() -> None:
    def gather(given: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    agreement = Agreement(1, 2, gather, gather)
    failure = PluginOutputError("too long")
    agreement.stand_in(failure, gather, torch.ones(2))
    with pytest.raises(PluginOutputError, match="rank 1: too long") as caught, agreement.section():
        raise failure
    assert "Connection closed by peer" in caught.value.__notes__[0]


RANK = """
import os, signal, torch
import torch.distributed as dist
from trl_grpo_ext.errors import PluginRunError, TRLGRPOExtError
from trl_grpo_ext.guard.agreement import Agreement

dist.init_process_group("gloo")

def gather(tensor):
    gathered = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(gathered, tensor)
    return torch.cat(gathered)

agreement = Agreement(dist.get_rank(), 2, gather)
with agreement.section():
    pass
try:
    with agreement.section():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if "{place}" == "in a plugin":
            try:
                agreement.gather(torch.ones(2))
            except BaseException as error:
                raise PluginRunError(f"a hook raised {error}") from error
except TRLGRPOExtError as error:
    print(type(error).__name__, error, type(error.__cause__).__name__, sep="|")
    os._exit(0)
"""


@pytest.mark.parametrize("place", ["in a plugin", pytest.param("when the section ends", marks=pytest.mark.slow)])
def test_a_rank_that_was_killed_is_named_and_no_plugin_is_blamed(place: str) -> None:
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", RANK.replace("{place}", place)]
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, env={**common, "OMP_NUM_THREADS": "1", "RANK": rank}, **how) for rank in "01"]
    (out, err), _ = [rank.communicate(timeout=60) for rank in ranks]
    assert ranks[1].returncode == -signal.SIGKILL
    kind, message, cause = out.strip().split("|")
    assert (kind, cause) == ("EngineError", "RuntimeError"), out + err
    assert message.startswith(f"Rank 1 (process {ranks[1].pid}) has ended")
    assert "hook" not in message


def test_there_is_no_stand_in_for_a_gather_that_was_interrupted() -> None:
    calls = []

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:
        gather(torch.ones(1))
    Agreement(0, 2, gather).stand_in(raised.value, gather, torch.ones(1))
    assert len(calls) == 1


Event = st.sampled_from(["gather", "wide", "raise", "swallow"])


@settings(max_examples=60)
@given(scripts=st.lists(st.lists(Event, max_size=3), min_size=2, max_size=3))
def test_whatever_the_ranks_do_they_end_together(scripts: list[list[str]]) -> None:
    """Each rank does its own sequence of things; no rank may be left waiting, and all agree on the outcome."""

    def body(agreement: Agreement, rank: int) -> str:
        for event in scripts[rank]:
            if event == "raise":
                raise RuntimeError("own mistake")
            try:
                agreement.gather(torch.ones(2, 1 + rank) if event == "wide" else torch.ones(2))
            except TRLGRPOExtError:
                if event != "swallow":
                    raise
        return "done"

    outcomes = Ranks(len(scripts)).run(in_section(body))
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert {type(outcome) for outcome in outcomes} <= {str, PluginOutputError, PluginRunError}
    same = [["gather" if event == "swallow" else event for event in script] for script in scripts]
    if all(script == same[0] for script in same) and "raise" not in same[0]:
        assert outcomes == ["done"] * len(scripts)
    else:
        assert "done" not in outcomes

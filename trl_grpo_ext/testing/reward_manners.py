"""The rules of rewards that are about what a call does besides returning: to its inputs, to threads, to the process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from ..guard.calls import call
from .comparing import pickled
from .process_state import differences, global_state, helpers, settled
from .reward_batches import Batch
from .reward_rules import RewardCase, Scores
from .running import Broken, raised

_CALLS = 3
_ROUNDS = 10
_QUICK = 0.05
"""Seconds; what takes longer is not called by two threads over and over."""


class MannersChecks:
    """The checks of what a reward does besides returning scores."""

    def __init__(self, case: RewardCase) -> None:
        self.case = case

    def inputs(self) -> None:
        """The lists are as they were."""

        def judge(batch: Batch) -> None:
            arguments, untouched = batch.arguments(), batch.arguments()
            call(self.case.reward, arguments)
            for name, value in untouched.items():
                if name != "trainer_state" and arguments[name] != value:
                    raise Broken(f"it changed {name!r}", str(batch))

        self.case.over([Batch(self.case.batch.items, form) for form in self.case.formats], judge)

    def pickle(self) -> None:
        """There and back."""
        case = self.case
        again = pickled(case.reward)

        def judge(batch: Batch) -> None:
            theirs = case.scores(batch, again)
            if case.deterministic:
                case.agree(case.scores(batch), theirs, "before and after pickling", batch)

        case.over([case.batch], judge)

    def threads(self) -> None:
        """Off the main thread, and two at once."""
        case = self.case
        batch = case.batch
        turned = batch.with_items(batch.items[::-1])
        expected = (case.scores(batch), case.scores(turned))
        with ThreadPoolExecutor(1) as pool:
            try:
                alone = pool.submit(case.scores, batch).result()
            except Exception as error:  # the reward's own, whatever it is
                raise Broken(f"called off the main thread it {raised(error)}", str(batch)) from error
        if case.deterministic:
            case.agree(expected[0], alone, "on the main thread and off it", batch)

        rounds = _ROUNDS if min(case.seconds, default=0.0) * len(batch.items) < _QUICK else 1

        def repeatedly(which: Batch) -> list[Scores]:
            return [case.scores(which) for _ in range(rounds)]

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)  # threads take turns often, so that what they share is met half done
        try:
            with ThreadPoolExecutor(2) as pool:
                futures = [pool.submit(repeatedly, which) for which in (batch, turned)]
                both = [future.result() for future in futures]
        except Exception as error:  # the reward's own, whatever it is
            raise Broken(f"called by two threads at once it {raised(error)}", str(batch)) from error
        finally:
            sys.setswitchinterval(interval)
        if case.deterministic:
            for which, wanted, found in zip((batch, turned), expected, both, strict=True):
                for scores in found:
                    case.agree(wanted, scores, "called by one thread and by two at once", which)

    def leftovers(self) -> None:
        """Nothing piles up."""
        case = self.case
        case.raw(case.batch)  # what is made once and kept is there from now on
        before = settled(helpers(), 0.0)
        counts = [before]
        for _ in range(_CALLS):
            case.raw(case.batch)
            counts.append(settled(counts[-1]))
        for place, what in ((0, "threads"), (1, "child processes")):
            numbers = [count[place] for count in counts]
            if all(later > earlier for earlier, later in pairwise(numbers)):
                raise Broken(f"each call leaves {what} behind: {_listed(numbers)} after one call each", str(case.batch))

    def global_state(self) -> None:
        """The process is as it was."""
        case = self.case
        changed = differences(case.state_before, case.state_after) if case.state_before else []
        if not changed:

            def judge(batch: Batch) -> None:
                before = global_state()
                case.raw(batch)
                names = differences(before, global_state())
                if names:
                    raise Broken(f"a call changed {', '.join(names)}", str(batch))

            case.over([case.batch], judge)
            return
        raise Broken(f"the first call changed {', '.join(changed)}", str(case.batch))

    def time(self) -> None:
        """Fast enough."""
        case = self.case
        if not case.seconds:
            case.timed(case.batch)
            case.timed(case.batch)
        best = min(case.seconds)
        if best > case.limit:
            raise Broken(f"{best:.3g} s per completion, more than {case.limit:g} s", str(case.batch))


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))

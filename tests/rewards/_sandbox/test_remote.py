"""Objects of the solution in the tests: what only the solution could say of them decides nothing."""

from tests.rewards._sandbox.running import needs_layers
from trl_grpo_ext.guard.outcomes import Outcome
from trl_grpo_ext.rewards.python_tests import PythonTests


@needs_layers
def test_what_only_the_solution_could_say_is_said_to_be_so() -> None:
    point = "class P:\n  def __init__(self, x): self.x = x\n  def __eq__(self, o): return self.x == o.x\n"
    point += "  def __bool__(self): return True\n  def __contains__(self, x): return True\n"
    point += "  def __sub__(self, o): return 0\n"
    says = {
        "assert P(1) == P(1)": "__eq__",
        "assert P(1)": "__bool__",
        "assert 3 in P(1)": "__contains__",
        "assert abs(P(1) - 3) < 1e-6": "__sub__",
        "try:\n  assert P(1) == P(1)\nexcept BaseException:\n  pass\nassert P(1).x == 1": "__eq__",
        "import pytest\ndef test_p():\n  pytest.skip('no')\n  assert P(1).x == 1": "skip",
        "r = P(1).x\nif r > 3:\n  assert r == 4\nassert r == 1": "condition",
        "for x in [P(1).x][1:]:\n  assert x == 1\nassert P(2).x == 2": "ran not once",
    }
    found = PythonTests().judge(completions=[f"```python\n{point}```"] * len(says), tests=[[test] for test in says])
    for (test, reason), one in zip(says.items(), found, strict=True):
        assert (one.outcome, reason in one.detail) == (Outcome.UNPARSEABLE, True), (test, one)

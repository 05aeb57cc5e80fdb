"""`pytest --trl-grpo-ext`: one test for each plugin of a distribution and each rule of its kind.

pytest imports this at every start, so it imports nothing but pytest until the option is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ..plugins.discovery import PluginInfo
    from .reports import Report

OPTION = "--trl-grpo-ext"
_ROOT = "trl-grpo-ext"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option; without a value it is the distribution whose pyproject.toml is in the root directory."""
    parser.getgroup("trl-grpo-ext").addoption(
        OPTION,
        nargs="?",
        const="",
        default=None,
        metavar="NAME[,NAME]",
        help="check the plugins of the distribution at the root directory against the conformance rules of "
        "trl-grpo-ext; or those of the plugins or distributions named (--trl-grpo-ext=NAME)",
    )


def pytest_load_initial_conftests(args: list[str]) -> None:
    """Without `=` the option has no value: in `pytest --trl-grpo-ext tests`, `tests` is a folder, not a plugin."""
    args[:] = [f"{OPTION}=" if word == OPTION else word for word in args]


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the conformance tests after the others."""
    asked = config.getoption(OPTION.strip("-").replace("-", "_"))
    if asked is not None:
        items.extend(ConformanceCollector.from_parent(session, name=_ROOT, nodeid=_ROOT, asked=asked).collect())


class ConformanceCollector(pytest.Collector):
    """Finds the plugins, and makes the tests."""

    def __init__(self, *, asked: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.asked = asked
        self.made: dict[PluginInfo, Report | Exception] = {}

    def collect(self) -> Iterator[pytest.Item]:
        """Yield one item for each plugin and rule, or one that fails where they cannot be found."""
        from ..errors import TRLGRPOExtError
        from .kit import project
        from .rules import rules_of

        try:
            name, options = project(self.config.rootpath)
            infos = self._plugins(name)
        except TRLGRPOExtError as error:
            yield RuleItem.from_parent(self, name="plugins", rule="", report=partial(_given, error))
            return
        for info in infos:
            report = partial(self._report, info, options.get(info.name, {}))
            for rule in rules_of(info.kind):
                yield RuleItem.from_parent(self, name=f"{info.name}::{rule.name}", rule=rule.name, report=report)

    def _plugins(self, project: str | None) -> list[PluginInfo]:
        from ..errors import ConfigurationError, UnknownPluginError
        from ..plugins.description import find_named
        from ..plugins.discovery import scan
        from ..plugins.kinds import GROUPS

        words = [word.strip() for word in self.asked.split(",") if word.strip()] or [project or ""]
        if words == [""]:
            raise ConfigurationError(
                f"{OPTION} checks the distribution whose pyproject.toml is in {self.config.rootpath}, and there is "
                f"none that has a project name. Name plugins or distributions instead: {OPTION}=NAME."
            )
        installed, found = scan(), []
        for word in words:
            try:
                of_word = installed.of(word) or find_named(word, None, installed)
            except UnknownPluginError as error:
                raise ConfigurationError(
                    f"No installed plugin or distribution is called {word!r}. Is it installed here (pip install -e .), "
                    f"and has its pyproject.toml an entry point in one of the groups {', '.join(GROUPS.values())}?"
                ) from error
            found += [one for one in of_word if one not in found]
        return found

    def _report(self, info: PluginInfo, options: dict[str, Any]) -> Report:
        """A plugin is checked once, when its first test runs; each gets the report or the error."""
        from .kit import check

        if info not in self.made:
            try:
                self.made[info] = check(info.kind, info.selection, **options)
            except Exception as error:
                self.made[info] = error
        return _given(self.made[info])


def _given(made: Report | Exception) -> Report:
    if isinstance(made, Exception):
        raise made
    return made


class RuleItem(pytest.Item):
    """One rule of one plugin."""

    def __init__(self, *, rule: str, report: Callable[[], Report], **settings: Any) -> None:
        super().__init__(**settings)
        self.rule, self.report = rule, report

    def runtest(self) -> None:
        """Pass, skip with the reason, or fail with the report's words."""
        from .reports import ConformanceError

        report = self.report()
        for rule, reason in report.skipped:
            if rule.name == self.rule:
                pytest.skip(reason)
        for violation in report.violations:
            if violation.rule.name == self.rule:
                raise ConformanceError(str(violation))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The message without the kit's traceback, which says nothing about the plugin."""
        from ..errors import TRLGRPOExtError

        if isinstance(excinfo.value, TRLGRPOExtError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Nowhere in a file, and a headline, in which pytest would read the dots of the plain name as classes."""
        return self.config.rootpath / "pyproject.toml", None, self.name.replace("::", ": ")

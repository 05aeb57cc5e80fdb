"""`pytest --trl-grpo-ext`: one test for each plugin of a distribution and each rule of its kind.

pytest imports this at every start, so it imports nothing but pytest until the option is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ..plugins.discovery import PluginInfo
    from .reports import Report

OPTION = "--trl-grpo-ext"
_ROOT = "trl-grpo-ext"
_OWN = ""
"""The option without a value: the distribution whose pyproject.toml is in the root directory."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("trl-grpo-ext").addoption(
        OPTION,
        nargs="?",
        const=_OWN,
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

    def collect(self) -> Iterator[pytest.Item]:
        """Yield one item for each plugin and rule, and one that fails where something cannot be loaded."""
        from ..errors import TRLGRPOExtError
        from .kit import project_options
        from .rules import rules_of

        try:
            options = project_options(self.config.rootpath)
            infos = self._plugins()
        except TRLGRPOExtError as error:
            yield FailedItem.from_parent(self, name="plugins", message=str(error))
            return
        for info in infos:
            checked = CheckedPlugin(info, options.get(info.name, {}))
            for rule in rules_of(info.kind):
                name = f"{info.name}::{rule.name}"
                yield RuleItem.from_parent(self, name=name, plugin=checked, rule=rule.name)

    def _plugins(self) -> list[PluginInfo]:
        from ..errors import ConfigurationError
        from ..plugins.discovery import available
        from ..plugins.metadata import normalise
        from .kit import project_name

        words = [word.strip() for word in self.asked.split(",") if word.strip()]
        if not words:
            own = project_name(self.config.rootpath)
            if own is None:
                raise ConfigurationError(
                    f"{OPTION} checks the distribution whose pyproject.toml is in {self.config.rootpath}, and there is "
                    f"none that has a project name. Name plugins or distributions instead: {OPTION}=NAME."
                )
            words = [own]
        installed, found = available(), []
        for word in words:
            of_distribution = [info for info in installed if normalise(info.distribution or "") == normalise(word)]
            named = [info for info in installed if _answers(info, word)]
            if not of_distribution and not named:
                raise ConfigurationError(
                    f"No installed plugin or distribution is called {word!r}. Is it installed here (pip install -e .), "
                    'and does its pyproject.toml have an entry point in one of the groups "trl_grpo_ext.rewards", '
                    '"trl_grpo_ext.advantage_hooks" and "trl_grpo_ext.loss_aggregations"?'
                )
            found += [info for info in (of_distribution or named) if info not in found]
        return found


class CheckedPlugin:
    """A plugin with its report, which is made when its first rule runs."""

    def __init__(self, info: PluginInfo, options: dict[str, Any]) -> None:
        self.info, self.options = info, options
        self._report: Report | Exception | None = None

    def report(self) -> Report:
        """The report.

        Raises:
            TRLGRPOExtError: The plugin, or its options, could not be loaded; each time it is asked for.
        """
        from ..errors import TRLGRPOExtError
        from .kit import check

        if self._report is None:
            info = self.info
            selection = f"{info.distribution}:{info.name}" if info.distribution else info.name
            try:
                self._report = check(info.kind, selection, **self.options)
            except TRLGRPOExtError as error:
                self._report = error
        if isinstance(self._report, Exception):
            raise self._report
        return self._report


class RuleItem(pytest.Item):
    """One rule of one plugin."""

    def __init__(self, *, plugin: CheckedPlugin, rule: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.plugin, self.rule = plugin, rule

    def runtest(self) -> None:
        """Pass, skip with the reason, or fail with the report's words."""
        report = self.plugin.report()
        for rule, reason in report.skipped:
            if rule.name == self.rule:
                pytest.skip(reason)
        for violation in report.violations:
            if violation.rule.name == self.rule:
                raise _Said(str(violation))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The message without the kit's traceback, which says nothing about the plugin."""
        from ..errors import TRLGRPOExtError

        if isinstance(excinfo.value, _Said | TRLGRPOExtError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Where it is: nowhere in a file."""
        return self.config.rootpath / "pyproject.toml", None, _headline(self.name)


class FailedItem(pytest.Item):
    """Something that cannot be collected, as one failing test."""

    def __init__(self, *, message: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.message = message

    def runtest(self) -> None:
        """Fail."""
        raise _Said(self.message)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The message alone."""
        return self.message

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Where it is: nowhere in a file."""
        return self.config.rootpath / "pyproject.toml", None, _headline(self.name)


class _Said(Exception):  # noqa: N818
    """A failure with a message only."""


def _headline(name: str) -> str:
    """A failure's headline. pytest would read the dots of the plain name as classes."""
    return name.replace("::", ": ")


def _answers(info: PluginInfo, word: str) -> bool:
    from ..plugins.metadata import normalise

    distribution, colon, name = word.rpartition(":")
    return info.answers_to(name) and (not colon or normalise(info.distribution or "") == normalise(distribution))

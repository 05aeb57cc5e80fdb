"""One exception tree.

Every error of this package is a `TRLGRPOExtError` and also the standard exception that fits (`ValueError`, `TypeError`,
`LookupError`, ...), so callers may catch either. A message says what was wrong, shows the value, and says what to do.
"""


class TRLGRPOExtError(Exception):
    """Root of every error that this package raises on purpose."""


class ConfigurationError(TRLGRPOExtError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class PluginError(TRLGRPOExtError):
    """Root of what can go wrong between a plugin's name and a usable object."""


class UnknownPluginError(PluginError, LookupError):
    """No installed distribution offers a plugin of that kind and name."""


class AmbiguousPluginError(PluginError, LookupError):
    """Two distributions offer the same name; the message names both and how to choose."""


class BrokenPluginError(PluginError, ImportError):
    """A selected plugin could not be imported, or its module lacks the attribute. The cause is chained."""


class PluginTypeError(PluginError, TypeError):
    """The plugin loaded, but it is not an object of the kind it was declared as."""


class PluginParameterError(PluginError, TypeError):
    """The plugin does not take the parameters it was given, or refused their values. The cause is chained."""


class PluginContractError(PluginError, RuntimeError):
    """The plugin's role, declaration or signatures are not those of the plugin contract, or of another version."""


class PluginBlockedError(PluginError, PermissionError):
    """`TRL_GRPO_EXT_PLUGINS` does not allow this distribution to load."""


class RewardError(TRLGRPOExtError, ValueError):
    """A reward cannot be computed for a reason that is not the completion's fault (a missing column, say)."""


class PluginOutputError(TRLGRPOExtError, ValueError):
    """A plugin ran and returned something that breaks its contract: wrong shape, not finite, off the mask."""


class PluginRunError(TRLGRPOExtError, RuntimeError):
    """A plugin raised while it ran. The cause is chained on the rank where it happened; all ranks raise this."""


class UpstreamError(TRLGRPOExtError, RuntimeError):
    """TRL, or a trainer class or model of the user's, does not do what this package relies on."""


class SelfCheckError(UpstreamError):
    """The terms recovered from TRL's loss do not add up to that loss; training stops."""


class EngineError(TRLGRPOExtError, RuntimeError):
    """The run differs from what was requested: in its engine, number of processes, precision or quantisation."""


class AlignmentError(TRLGRPOExtError, ValueError):
    """A completion's tokens cannot be matched with its text, so spans cannot be mapped to tokens."""


class CheckpointError(TRLGRPOExtError, OSError):
    """A checkpoint could not be written or found; existing files are unchanged."""


class ManifestError(TRLGRPOExtError, ValueError):
    """A checkpoint's plugins are not those of this run, or the file that records them cannot be used."""


def reworded(error: BaseException, message: str) -> BaseException:
    """The error with another message; its notes stay."""
    other = type(error).__new__(type(error), message)
    vars(other).update(vars(error))
    return other


def is_out_of_memory(error: BaseException) -> bool:
    """Whether no memory was left, which says nothing about what was tried."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return not kinds.isdisjoint({"MemoryError", "OutOfMemoryError"}) or "DefaultCPUAllocator" in str(error)


__all__ = sorted(name for name, one in vars().items() if isinstance(one, type) and issubclass(one, TRLGRPOExtError))

"""Mistakes that the user can correct become one sentence, not a traceback."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from trl_grpo_ext.errors import ConfigurationError, TRLGRPOExtError

PATIENCE = 10.0
"""Seconds that the other processes give the first one to report what stopped them all."""


class RecipeError(TRLGRPOExtError):
    """A problem with files, the hub or settings that the user can correct."""


@contextmanager
def exit_with_message() -> Iterator[None]:
    """End the program with status 2 and one line on stderr for mistakes that the user can correct.

    A wrong setting stops all processes. The first one reports it, and its exit makes the launcher end the others while
    they wait here. An error in a single process (a plugin that failed on its rows, say) is reported by that process.
    """
    try:
        yield
    except TRLGRPOExtError as error:
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        if rank:
            time.sleep(PATIENCE)
        which = f" (process {rank})" if rank else ""
        print(f"error{which}: {one_line(error)}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error


@contextmanager
def settings_errors() -> Iterator[None]:
    """Turn what the argument parsers of TRL and transformers raise for a wrong setting into a `ConfigurationError`."""
    try:
        yield
    except TRLGRPOExtError:
        raise
    except ValueError as error:
        message = one_line(error)
        if "divisible by num_generations" in message:
            message += (
                " It is per_device_train_batch_size times processes times gradient_accumulation_steps: change one of "
                "them, or --num_generations."
            )
        raise ConfigurationError(message) from error


@contextmanager
def loading_errors(model: str) -> Iterator[None]:
    """Turn what transformers and PEFT raise for a model that they cannot load or adapt into a `RecipeError`."""
    try:
        yield
    except TRLGRPOExtError:
        raise
    except (OSError, ValueError) as error:
        raise RecipeError(f"The model {model!r} cannot be used with these settings: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """The message on one line; the type if it is empty."""
    return " ".join(str(error).split()) or type(error).__name__

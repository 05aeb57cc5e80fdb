"""The user's script, run up to the construction of its trainer.

`python -m trl_grpo_ext.launch.doctor.probe REQUEST ANSWER`. The script runs as rank 0 and alone. Libraries are changed
when it imports them, so that what it sets before still counts: no weights load, and the first trainer of transformers
or TRL is examined in place of being initialised. Then the process ends, without the script's own `finally`.
"""

import dataclasses
import importlib.abc
import importlib.machinery
import inspect
import os
import pickle
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ...guard.untrusted import one_line
from . import Machine, Problem, Severity, pretend
from .launch import RENAMED, Launch, what_to_write

_UNREACHABLE = ("LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "ConnectTimeout")
_OFFLINE = ("couldn't connect to", "can't reach", "couldn't reach", "offline mode", "cannot be downloaded")


class _AfterImport(importlib.abc.MetaPathFinder):
    """Acts on modules right after they were imported, by name."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._actions:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_act(module: ModuleType) -> None:
            load(module)
            if action := self._actions.pop(fullname, None):  # others may only have asked whether it is there
                action(module)

        spec.loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec


class _Probe:
    """What is seen of one run."""

    def __init__(self, launch: Launch, machine: Machine, prompt_length: int, answer: Path) -> None:
        self._launch = launch
        self._machine = machine
        self._prompt_length = prompt_length
        self._answer = answer
        self._problems: list[Problem] = []
        self._made: dict[str, Any] = {}  # the last training arguments and the last model arguments
        self._unknown: dict[str, Any] = {}  # settings of a file that its parser does not know
        self._settings_alone = launch.settings_alone  # the trainer is not the script's

    def _on_torch(self, torch: Any) -> None:
        machine = self._machine
        if machine.gpus is None and (self._launch.needs_gpus or machine.gpu_bytes) and not torch.cuda.is_available():
            count = self._launch.processes_per_machine
            self._machine = dataclasses.replace(machine, gpus=count, assumed=machine.gpu_bytes is None)
        if self._machine.gpus is not None:
            pretend.gpus(torch, self._machine.gpus, machine.gpu_bytes)
        if self._launch.processes > 1:
            pretend.first_of(torch, self._launch.processes)

    def _remember(self, cls: Any, what: str) -> None:
        finish = cls.__post_init__

        def post_init(made: Any) -> None:
            finish(made)
            self._made[what] = made

        cls.__post_init__ = post_init

    def _on_parser(self, module: Any) -> None:
        read = module.TrlParser.set_defaults_with_config

        def set_defaults_with_config(parser: Any, **settings: Any) -> list[str]:
            remaining: list[str] = read(parser, **settings)
            self._unknown |= {name: settings[name] for name in settings if f"--{name}" in remaining}
            return remaining

        module.TrlParser.set_defaults_with_config = set_defaults_with_config

    def _on_configs(self, module: Any) -> None:
        load = module.AutoConfig.from_pretrained

        def from_pretrained(name: Any, *arguments: Any, **settings: Any) -> Any:
            from .model import shipped_config

            try:
                return load(name, *arguments, **settings)
            except OSError:
                if config := shipped_config(str(name)):
                    return config
                raise

        module.AutoConfig.from_pretrained = from_pretrained

    def _on_models(self, module: Any) -> None:
        def from_pretrained(cls: Any, /, name: Any = None, *_: Any, config: Any = None, **settings: Any) -> Any:
            from .model import without_weights

            return without_weights(cls, name, config, settings)

        resize = module.PreTrainedModel.resize_token_embeddings
        save = module.PreTrainedModel.save_pretrained

        def resize_token_embeddings(model: Any, *arguments: Any, **keywords: Any) -> Any:
            """Not by the mean of the weights, which are not there."""
            return resize(model, *arguments[:2], **{**keywords, "mean_resizing": False})

        def save_pretrained(model: Any, *arguments: Any, **keywords: Any) -> None:
            """Refuse before a file is written, rather than at the first weight."""
            if any(parameter.is_meta for parameter in model.parameters()):
                raise RuntimeError("A model on the meta device cannot be saved.")
            save(model, *arguments, **keywords)

        module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)
        module.PreTrainedModel.resize_token_embeddings = resize_token_embeddings
        module.PreTrainedModel.save_pretrained = save_pretrained

    def _on_trainer(self, module: Any) -> None:
        def new(cls: Any, *_: Any, **__: Any) -> Any:
            """Let the script's own class run, and stop where the frameworks' begins."""
            own = [one for one in cls.__mro__ if "__init__" in vars(one)]
            owner = next(one for one in own if one.__module__.partition(".")[0] in ("trl", "transformers"))
            signature = inspect.signature(owner.__init__)

            def stop(trainer: Any, *arguments: Any, **keywords: Any) -> NoReturn:
                given = signature.bind(trainer, *arguments, **keywords).arguments
                self._stop(trainer, {**given, **given.get("kwargs", {})})

            owner.__init__ = stop
            return object.__new__(cls)

        module.Trainer.__new__ = new

    def run(self) -> None:
        """Run the script; every way in which it can end writes an answer."""
        script = str(self._launch.script)
        sys.argv = [script, *self._launch.words]
        sys.path[0] = str(Path.cwd() if self._launch.module else Path(script).resolve().parent)
        if self._launch.settings_alone:  # its plugins may be beside it, or where its script is likely to be
            file = Path(self._launch.words[1]).resolve()
            sys.path[1:1] = [str(one) for one in file.parents if one.is_relative_to(Path.cwd()) and one != Path.cwd()]
        actions: dict[str, Callable[[Any], None]] = {
            "torch": self._on_torch,
            "transformers.training_args": lambda module: self._remember(module.TrainingArguments, "args"),
            "transformers.trainer": self._on_trainer,
            "transformers.modeling_utils": self._on_models,
            "transformers.models.auto.configuration_auto": self._on_configs,
            "trl.trainer.model_config": lambda module: self._remember(module.ModelConfig, "model_args"),
            "trl.scripts.utils": self._on_parser,
        }
        for name in [name for name in actions if name in sys.modules]:
            actions.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, _AfterImport(actions))
        try:
            if self._launch.module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever the user's script raises, SystemExit too
            if not isinstance(error, SystemExit) or error.code not in (None, 0):
                self._failed(error)
        self._finish(unreached="the script ended without constructing a trainer")

    def _failed(self, error: BaseException) -> None:
        """Say why the script ended before its trainer, and examine what is known by then."""
        cause = error
        if isinstance(error, SystemExit):
            cause = error.__cause__ or error.__context__ or error
        chain = [error]
        while (earlier := chain[-1].__cause__ or chain[-1].__context__) is not None and earlier not in chain:
            chain.append(earlier)
        words = _said(cause)
        reached = f"The script stopped before its trainer: {words}"
        lacks = ""
        if any(pretend.is_of_a_missing_gpu(one) for one in chain) and self._machine.gpus:
            lacks = "It uses a GPU, and none is here"
        elif any(_is_unreachable(one) for one in chain):
            lacks = "It needs the network or its cache"
        elif any(_is_of_missing_weights(one) for one in chain):
            lacks = "It uses the model's weights, which are not loaded here"
        described = len(self._made) == 2
        if lacks:
            follows = "what follows is from its settings alone" if described else "its settings are not known either"
            self._add("note", "script", f"{reached.rstrip('.')}. {lacks}: {follows}.")
        else:  # what a real run would raise; names of older versions have their successors beside it
            unknown = {name: value for name, value in self._unknown.items() if name in words}
            old = [name for name in RENAMED if re.search(rf"['\"`-]{name}\b", words)]
            fixes = what_to_write(dict.fromkeys(old, "") | unknown, _known_settings())
            subject = "settings" if unknown or old or isinstance(cause, ValueError) else "script"
            script = Path(str(self._launch.script)).name
            frames = traceback.extract_tb(cause.__traceback__)
            lines = [f" ({script}, line {one.lineno})" for one in frames if Path(one.filename).name == script]
            self._add("error", subject, reached + "".join(lines[-1:]), *fixes)
        if described:
            from .settings_alone import construct

            self._settings_alone = True
            try:
                construct(self._made["args"], self._made["model_args"])
            except Exception as second:  # any framework's or plugin's
                if str(second) not in str(self._problems):
                    self._add("error", "settings", _said(second))
        self._finish(unreached=lacks and "the script stopped before its trainer")

    def _add(self, severity: Severity, subject: str, message: str, *fixes: str) -> None:
        self._problems.append(Problem(severity, subject, message, " ".join(fixes)))

    def _stop(self, trainer: Any, given: Mapping[str, Any]) -> NoReturn:
        """Examine the run, at the place where its trainer would be initialised."""
        from .case import case_of
        from .memory import estimate, memory_problems
        from .pitfalls import problems_of

        if self._unknown:
            fixes = what_to_write(self._unknown, _known_settings())
            what = "the script's parser drops them, silently"
            if self._launch.settings_alone:
                what = "no settings of TRL, transformers or trl-grpo-ext, so the training script must know them"
            names = one_line(", ".join(self._unknown), 400)
            self._add("warning" if fixes else "note", "settings", f"{names}: {what}.", *fixes)
        seen = None if self._settings_alone else trainer
        case, unknown = case_of(self._launch, self._machine, seen, given)
        memory = estimate(case, self._prompt_length)
        self._problems += [*unknown, *problems_of(case), *memory_problems(case, memory)]
        self._finish(described=case.described(trainer), memory=memory)

    def _finish(self, **found: Any) -> NoReturn:
        found |= {"machine": self._machine, "problems": self._problems, "settings_alone": self._settings_alone}
        self._answer.write_bytes(pickle.dumps(found))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _known_settings() -> Sequence[str]:
    from trl import ModelConfig, ScriptArguments

    from ...trainer.config import GRPOExtConfig

    return [one.name for cls in (GRPOExtConfig, ModelConfig, ScriptArguments) for one in dataclasses.fields(cls)]


def _is_unreachable(error: BaseException) -> bool:
    named = any(kind.__name__ in _UNREACHABLE for kind in type(error).__mro__)
    return named or any(words in str(error).lower() for words in _OFFLINE)


def _is_of_missing_weights(error: BaseException) -> bool:
    """Whether it is for lack of weights: torch says that a tensor is on its meta device, in many ways."""
    said = str(error)
    meta = re.search(r"(?<![\w/-])meta\b(?![-/.])", said, re.I)  # not meta-llama
    on_meta = meta and re.search(r"\b(tensors?|device|backend)\b", said, re.I)
    return bool(on_meta) or "doesn't have storage" in said


def _said(error: BaseException) -> str:
    text = one_line(error, 700)
    if isinstance(error, SystemExit):
        return f"it exits with {text}."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    launched, machine, longest_prompt = pickle.loads(Path(sys.argv[1]).read_bytes())
    _Probe(launched, machine, longest_prompt, Path(sys.argv[2])).run()

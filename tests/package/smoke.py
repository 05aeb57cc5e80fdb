"""What the installed package must do anywhere, run outside the clone: `python smoke.py MODEL CLONE`."""

import json
import subprocess
import sys
from pathlib import Path

import trl_grpo_ext

COMMAND = Path(sys.executable).parent / "trl-grpo-ext"


def command(*words: str) -> str:
    """Run our command as installed, and return what it printed."""
    done = subprocess.run([str(COMMAND), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"trl-grpo-ext {' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def train(model: str, folder: Path) -> list[float]:
    """Two steps with a plugin of three kinds; the norms of their gradients."""
    from datasets import Dataset

    from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer

    sizes = {"per_device_train_batch_size": 16, "num_generations": 16, "max_completion_length": 56, "max_steps": 2}
    plugins = {"advantage_hooks": ["leave_one_out"], "loss_aggregation": "prompt_mean"}
    plugins["rewards"] = [{"name": "length_target", "target": 20}]
    args = GRPOExtConfig(str(folder), use_cpu=True, bf16=False, report_to="none", logging_steps=1, **sizes, **plugins)
    rows = Dataset.from_dict({"prompt": ["Q: 1 + 1?", "Q: 2 + 3?"]})
    trainer = GRPOExtTrainer(model, args=args, train_dataset=rows)
    trainer.train()
    return [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]


def main(model: str, clone: str) -> None:
    """Raise SystemExit with what is wrong, if anything is."""
    place = Path(trl_grpo_ext.__file__).resolve()
    if place.is_relative_to(Path(clone).resolve()):
        raise SystemExit(f"The clone was imported, {place}, and not the installed package.")
    listed = {entry["name"] for entry in json.loads(command("list", "--json"))}
    if trl_grpo_ext.__version__ not in command("--version") or "length_target" not in listed:
        raise SystemExit(f"The command is of another version, or lists no built-in plugins: {sorted(listed)}")
    print(f"list: {len(listed)} plugins")
    for plugin in ("{name: length_target, target: 20}", "leave_one_out", "prompt_mean"):
        print("check:", command("check", plugin).strip().splitlines()[0])
    folder = Path("trained").resolve()
    norms = train(model, folder)
    if len(norms) != 2 or max(norms) <= 0:
        raise SystemExit(f"Two steps must move the weights; the norms of the gradients are {norms}.")
    if not (folder / "trl_grpo_ext_plugins.json").is_file():
        raise SystemExit(f"The run left no manifest in {folder}.")
    print(f"train: 2 steps, gradients of norm {norms}")


if __name__ == "__main__":
    main(*sys.argv[1:])

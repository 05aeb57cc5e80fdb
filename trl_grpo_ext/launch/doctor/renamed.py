"""Settings that earlier releases of TRL and transformers took: what replaced them, and the first release without them.

What the installed releases still take, they name themselves when it is given; the table is for what they refuse. It was
made by comparing the fields of the config classes, release by release.
"""

import difflib
from collections.abc import Iterable, Mapping

RENAMED: Mapping[str, tuple[str, str]] = {
    "torch_dtype": ("dtype", "TRL 0.27"),
    "warmup_ratio": ("warmup_steps", "transformers 5.15, where a number below 1 is a share of the steps"),
    "max_prompt_length": ("", "TRL 0.28: filter the data set by the prompts' lengths, or longer ones are trained on"),
    "evaluation_strategy": ("eval_strategy", "transformers 4.51"),
    "no_cuda": ("use_cpu", "transformers 5.0"),
    "group_by_length": ("train_sampling_strategy", "transformers 5.2; its value is group_by_length"),
    "use_liger_loss": ("use_liger_kernel", "TRL 0.28"),
    "wandb_log_unique_prompts": ("log_unique_prompts", "TRL 0.27"),
    "vllm_max_model_len": ("vllm_max_model_length", "TRL 0.18"),
    "vllm_guided_decoding_regex": ("vllm_structured_outputs_regex", "TRL 0.28"),
    "overwrite_output_dir": ("", "transformers 5.0: a run continues only where resume_from_checkpoint says so"),
    "logging_dir": ("", "transformers 5.15: set the variable TENSORBOARD_LOGGING_DIR"),
    "vllm_device": ("", "TRL 0.18: vllm_mode colocate shares the trainer's GPUs, server has its own"),
}
"""Old name: its successor (empty if there is none), and the first release without it, with what else to know."""


def what_to_write(unknown: Mapping[str, object], known: Iterable[str]) -> list[str]:
    """A sentence for each setting that was renamed or removed, or that is near a known one."""
    sentences = []
    names = list(known)
    for name, value in unknown.items():
        successor, since = RENAMED.get(name, ("", ""))
        if successor:
            written = f"{successor}: {value}" if value not in (None, "") and "value" not in since else successor
            sentences.append(f"{name} is {successor} since {since}: write {written}.")
        elif since:
            sentences.append(f"{name} has no successor since {since}.")
        elif near := difflib.get_close_matches(name, names, n=2, cutoff=0.85):
            sentences.append(f"{name}: did you mean {' or '.join(near)}?")
    return sentences

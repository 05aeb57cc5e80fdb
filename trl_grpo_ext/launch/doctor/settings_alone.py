"""The script of a YAML file that names none: TRL's parser and our trainer, as in the recipes.

Settings that it does not know may be those of the file's own script.
"""

from typing import Any

from trl import GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from ...trainer.config import GRPOExtConfig
from ...trainer.mixin import GRPOExtTrainer


def construct(args: Any, model_args: ModelConfig) -> None:
    settings = {"revision": model_args.model_revision, "attn_implementation": model_args.attn_implementation}
    args.model_init_kwargs = {**settings, "dtype": model_args.dtype, **(args.model_init_kwargs or {})}
    trainer: Any = GRPOExtTrainer if isinstance(args, GRPOExtConfig) else GRPOTrainer
    trainer(
        model=model_args.model_name_or_path or "",
        args=args,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )


if __name__ == "__main__":
    parser = TrlParser([GRPOExtConfig, ModelConfig, ScriptArguments])
    args, model_args, *_ = parser.parse_args_and_config(return_remaining_strings=True)
    construct(args, model_args)

"""Run files and training scripts in the forms that public projects have, in our words, with their values shortened."""

from dataclasses import dataclass

OPEN_R1 = """
model_name_or_path: MODEL
model_revision: main
dataset_name: open-r1/OpenR1-Math-220k
dataset_prompt_column: problem
system_prompt: "Think first, then answer."
bf16: true
gradient_accumulation_steps: 4
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
learning_rate: 1.0e-05
max_completion_length: 256
max_steps: -1
num_generations: 16
output_dir: data/run
per_device_train_batch_size: 16
report_to: [wandb]
reward_funcs: [accuracy, format, tag_count]
reward_weights: [1.0, 1.0, 1.0]
save_strategy: "epoch"
"""
HEAD = "model_name_or_path: MODEL\nmax_completion_length: 64\n"


@dataclass(frozen=True)
class RunFile:
    """A YAML file, what is said of it, and what must not be; `error` is a part of an error's text, if there is one."""

    project: str
    text: str
    said: tuple[str, ...] = ()
    not_said: tuple[str, ...] = ("Remove", "remove them")
    error: str = ""


@dataclass(frozen=True)
class Script(RunFile):
    """A training script, and its words."""

    not_said: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


RUN_FILES = (
    RunFile(
        "open-r1, recipes of early 2025",
        OPEN_R1 + "torch_dtype: bfloat16\nwarmup_ratio: 0.1\nmax_prompt_length: 512\noverwrite_output_dir: true\n",
        ("write dtype: bfloat16", "write warmup_steps: 0.1", "max_prompt_length has no successor", "reward_funcs"),
    ),
    RunFile(
        "TRL's scripts, QLoRA",
        HEAD + "use_peft: true\nload_in_4bit: true\ndtype: bfloat16\nlearning_rate: 1.0e-4\n"
        "lora_target_modules: all-linear\n",
        ("on 4-bit weights",),
        ("warning", "error"),
    ),
    RunFile(
        "ms-swift's own settings",
        "rlhf_type: grpo\nmodel: MODEL\ntrain_type: lora\nreward_funcs: [accuracy]\ntorch_dtype: bfloat16\n"
        "num_generations: 8\nlerning_rate: 1.0e-6\n",
        ("rlhf_type", "train_type", "write dtype: bfloat16", "did you mean learning_rate"),
        ("error",),
    ),
    RunFile(
        "plugins of ours, of each kind",
        HEAD + "rewards: [gsm8k_accuracy]\nadvantage_hooks: [centred]\nloss_aggregation: seq_mean_token_mean\n"
        "resample: signal\ntoken_losses: [topr]\nprompt_sampler: retire_solved\n",
        (
            "; advantage hooks centred; loss aggregation seq_mean_token_mean; group filter signal; token losses topr; "
            "prompt sampler retire_solved",
        ),
    ),
    RunFile(
        "plugins of ours, one that does not exist",
        HEAD + "rewards: [gsm8k_acuracy]\n",
        ("gsm8k_accuracy",),
        error="gsm8k_acuracy",
    ),
)


DATA = "data = Dataset.from_list([{'prompt': 'What is 2 + 2?', 'answer': '4'}] * 16)\n"
IMPORTS = "from datasets import Dataset\nfrom trl import GRPOConfig, GRPOTrainer\n" + DATA
REWARD = "def length_reward(completions, **kwargs):\n    return [-abs(20 - len(c)) for c in completions]\n"

SCRIPTS = (
    Script(
        "TRL's quick start and the HF course",
        IMPORTS
        + REWARD
        + "args = GRPOConfig('out', max_completion_length=64,\n    num_generations=4, per_device_train_batch_size=8)\n"
        "GRPOTrainer(model='MODEL', reward_funcs=length_reward, args=args, train_dataset=data).train()\n",
        said=("GRPOTrainer", "16 prompts", "rewards length_reward", "878,720 parameters"),
    ),
    Script(
        "will-brown's demo: the model is loaded and moved to the GPU first",
        "import torch\nfrom peft import LoraConfig\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        + IMPORTS
        + REWARD
        + "model = AutoModelForCausalLM.from_pretrained('MODEL', torch_dtype=torch.bfloat16).to('cuda')\n"
        "tokenizer = AutoTokenizer.from_pretrained('MODEL')\n"
        "args = GRPOConfig(output_dir='out', max_completion_length=64, bf16=True, num_generations=8,\n"
        "    per_device_train_batch_size=8)\n"
        "peft = LoraConfig(r=16, target_modules=['q_proj', 'k_proj'], task_type='CAUSAL_LM')\n"
        "GRPOTrainer(model=model, processing_class=tokenizer, reward_funcs=[length_reward], args=args,\n"
        "    train_dataset=data, peft_config=peft).train()\n",
        said=("LoRA of rank 16", "878,720 parameters"),
    ),
    Script(
        "the demo as first published: a setting that is gone",
        IMPORTS + REWARD + "args = GRPOConfig(output_dir='out', max_prompt_length=256)\n",
        said=("max_prompt_length has no successor since TRL 0.28", "line 6"),
        error="unexpected keyword argument 'max_prompt_length'",
    ),
    Script(
        "open-r1: its own config class in a module beside the script",
        "from trl import GRPOTrainer, ModelConfig, TrlParser, get_peft_config\n"
        "from own_configs import Arguments, Config\n"
        + IMPORTS
        + REWARD
        + "script, args, model = TrlParser((Arguments, Config, ModelConfig)).parse_args_and_config()\n"
        "assert args.benchmarks == ['math'] and script.reward_funcs == ['accuracy']\n"
        "GRPOTrainer(model=model.model_name_or_path, reward_funcs=[length_reward], args=args, train_dataset=data,\n"
        "    peft_config=get_peft_config(model))\n",
        words=("--config", "run.yaml"),
        said=("16 prompts",),
    ),
    Script(
        "a subclass with arguments of its own",
        IMPORTS + REWARD + "class Mine(GRPOTrainer):\n    def __init__(self, scale, **more):\n"
        "        super().__init__(model='MODEL', reward_funcs=[length_reward], **more)\n"
        "try:\n    Mine(2.0, args=GRPOConfig('out', max_completion_length=64), train_dataset=data)\n"
        "except Exception:\n    pass\n",
        said=("; Mine; ", "16 prompts", "rewards length_reward"),
    ),
)
OWN_CONFIGS = """
from dataclasses import dataclass, field
from trl import GRPOConfig

@dataclass
class Config(GRPOConfig):
    benchmarks: list[str] = field(default_factory=list)

@dataclass
class Arguments:
    reward_funcs: list[str] = field(default_factory=lambda: ["accuracy"])
"""
OWN_RUN = HEAD + "benchmarks: [math]\nnum_generations: 4\n"

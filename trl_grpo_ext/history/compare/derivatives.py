"""Gradients of groups of completions under many selections, from a model, as sketches.

At a policy ratio of 1 the gradient of a selection's loss is minus `Σ over tokens of c · ∇ log π(token)`, with `c`
weight times advantage. Of each group's coefficients under all selections an orthonormal basis is made, and each row of
it costs one backward pass: advantages that differ by a factor within each group share one.

A sketch is a random linear map to `k` numbers: the estimate of `x·y` is unbiased, with a variance of at most
`(|x|²|y|² + (x·y)²) / k`, so a squared norm has a relative error of at most `sqrt(2 / k)`.

Source: the sketch is the count sketch of Charikar, Chen and Farach-Colton (2002), in the form and with the variance of
Weinberger et al. (0902.2206, Lemma 2).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from ...credit.alignment import token_offsets
from ...errors import ConfigurationError
from ...records.token_records import FOLDER, texts_of, write_records
from ...trainer.logps import completion_logits, logps_of
from ..run_files import plain_messages, read_columns
from .saved import loaded_or_refused

DIMENSIONS = 4096
ROWS = 8
NUM_GENERATIONS = 8
"""Completions of a prompt: TRL's default."""
GROUPS = 8
"""Prompts of a batch of sampled completions."""
SEED = 0
_KEPT_PLACES = 1 << 27
"""With at most this many parameters the sketch keeps their places, four bytes each; with more it draws them again."""
_IN_THE_SPAN = 5e-7
"""Singular value up to which coefficients count as a combination of others: float32 rounds."""


# -------------------------------------------------------------------------------------------------------- the sketch


class CountSketch:
    """A linear map from gradients to `k` numbers: every parameter is added to one of them, with a random sign.

    With at most `k` parameters it only concatenates them, and everything is exact. A parameter's places and signs
    depend only on its name, its size and the seed.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], dimensions: int, seed: int = 0) -> None:
        self._parameters = dict(parameters)
        self.seed = seed
        self.parameters = sum(one.numel() for one in parameters.values())
        self.exact = self.parameters <= dimensions
        self.dimensions = self.parameters if self.exact else dimensions
        self._kept: dict[str, torch.Tensor] = {}
        first = next(iter(parameters.values()))
        self.precision = torch.float64 if first.dtype == torch.float64 else torch.float32
        self.device = first.device

    def project(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The sketch of a gradient, `(k,)`; None stands for zeros."""
        if self.exact:
            pairs = zip(self._parameters.values(), gradients, strict=True)
            flat = [(torch.zeros_like(one) if grad is None else grad).flatten() for one, grad in pairs]
            return torch.cat([one.to(self.precision) for one in flat])
        both = torch.zeros(2 * self.dimensions, dtype=self.precision, device=self.device)
        for name, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is not None:
                places = self._places(name).to(gradient.device)
                both = both.to(gradient.device).index_add_(0, places, gradient.flatten().to(self.precision))
        return both[0::2] - both[1::2]

    def _places(self, name: str) -> torch.Tensor:
        """For each number of a parameter twice its place, plus one if its sign is flipped."""
        if name in self._kept:
            return self._kept[name]
        parameter = self._parameters[name]
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:7], "big"))
        places = torch.randint(
            2 * self.dimensions, (parameter.numel(),), generator=generator, device=parameter.device, dtype=torch.int32
        )
        if self.parameters <= _KEPT_PLACES:
            self._kept[name] = places
        return places


# --------------------------------------------------------------------------------------------------------- the model


class Group(NamedTuple):
    """One prompt's tokens, and those of its completions."""

    prompt: Sequence[int]
    completions: Sequence[Sequence[int]]


class MicroBatch(NamedTuple):
    """Some completions of a group, by their numbers: logits `(b, T, V)`, ids and mask `(b, T)`."""

    numbers: list[int]
    logits_B_T_V: torch.Tensor
    ids_B_T: torch.Tensor
    mask_B_T: torch.Tensor


class Policy:
    """A causal language model on one device as a source of samples, log-probabilities and their derivatives.

    Logits are divided by the temperature, as in training; one graph holds `rows` completions at most. The model is put
    into evaluation, without dropout.
    """

    def __init__(self, model: Any, *, name: str = "", temperature: float = 1.0, rows: int = ROWS) -> None:
        self.model = model.eval()
        self.temperature = temperature
        self.rows = rows
        self.name = name or getattr(model, "name_or_path", "")
        self.trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        if not self.trained:
            raise ConfigurationError(
                "The model has no trained parameter: all are frozen. Name the folder of an adapter as --model."
            )
        self.device = next(iter(self.trained.values())).device
        for module in model.modules():  # on some CPUs bitsandbytes packs 4-bit weights, which cuts the gradient
            if hasattr(module, "support_avx512bf16_for_cpu"):
                setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 (a plain attribute, not a tensor)

    def micro_batches(self, group: Group) -> Iterator[MicroBatch]:
        """Micro-batches of completions of similar length."""
        lengths = [len(completion) for completion in group.completions]
        order = sorted((row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row])
        before = len(group.prompt)
        for first in range(0, len(order), self.rows):
            numbers = order[first : first + self.rows]
            rows = [torch.tensor([*group.prompt, *group.completions[row]]) for row in numbers]
            # A causal model ignores what is on the right.
            ids = pad_sequence(rows, batch_first=True).to(self.device)
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(self.device)
            logits_B_T_V = completion_logits(self.model, ids, mask, ids.size(1) - before)
            yield MicroBatch(numbers, logits_B_T_V, ids[:, before:], mask[:, before:])

    def gradients(
        self, group: Group, coefficients_S_n: torch.Tensor, sketch: CountSketch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """For each row of coefficients the sketch of `Σ c ∇ log π`, `(S, k)`, and log-probabilities if any is not 0."""
        rows_R_n = basis_of(coefficients_S_n.double())
        if not len(rows_R_n):
            return torch.zeros(len(coefficients_S_n), sketch.dimensions, dtype=torch.float64), None
        sketches_R_k = torch.zeros(len(rows_R_n), sketch.dimensions, dtype=sketch.precision)
        starts = list(itertools.accumulate(map(len, group.completions), initial=0))
        logps_n = torch.zeros(starts[-1], dtype=torch.float32)
        parameters = list(self.trained.values())
        last = len(rows_R_n) - 1

        with torch.enable_grad():
            for batch in self.micro_batches(group):
                logps_B_T = logps_of(batch.logits_B_T_V, batch.ids_B_T, self.temperature)
                places = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in batch.numbers])
                live_B_T = batch.mask_B_T > 0
                logps_n[places] = logps_B_T.detach()[live_B_T].float().cpu()
                for row, coefficients_n in enumerate(rows_R_n):
                    total = (logps_B_T[live_B_T] * coefficients_n[places].to(self.device, logps_B_T.dtype)).sum()
                    found = torch.autograd.grad(total, parameters, retain_graph=row < last, allow_unused=True)
                    sketches_R_k[row] += sketch.project(found).cpu()
        return (coefficients_S_n.double() @ rows_R_n.T) @ sketches_R_k.double(), logps_n

    @torch.no_grad()
    def samples(
        self, prompt: Sequence[int], count: int, longest: int, end: int
    ) -> tuple[list[list[int]], list[list[float]], list[list[float]]]:
        """Sample completions up to the token `end`: tokens, log-probabilities and entropies of each."""
        whole = GenerationConfig(
            do_sample=True,
            temperature=self.temperature,
            top_p=1.0,
            top_k=0,
            repetition_penalty=1.0,
            max_new_tokens=longest,
            eos_token_id=end,
            pad_token_id=end,
            disable_compile=True,
        )
        completions: list[list[int]] = []
        while len(completions) < count:
            rows = min(self.rows, count - len(completions))
            ids = torch.tensor([list(prompt)] * rows, device=self.device)
            made = self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=whole)
            for row in made[:, len(prompt) :].tolist():
                completions.append(row[: row.index(end) + 1] if end in row else row)
        logps: list[list[float]] = [[] for _ in completions]
        entropies: list[list[float]] = [[] for _ in completions]
        for batch in self.micro_batches(Group(prompt, completions)):
            logps_B_T = logps_of(batch.logits_B_T_V, batch.ids_B_T, self.temperature)
            for place, number in enumerate(batch.numbers):
                size = len(completions[number])
                all_T_V = (batch.logits_B_T_V[place, :size].float() / self.temperature).log_softmax(dim=1)
                logps[number] = logps_B_T[place, :size].tolist()
                entropies[number] = torch.special.entr(all_T_V.exp()).sum(dim=1).tolist()
        return completions, logps, entropies


def basis_of(coefficients_S_n: torch.Tensor) -> torch.Tensor:
    """Orthonormal rows that span the coefficients, `(R, n)`."""
    units_S_n = torch.nn.functional.normalize(coefficients_S_n, dim=1)
    _, sizes_R, rows_R_n = torch.linalg.svd(units_S_n, full_matrices=False)
    spanning_R_n: torch.Tensor = rows_R_n[sizes_R > _IN_THE_SPAN]
    return spanning_R_n


def load_policy(model: str, *, dtype: str = "auto", device: str | None = None) -> Any:
    """Load a causal language model, or an adapter folder on top of its base; then only the adapter is trained.

    Args:
        model: A path or hub id.
        dtype: Of the weights, such as "bfloat16".
        device: Its device; None for the GPU, if there is one.

    Raises:
        ConfigurationError: It cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    def load() -> Any:
        if (Path(model) / "adapter_config.json").is_file():
            from peft import AutoPeftModelForCausalLM

            return AutoPeftModelForCausalLM.from_pretrained(model, is_trainable=True, dtype=dtype)
        return AutoModelForCausalLM.from_pretrained(model, dtype=dtype)

    loaded = loaded_or_refused("--model", model, load)
    return loaded.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def prompt_tokens(prompt: Any, tokenizer: Any) -> list[int]:
    """A prompt's tokens, as TRL makes them of text, or of messages by the chat template."""
    if isinstance(prompt, str):
        return list(tokenizer(text=prompt)["input_ids"])
    made = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(made["input_ids"])


# ------------------------------------------------------------------------------------------------ new completions


def sample(
    policy: Policy,
    tokenizer: Any,
    prompts: str | Path,
    folder: str | Path,
    *,
    num_generations: int,
    longest: int,
    limit: int | None,
    progress: Callable[[Sequence[Any], str], Iterable[Any]],
) -> None:
    """Write token records of `num_generations` new completions of each prompt in a `.jsonl` or `.parquet` file.

    They are drawn from the whole distribution at the policy's temperature, and are the same if drawn again on the same
    machine. Every `GROUPS` prompts are one generation batch.

    Raises:
        ConfigurationError: The folder has completions already, or the file has no column `prompt`.
    """
    if (Path(folder) / FOLDER).exists():
        raise ConfigurationError(f"{folder} has completions already: name another --sample, or compare these.")
    rows = read_columns(Path(prompts)).get("prompt")
    if not rows:
        raise ConfigurationError(f"{prompts} has no column 'prompt', so there is nothing to sample for.")
    if limit is not None:
        rows = rows[: max(limit // num_generations, 1)]
    end = tokenizer.eos_token_id
    records: list[dict[str, Any]] = []
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        for number, prompt in enumerate(progress([plain_messages(row) for row in rows], "Sampling"), start=1):
            prompt_ids = prompt_tokens(prompt, tokenizer)
            sampled = zip(*policy.samples(prompt_ids, num_generations, longest, end), strict=True)
            for member, (ids, logps, entropies) in enumerate(sampled):
                text = tokenizer.decode(ids, skip_special_tokens=True)
                records.append(
                    {
                        **texts_of(prompt, text, ids, tokenizer, partial(token_offsets, tokenizer, ids, text)),
                        "group": (number - 1) % GROUPS,
                        "member": member,
                        "prompt_ids": prompt_ids,
                        "truncated": ids[-1] != end,
                        "rewards": [],
                        "live": [True] * len(ids),
                        "logp": logps,
                        "entropy": entropies,
                    }
                )
            if number % GROUPS == 0 or number == len(rows):
                write_records(records, str(folder), -(-number // GROUPS))
                records = []

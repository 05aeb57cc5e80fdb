"""Gradients of groups of completions under many selections, from a model, as sketches.

At a policy ratio of 1 the gradient of a selection's loss is minus `Σ over tokens of c · ∇ log π(token)`, with `c`
weight times advantage. Of each group's coefficients under all selections an orthonormal basis is made, and each row of
it costs one backward pass: advantages that differ by a factor within each group share one.

A sketch is a random linear map to `k` numbers: the estimate of `x·y` is unbiased, with a variance of at most
`(|x|²|y|² + (x·y)²) / k`, so a squared norm has a relative error of at most `sqrt(2 / k)`.

Source: the sketch is the count sketch of Charikar, Chen and Farach-Colton (2002), in the form and with the variance of
Weinberger et al. (0902.2206, Lemma 2).
"""

import hashlib
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import AutoPeftModelForCausalLM
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from ...errors import ConfigurationError
from ...trainer.compact.sampling import copies_exactly, read_once
from ..run_files import reason_of

DIMENSIONS = 4096
ROWS = 8
_KEPT_PLACES = 1 << 27  # parameters up to which their places are kept, four bytes each, not drawn again
_IN_THE_SPAN = 5e-7  # singular value up to which coefficients are a combination of others: float32 rounds


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


class Group(NamedTuple):
    """One prompt's tokens, and those of its completions."""

    prompt: Sequence[int]
    completions: Sequence[Sequence[int]]


class Policy:
    """A causal language model on one device as a source of log-probabilities and their derivatives.

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
            raise ConfigurationError("The model has no trained parameter: all are frozen.")
        self.device = next(iter(self.trained.values())).device
        self._shares_prompt = copies_exactly(model)
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._keeps_logits = "logits_to_keep" in inspect.signature(type(inner).forward).parameters
        for module in model.modules():  # on some CPUs bitsandbytes packs 4-bit weights, which cuts the gradient
            if hasattr(module, "support_avx512bf16_for_cpu"):
                setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 (a plain attribute, not a tensor)

    def _micro_batches(self, group: Group) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
        """Completions of similar length: their numbers, log-probabilities and mask `(b, T)`."""
        lengths = [len(completion) for completion in group.completions]
        order = sorted((row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row])
        before = len(group.prompt)
        for first in range(0, len(order), self.rows):
            numbers = order[first : first + self.rows]
            rows = [torch.tensor([*group.prompt, *group.completions[row]]) for row in numbers]
            # A causal model ignores what is on the right.
            ids = pad_sequence(rows, batch_first=True).to(self.device)
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(self.device)
            yield numbers, self._logps(ids, mask, ids.size(1) - before), mask[:, before:] > 0

    def _logps(self, ids: torch.Tensor, mask: torch.Tensor, length: int) -> torch.Tensor:
        """Log-probabilities of the last `length` tokens, in float32; their prompt, the same in all rows, runs once."""
        before = ids.size(1) - length - 1
        cache = read_once(self.model, ids[:, : before + 1], mask[:, : before + 1]) if self._shares_prompt else None
        new = ids if cache is None else ids[:, before:]
        options: dict[str, Any] = {"attention_mask": mask, "past_key_values": cache, "use_cache": cache is not None}
        if self._keeps_logits:
            options["logits_to_keep"] = length + 1
        logits = self.model(input_ids=new, **options).logits[:, -length - 1 : -1]
        rows = []
        for row_logits, row_ids in zip(logits, ids[:, -length:], strict=True):  # one by one: float32 logits are large
            scaled_T_V = row_logits.float() / self.temperature
            rows.append(scaled_T_V.gather(1, row_ids.unsqueeze(1)).squeeze(1) - scaled_T_V.logsumexp(dim=1))
        return torch.stack(rows)

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
            for numbers, logps_B_T, live_B_T in self._micro_batches(group):
                places = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in numbers])
                logps_n[places] = logps_B_T.detach()[live_B_T].float().cpu()
                for row, coefficients_n in enumerate(rows_R_n):
                    total = (logps_B_T[live_B_T] * coefficients_n[places].to(self.device, logps_B_T.dtype)).sum()
                    found = torch.autograd.grad(total, parameters, retain_graph=row < last, allow_unused=True)
                    sketches_R_k[row] += sketch.project(found).cpu()
        return (coefficients_S_n.double() @ rows_R_n.T) @ sketches_R_k.double(), logps_n


def basis_of(coefficients_S_n: torch.Tensor) -> torch.Tensor:
    """Orthonormal rows that span the coefficients, `(R, n)`."""
    units_S_n = torch.nn.functional.normalize(coefficients_S_n, dim=1)
    _, sizes_R, rows_R_n = torch.linalg.svd(units_S_n, full_matrices=False)
    spanning_R_n: torch.Tensor = rows_R_n[sizes_R > _IN_THE_SPAN]
    return spanning_R_n


def load_policy(model: str, *, dtype: str = "auto", device: str | None = None) -> Any:
    """Load a causal language model, or an adapter folder on top of its base; then only the adapter is trained.

    `model` is a path or hub id, and `device` by default the GPU, if there is one.

    Raises:
        ConfigurationError: It does not load.
    """
    if (Path(model) / "adapter_config.json").is_file():
        loaded = load_pretrained(AutoPeftModelForCausalLM, model, is_trainable=True, dtype=dtype)
    else:
        loaded = load_pretrained(AutoModelForCausalLM, model, dtype=dtype)
    return loaded.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def load_pretrained(kind: Any, name: str, **options: Any) -> Any:
    """What a class of transformers or peft loads; a `ConfigurationError` names what does not load."""
    try:
        return kind.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{name!r} cannot be loaded: {reason_of(error)}.") from error


def prompt_tokens(prompt: Any, tokenizer: Any) -> list[int]:
    """A prompt's tokens, as TRL makes them of text, or of messages by the chat template."""
    if isinstance(prompt, str):
        return list(tokenizer(text=prompt)["input_ids"])
    made = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(made["input_ids"])

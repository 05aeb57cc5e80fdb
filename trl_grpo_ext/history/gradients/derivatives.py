"""Gradients of groups of completions under many selections, from a model, stored as sketches.

At a policy ratio of 1 the gradient of a selection's loss is minus `Σ over tokens of c · ∇ log π(token)`, with `c`
weight times advantage. So the gradients of all selections lie in a low-dimensional span: `Groups` keeps, for each
group, orthonormal coefficient rows and the sketched gradient of each. A selection whose coefficients lie in the span of
those rows needs no model; one that doesn't adds a row, which costs one backward pass. Advantages that differ by a
factor within each group (normalised, centred, leave one out) share one row.

A sketch is a random linear map to `k` numbers that keeps inner products: the estimate of `x·y` is unbiased, with a
variance of at most `(|x|²|y|² + (x·y)²) / k`, so a squared norm has a relative error of at most `sqrt(2 / k)`.

One backward pass and a sparse sketch of the gradient for each row cost less than forward-mode derivatives along `k`
directions (docs/gradients.md). What one token contributes to an inner product with a known direction is a derivative
along that direction, computed as the derivative of a gradient: functions with a backward pass of their own, such as
those of 4-bit layers, have no forward mode, and torch leaves them out of it without an error.

Source: the sketch is the count sketch of Charikar, Chen and Farach-Colton (2002), in the form and with the variance of
Weinberger et al. (0902.2206, Lemma 2).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...errors import ConfigurationError
from ...records.files import write_atomically
from ...trainer.logps import completion_logps

DIMENSIONS = 4096
ROWS = 8
_KEPT_PLACES = 1 << 27
"""With at most this many parameters the sketch keeps their places, four bytes each; with more it draws them again."""
_IN_THE_SPAN = 5e-7
"""Relative residual up to which coefficients count as a combination of the rows: float32 rounds."""


# -------------------------------------------------------------------------------------------------------- the sketch


class CountSketch:
    """A linear map from gradients to `k` numbers: every parameter is added to one of them, with a random sign.

    With at most `k` parameters it only concatenates them, and everything is exact. A parameter's places and signs
    depend only on its name, its size and the seed.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], dimensions: int, seed: int) -> None:
        self._parameters = dict(parameters)
        self.seed = seed
        self.parameters = sum(one.numel() for one in parameters.values())
        self.exact = self.parameters <= dimensions
        self.dimensions = self.parameters if self.exact else dimensions
        self._kept: dict[str, torch.Tensor] | None = {} if self.parameters <= _KEPT_PLACES else None
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

    def direction(self, sketch_k: torch.Tensor) -> list[torch.Tensor]:
        """The direction, shaped like the parameters, whose product with a gradient is that of their sketches."""
        sketch_k = sketch_k.to(self.precision)
        if self.exact:
            parts = torch.split(sketch_k, [one.numel() for one in self._parameters.values()])
        else:
            both = torch.stack([sketch_k, -sketch_k], dim=1).flatten()
            parts = tuple(both.to(one.device)[self._places(name)] for name, one in self._parameters.items())
        return [part.view(one.shape).to(one.dtype) for part, one in zip(parts, self._parameters.values(), strict=True)]

    def _places(self, name: str) -> torch.Tensor:
        """For each number of a parameter twice its place, plus one if its sign is flipped."""
        if name in (self._kept or {}):
            return self._kept[name]  # type: ignore[index]
        parameter = self._parameters[name]
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:7], "big"))
        places = torch.randint(
            2 * self.dimensions, (parameter.numel(),), generator=generator, device=parameter.device, dtype=torch.int32
        )
        if self._kept is not None:
            self._kept[name] = places
        return places


# --------------------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class Group:
    """One prompt's tokens, and those of its completions."""

    prompt: Sequence[int]
    completions: Sequence[Sequence[int]]

    @property
    def key(self) -> str:
        """The same for the same tokens."""
        tokens = [list(self.prompt), [list(row) for row in self.completions]]
        return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()

    @property
    def tokens(self) -> int:
        """Of all completions."""
        return sum(map(len, self.completions))


class Policy:
    """A causal language model on one device as a source of log-probabilities and their derivatives.

    Logits are divided by the temperature, as in training; one graph holds `rows` completions at most.
    """

    def __init__(self, model: Any, *, temperature: float = 1.0, rows: int = ROWS) -> None:
        self.model, self.temperature, self.rows = model, temperature, rows
        self.trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        if not self.trained:
            raise ConfigurationError(
                "The model has no trained parameter: all are frozen. 4-bit weights need an adapter; name its folder as "
                "--model."
            )
        self.device = next(iter(self.trained.values())).device

    @contextmanager
    def as_in_training(self) -> Iterator[None]:
        """Turn off dropout, and use an attention whose gradient has a derivative, which fused kernels lack."""
        was_training = self.model.training
        self.model.eval()
        for module in self.model.modules():  # on some CPUs bitsandbytes packs 4-bit weights, which cuts the gradient
            if hasattr(module, "support_avx512bf16_for_cpu"):
                setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 (a plain attribute, not a tensor)
        try:
            with sdpa_kernel(SDPBackend.MATH):
                yield
        finally:
            self.model.train(was_training)

    def micro_batches(self, group: Group) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
        """Micro-batches of rows of similar length: indices, log-probabilities `(b, T)`, and the mask `(b, T)`."""
        order = sorted(range(len(group.completions)), key=lambda row: -len(group.completions[row]))
        order = [row for row in order if len(group.completions[row])]
        for first in range(0, len(order), self.rows):
            numbers = order[first : first + self.rows]
            ids, mask = pad_rows([[*group.prompt, *group.completions[row]] for row in numbers], self.device)
            length = ids.size(1) - len(group.prompt)
            logps_B_T = completion_logps(self.model, ids, mask, length, self.temperature)
            yield numbers, logps_B_T, mask[:, -length:]

    def gradients(self, group: Group, rows_R_n: torch.Tensor, sketch: CountSketch) -> tuple[torch.Tensor, torch.Tensor]:
        """The sketched gradients `(R, k)` of `Σ c log π` for rows of coefficients, and the log-probabilities `(n,)`."""
        sketches_R_k = torch.zeros(len(rows_R_n), sketch.dimensions, dtype=sketch.precision)
        logps_n = torch.zeros(group.tokens, dtype=torch.float32)
        with self.as_in_training(), torch.enable_grad():
            for numbers, logps_B_T, mask_B_T in self.micro_batches(group):
                places = _token_positions(group, numbers)
                live_B_T = mask_B_T > 0
                logps_n[places] = logps_B_T.detach()[live_B_T].float().cpu()
                for row, coefficients_n in enumerate(rows_R_n):
                    chosen = coefficients_n[places].to(self.device, logps_B_T.dtype)
                    gradients = torch.autograd.grad(
                        (logps_B_T[live_B_T] * chosen).sum(),
                        list(self.trained.values()),
                        retain_graph=row + 1 < len(rows_R_n),
                        allow_unused=True,
                    )
                    sketches_R_k[row] += sketch.project(gradients).cpu()
                    del gradients
        return sketches_R_k, logps_n

    def along(self, group: Group, sketches: Sequence[torch.Tensor], sketch: CountSketch) -> torch.Tensor:
        """The derivative of every token's log-probability along the direction of each sketch, `(D, n)`.

        With `v` a weight of 1 for each token, the product of a direction with the gradient of `Σ v log π` is linear in
        `v`, and its derivative in `v` is the result. Only one direction, which is as large as the parameters, is held
        at a time.
        """
        found_D_n = torch.zeros(len(sketches), group.tokens, dtype=torch.float64)
        parameters = list(self.trained.values())
        with self.as_in_training(), torch.enable_grad():
            for numbers, logps_B_T, mask_B_T in self.micro_batches(group):
                live_n = logps_B_T[mask_B_T > 0]
                ones_n = torch.ones_like(live_n, requires_grad=True)
                gradients = torch.autograd.grad(live_n, parameters, ones_n, create_graph=True, allow_unused=True)
                for number, sketch_k in enumerate(sketches):
                    direction = sketch.direction(sketch_k.to(self.device))
                    pairs = [(g, d) for g, d in zip(gradients, direction, strict=True) if g is not None]
                    try:
                        (along_n,) = torch.autograd.grad(
                            [g for g, _ in pairs],
                            ones_n,
                            [d.to(g.dtype) for g, d in pairs],
                            retain_graph=number + 1 < len(sketches),
                        )
                    except RuntimeError as error:
                        if "derivative for" not in str(error):
                            raise
                        raise ConfigurationError(
                            f"The model's attention has no second derivative, which shares by token need: {error} Load "
                            "the model with attn_implementation='eager', or turn off the shares (--no-shares)."
                        ) from error
                    found_D_n[number, _token_positions(group, numbers)] = along_n.double().cpu()
        return found_D_n

    @torch.no_grad()
    def scores(self, group: Group) -> list[tuple[list[float], list[float]]]:
        """For each completion the log-probability and the entropy, in nats, at every token."""
        scored: list[tuple[list[float], list[float]]] = [([], []) for _ in group.completions]
        was_training = self.model.training
        self.model.eval()
        for row, completion in enumerate(group.completions):
            if not completion:
                continue
            ids = torch.tensor([[*group.prompt, *completion]], device=self.device)
            logits = self.model(input_ids=ids, use_cache=False).logits[0, len(group.prompt) - 1 : -1]
            logps_T_V = torch.log_softmax(logits.float() / self.temperature, dim=1)
            chosen_T = logps_T_V.gather(1, ids[0, len(group.prompt) :].unsqueeze(1)).squeeze(1)
            entropies_T = -(logps_T_V.exp() * logps_T_V).nan_to_num(nan=0.0).sum(dim=1)
            scored[row] = (chosen_T.tolist(), entropies_T.tolist())
        self.model.train(was_training)
        return scored

    def fingerprint(self) -> str:
        """A hash of the weights, made from sums over each parameter, which any training step changes."""
        facts: list[Any] = [self.temperature]
        for name, one in self.model.named_parameters():
            values = one.detach()
            values = values.float() if values.is_floating_point() else values
            sums = [float(values.double().sum()), float(values.double().square().sum())]
            facts.append([name, list(one.shape), str(one.dtype), one.requires_grad, *sums])
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def pad_rows(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of tokens and their mask, padded on the right, where a causal model ignores it."""
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(int(lengths.max())) < lengths.unsqueeze(1)).long()
    ids = torch.zeros_like(mask)
    ids[mask > 0] = torch.tensor([token for row in rows for token in row])
    return ids.to(device), mask.to(device)


def _token_positions(group: Group, numbers: Sequence[int]) -> torch.Tensor:
    """The positions of some completions' tokens among those of the group."""
    starts = [0]
    for row in group.completions:
        starts.append(starts[-1] + len(row))
    return torch.cat([torch.arange(starts[row], starts[row + 1]) for row in numbers])


# ---------------------------------------------------------------------------------------------------------- the rows


@dataclass
class GroupGradients:
    """The stored results of one group: orthonormal coefficients, the sketched gradient of each, log-probabilities.

    `along` has, by the direction's key, the derivative of each token's log-probability along it.
    """

    rows_R_n: torch.Tensor
    sketches_R_k: torch.Tensor
    logps_n: torch.Tensor | None
    along: dict[str, torch.Tensor]


class Groups:
    """The groups' rows and sketches, stored in a folder, one file per group; without a folder nothing is kept."""

    def __init__(self, policy: Policy, sketch: CountSketch, folder: Path | None) -> None:
        self.policy, self.sketch = policy, sketch
        self.folder = None
        self.backward_passes = 0
        if folder is not None:
            made_with = json.dumps([policy.fingerprint(), sketch.dimensions, sketch.seed, policy.device.type])
            self.folder = folder / hashlib.sha256(made_with.encode()).hexdigest()[:16]

    def gradients(self, group: Group, coefficients_S_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sketched gradient of `Σ c log π` for each row of coefficients, `(S, k)`, and the log-probabilities.

        The model runs only for what lies outside the span of the known rows. Log-probabilities are None if it never
        ran.
        """
        known = self._read(group)
        coefficients_S_n = coefficients_S_n.double()
        new_R_n = new_rows(known.rows_R_n, coefficients_S_n)
        if len(new_R_n):
            sketches_R_k, known.logps_n = self.policy.gradients(group, new_R_n, self.sketch)
            self.backward_passes += len(new_R_n)
            known.rows_R_n = torch.cat([known.rows_R_n, new_R_n])
            known.sketches_R_k = torch.cat([known.sketches_R_k, sketches_R_k])
            self._write(group, known)
        factors_S_R = coefficients_S_n @ known.rows_R_n.T
        return factors_S_R @ known.sketches_R_k.double(), known.logps_n

    def along(self, group: Group, directions: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The derivative of each token's log-probability along directions that are given as sketches, `(D, n)`."""
        known = self._read(group)
        missing = [key for key in directions if key not in known.along]
        if missing:
            found_D_n = self.policy.along(group, [directions[key] for key in missing], self.sketch)
            known.along |= dict(zip(missing, found_D_n, strict=True))
            self._write(group, known)
        return torch.stack([known.along[key] for key in directions])

    def _file(self, group: Group) -> Path | None:
        return None if self.folder is None else self.folder / f"{group.key[:32]}.safetensors"

    def _read(self, group: Group) -> GroupGradients:
        from safetensors import SafetensorError
        from safetensors.torch import load

        file = self._file(group)
        if file is not None and file.is_file():
            try:
                tensors = load(file.read_bytes())
                along = {key.removeprefix("along/"): tensors[key] for key in tensors if key.startswith("along/")}
                return GroupGradients(tensors["rows"], tensors["sketches"], tensors.get("logps"), along)
            except (SafetensorError, OSError, KeyError) as error:
                raise ConfigurationError(f"{file} cannot be read ({error}). Delete it to make it again.") from error
        nothing = torch.zeros(0, group.tokens, dtype=torch.float64)
        return GroupGradients(nothing, torch.zeros(0, self.sketch.dimensions, dtype=self.sketch.precision), None, {})

    def _write(self, group: Group, known: GroupGradients) -> None:
        from safetensors.torch import save

        file = self._file(group)
        if file is None:
            return
        tensors = {"rows": known.rows_R_n, "sketches": known.sketches_R_k}
        tensors |= {} if known.logps_n is None else {"logps": known.logps_n}
        tensors |= {f"along/{key}": along_n for key, along_n in known.along.items()}
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, save({name: one.contiguous() for name, one in tensors.items()}))
        except OSError as error:
            raise ConfigurationError(
                f"The gradients cannot be kept in {file.parent} ({error.strerror}). Name another folder with --keep."
            ) from error


def new_rows(rows_R_n: torch.Tensor, coefficients_S_n: torch.Tensor) -> torch.Tensor:
    """New orthonormal rows that, with the known ones, span the coefficients; none for what they span already."""
    found: list[torch.Tensor] = []
    for coefficients_n in coefficients_S_n:
        norm = coefficients_n.norm()
        left_n = coefficients_n
        basis_R_n = torch.cat([rows_R_n, *(row.unsqueeze(0) for row in found)])
        for _ in range(2):  # the second pass removes the first one's rounding errors
            left_n = left_n - basis_R_n.T @ (basis_R_n @ left_n)
        if left_n.norm() > _IN_THE_SPAN * norm:
            found.append(left_n / left_n.norm())
    return torch.stack(found) if found else rows_R_n[:0]


def key_of(sketch_k: torch.Tensor) -> str:
    """The same for the same direction."""
    return hashlib.sha256(sketch_k.float().numpy().tobytes()).hexdigest()[:32]

"""Find out, on rows of the run's own batches, what may change about them without changing what the policy computes.

The reference is TRL's own pass of a few rows; what counts as equal is measured by one more rounding of all outputs.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from ...errors import UpstreamError, is_out_of_memory
from ..upstream.acting import attributes
from ..upstream.images import NO_IMAGES, Images
from ..upstream.reading import RunFacts
from .packed import Groups, Lengths, PackedRows, Packing, backbone_of

logger = logging.getLogger(__name__)

ROWS = 5  # rows of each rank that a trial runs
PADDED = 2  # those that also run elsewhere and alone: the shortest, that with the shortest prompt

SHOWN = 32  # tokens of a prompt's end and of a completion's beginning that a trial of the gradient runs
TIMES = 10.0  # a difference above so many times that of one more rounding counts
FLOOR = 1e-5  # differences of log-probabilities up to this, root mean square, count for nothing
GRADIENT_FLOOR = 1e-4  # nor do a gradient's, relative to it; the least of a model that sees its place is 2e-3
MARGIN = 3  # tokens by which a length is surely beyond what the model makes of a number in its config

SMALL = 2**16  # most numbers of a buffer that a pass may write into, as means and counters; quantised weights have more
Result = TypeVar("Result")

Policy = Callable[[], tuple[Callable[..., Any], Any]]  # TRL's method for log-probabilities, and the policy
Span = tuple[int, int]  # of one rank's batch: tokens of its shortest row, and the width at which TRL runs all


@dataclass(frozen=True)
class Exact:
    """What changes nothing."""

    left: bool  # to cut away the padding of prompts
    right: bool  # to cut away the padding of completions
    packed: bool  # to run rows without padding in one


NOTHING = Exact(left=False, right=False, packed=False)


@dataclass(frozen=True)
class Rows:
    """Rows as TRL runs them: `(N, P + T)`, of which it scores the last `keep` columns."""

    ids: torch.Tensor
    mask: torch.Tensor
    keep: int
    lengths: Lengths
    groups: Groups
    images: Images = NO_IMAGES

    @property
    def live(self) -> torch.Tensor:
        return self.mask[:, -self.keep :] != 0

    def few(self) -> Rows:
        """The shortest row, that with the shortest prompt, the longest, one of its prompt, and those of others."""
        everyone = range(len(self.ids))
        scored = np.flatnonzero(self.lengths[:, 1]).tolist() or [*everyone]
        group = self.groups.tolist()
        total = self.lengths.sum(axis=1).tolist()
        longest = max(scored, key=total.__getitem__)
        mates = [row for row in scored if group[row] == group[longest] and row != longest]
        shortest = [min(scored, key=total.__getitem__), min(scored, key=self.lengths[:, 0].tolist().__getitem__)]
        of_each_prompt = {group[row]: row for row in scored}.values()
        wanted = dict.fromkeys([*shortest, longest, *mates[:1], *of_each_prompt, *everyone])
        return self.at([*wanted][:ROWS])

    def at(self, chosen: list[int]) -> Rows:
        images = self.images.at(chosen)
        return Rows(self.ids[chosen], self.mask[chosen], self.keep, self.lengths[chosen], self.groups[chosen], images)

    def moved(self, shift: int, fill: int) -> Rows:
        """The rows so many columns further right, where as many are cut away."""
        width = self.ids.size(1) - shift
        ids = pad(self.ids[:, :width], (shift, 0), value=fill)
        mask = pad(self.mask[:, :width], (shift, 0))
        images = self.images.with_types(lambda types: pad(types[:, :width], (shift, 0)))
        return replace(self, ids=ids, mask=mask, keep=self.keep - shift, images=images)

    def row(self, number: int, trim_left: bool) -> Rows:
        """One row without padding after it, nor before it."""
        prompt, completion = np.maximum(self.lengths[number], 1).tolist()
        start = self.ids.size(1) - self.keep
        columns = slice(start - prompt if trim_left else 0, start + completion)
        return replace(self.at([number])._between(columns), keep=completion)

    def cut(self, before: int, after: int) -> Rows:
        """The end of each prompt, or all of it if it has images, and the beginning of each completion."""
        start = self.ids.size(1) - self.keep
        keep = min(self.keep, after)
        before = start if self.images else before
        found = self._between(slice(max(start - before, 0), start + keep))
        return replace(found, keep=keep, lengths=np.minimum(self.lengths, [before, keep]))

    def _between(self, columns: slice) -> Rows:
        images = self.images.between(columns)
        return replace(self, ids=self.ids[:, columns], mask=self.mask[:, columns], images=images)


@dataclass
class Trials:
    """The trials of one run; all ranks make them together, with the same result."""

    packing: Packing | None
    policy: Policy
    facts: RunFacts

    def __post_init__(self) -> None:
        backbone: Any = backbone_of(self.policy()[1])
        self._backbone = type(backbone)
        self._numbers = numbers_in(backbone.config)
        self._spans: list[Span] = []  # of the batches that were tried
        self._packing_is_untried = self.packing is not None
        self.exact = Exact(left=True, right=True, packed=False)  # by all trials until now

    def takes(self, model: Any) -> bool:
        """Whether a model computes as the policy does; a reference may be of another architecture."""
        backbone: Any = backbone_of(model)
        return isinstance(backbone, self._backbone) and numbers_in(backbone.config) == self._numbers

    def covers(self, span: Span) -> bool:
        """Whether a batch need not be tried: some models change only beyond a length in their config."""
        if self.exact == NOTHING:
            return True
        shortest, width = span

        def shown(number: int) -> bool:  # rows of a batch that was tried lay as far on both sides
            least = max(shortest, number - MARGIN)
            most = min(width, number + MARGIN)
            return any(low <= least and high >= most for low, high in self._spans)

        near = [number for number in self._numbers if shortest - MARGIN < number < width + MARGIN]
        return bool(self._spans) and all(map(shown, near))

    def of(self, rows: Rows, spans: Sequence[Span], *, fits: bool) -> Exact:
        """What is exact for these `rows`. `spans`: of the ranks with live tokens; `fits`: all rows fit for packing."""
        if not spans:  # no token shows a difference; the next batch may have some
            return NOTHING
        tries_packing = fits and self._packing_is_untried
        if all(map(self.covers, spans)) and not tries_packing:
            return self.exact
        method, model = self.policy()
        if any(hasattr(module, "neftune_noise_alpha") for module in model.modules()):
            return self._find(NOTHING, "NEFTune's noise depends on the length of a pass (neftune_noise_alpha)")
        devices = [self.facts.device] if self.facts.device.type == "cuda" else []
        with _without_dropout(model), _same_state(model), torch.random.fork_rng(devices):
            torch.manual_seed(0)
            trial, wrong = _attempt(lambda: _Trial(method, model, rows.few(), self.packing, self.facts))
            if trial is None:
                return self._find(NOTHING, f"rows of the batch do not run without dropout ({wrong})")
            if trial.ranks_tokens:
                return self._find(NOTHING, "the model chooses tokens by rank (topk), and padding decides ties")
            if not trial.shows_places:
                return NOTHING
            with torch.no_grad():
                self._try_values(trial, pack=tries_packing or (fits and self.exact.packed))
            if self.exact.left and (tries_packing or not self._spans):
                self._try_gradients(trial, pack=self.exact.packed and tries_packing)
        self._packing_is_untried &= not fits and self.exact.left and self.exact.right
        self._spans += spans
        return self.exact

    def _find(self, exact: Exact, reason: str) -> Exact:
        if exact != self.exact and self.packing is not None:
            self.packing.say_once(reason)
        elif exact != self.exact:
            logger.info("compact_updates: rows keep their padding: %s.", reason)
        self.exact = exact
        return exact

    def _try_values(self, trial: _Trial, *, pack: bool) -> None:
        by = f"by one more rounding {trial.noise:.2g}"
        anywhere = replace(self.exact, left=False, packed=False)
        if not (places := trial.places()) <= trial.limit:
            where = "at other places of rows of the same width log-probabilities"
            self._find(anywhere, f"the model's positions are absolute: {where} change by {places:.2g}, {by}")
        if not trial.alone(trim_left=self.exact.left) <= trial.limit:
            if (after := trial.alone(trim_left=False)) <= trial.limit:
                self._find(anywhere, "the model sees the padding before a prompt")
            else:
                what = f"without padding after them log-probabilities change by {after:.2g}, {by}"
                self._find(NOTHING, f"what the model computes depends on the length of a pass: {what}")
        if pack and self.exact.left and self.exact.right:
            gap, wrong = trial.packed()
            self.exact = replace(self.exact, packed=True)
            if not gap <= trial.limit:
                self._find(replace(self.exact, packed=False), wrong or f"log-probabilities differ by {gap:.2g}, {by}")

    def _try_gradients(self, trial: _Trial, *, pack: bool) -> None:
        (elsewhere, places), (packed, gap), wrong = trial.gradients(pack=pack)
        if not elsewhere <= 1.0:
            where = f"at other places of rows gradients change by {places:.2g}"
            self._find(replace(self.exact, left=False, packed=False), f"the model's positions are absolute: {where}")
        elif not packed <= 1.0:
            self._find(replace(self.exact, packed=False), wrong or f"gradients differ by {gap:.2g}")


@dataclass
class _Trial:
    """Passes of a few rows, compared with TRL's own pass."""

    method: Callable[..., Any]
    model: Any
    rows: Rows
    packing: Packing | None
    facts: RunFacts

    def __post_init__(self) -> None:
        rows = self.rows
        self._padded = rows.at([*range(min(PADDED, len(rows.ids)))])
        before = rows.ids.size(1) - rows.keep
        with torch.no_grad():
            with _RankedSizes() as whole:
                self._expected = self._values(rows)
            with _RankedSizes() as half:
                self._values(rows.at([0]).cut((before + 1) // 2, (rows.keep + 1) // 2))
            with _rounded(self.model, rows.ids.size(1)):
                gap = self._gap(self._values(self._padded))
        self._shift = rows.keep // 2
        self.noise, shifts, differ = self._agree(gap, float(self._shift), float(whole.sizes != half.sizes))
        self.ranks_tokens = differ > 0
        self.limit = max(FLOOR, TIMES * self.noise) if math.isfinite(self.noise) else FLOOR
        self.shows_places = shifts > 0  # not where all completions have one token

    def _values(self, rows: Rows) -> torch.Tensor:
        seen = {"batch_size": self.facts.rows_per_pass, **rows.images.entries(rows.ids.device)}
        values: torch.Tensor = self.method(self.model, rows.ids, rows.mask, rows.keep, **seen)[0]
        return values

    def _packed_values(self, rows: Rows) -> torch.Tensor:
        packed = PackedRows.of(rows.ids, rows.keep, rows.lengths, rows.groups)
        if packed is None or self.packing is None:  # this rank runs a pass all the same
            return self._values(rows)
        given = {"model": self.model, "input_ids": rows.ids, "attention_mask": rows.mask, "logits_to_keep": rows.keep}
        given |= rows.images.entries(rows.ids.device)
        values: torch.Tensor = self.packing.logps(self.method, given, packed)[0]
        return values

    def _gap(self, found: torch.Tensor) -> float:
        """Root mean square of the first rows' differences, over the tokens of completions."""
        rows, width = found.shape
        differences = (found - self._expected[:rows, :width])[self.rows.live[:rows, :width]].double()
        return float(differences.square().mean().sqrt()) if len(differences) else 0.0

    def _agree(self, *numbers: float) -> list[float]:
        """The largest on any rank; infinite for one that is no number."""
        table = torch.tensor([numbers], dtype=torch.float32, device=self.facts.device).nan_to_num(math.inf, math.inf)
        return [float(number) for number in self.facts.gather(table).view(self.facts.ranks, -1).amax(dim=0)]

    def places(self) -> float:
        return self._agree(self._gap(self._values(self._padded.moved(self._shift, self.facts.pad_id))))[0]

    def alone(self, *, trim_left: bool) -> float:
        found = torch.full_like(self._expected[: len(self._padded.ids)], math.nan)

        def run() -> None:
            for number in range(len(found)):
                row = self._padded.row(number, trim_left)
                found[number, : row.keep] = self._values(row)[0]

        _attempt(run)  # of a model that takes no other width nothing is found
        return self._agree(self._gap(found))[0]

    def packed(self) -> tuple[float, str]:
        gap, wrong = _attempt(lambda: self._gap(self._packed_values(self.rows)))
        why = f"packed rows fail ({wrong})" if wrong else ""
        return self._agree(math.nan if gap is None else gap)[0], why

    def gradients(self, *, pack: bool) -> tuple[Sequence[float], Sequence[float], str]:
        """How gradients of a random projection differ at other places, and packed; what went wrong."""
        whole = self.rows.cut(SHOWN, SHOWN)
        shift = whole.keep // 2
        moved = whole.moved(shift, self.facts.pad_id)
        rows = whole.cut(SHOWN, whole.keep - shift)
        generator = torch.Generator().manual_seed(0)
        slopes = torch.randn(rows.live.shape, generator=generator).to(rows.ids.device) * rows.live

        def worst(found: torch.Tensor) -> tuple[float, float]:
            return _worst(found, expected, rounded) if rows.live.any() else (0.0, 0.0)  # other ranks have live tokens

        def projected(values: Callable[[Rows], torch.Tensor], of: Rows) -> torch.Tensor:
            return _gradient_of(self.model, lambda: (values(of) * slopes).sum())

        expected = projected(self._values, rows)
        with _rounded(self.model, rows.ids.size(1)):
            rounded = projected(self._values, rows)
        gaps = [*worst(projected(self._values, moved)), 0.0, 0.0]
        wrong = ""
        if pack:
            packed, wrong = _attempt(lambda: worst(projected(self._packed_values, rows)))
            gaps[2:] = packed or (math.inf, math.inf)
        agreed = self._agree(*gaps)
        return agreed[:2], agreed[2:], f"the gradient of packed rows fails ({wrong})" if wrong else ""


def _attempt(run: Callable[[], Result]) -> tuple[Result | None, str]:
    try:
        return run(), ""
    except (UpstreamError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        return None, f"{type(error).__name__}: {error}"


def _worst(found: torch.Tensor, expected: torch.Tensor, rounded: torch.Tensor) -> tuple[float, float]:
    """The largest difference of gradients `(parameters, projections)`, in units of what is allowed, and relative."""
    if not expected.any():
        return math.inf, math.inf  # a gradient that is not seen is not compared
    size, gap, noise = (part.square().mean(dim=1).sqrt() for part in (expected, found - expected, rounded - expected))
    limit = TIMES * torch.maximum(noise, torch.finfo(torch.float32).eps * (size + size.square().mean().sqrt()))
    excess = (gap / torch.maximum(limit, GRADIENT_FLOOR * size)).nan_to_num(nan=math.inf)
    worst = int(excess.argmax())
    return float(excess[worst]), float(gap[worst]) / (float(size[worst]) or float(size.max()))


SKETCH = 4


def _gradient_of(model: Any, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`(parameters, projections)`: random projections of the gradient of each trained parameter; none is kept."""
    numbers = {name: number for number, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
    # The tensors at the forward pass: under FSDP2 whole only then, and ZeRO's hooks would reduce others.
    used: dict[int, tuple[int, torch.Tensor]] = {}

    def see(prefix: str, module: torch.nn.Module, *_: Any) -> None:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                used.setdefault(id(parameter), (numbers[f"{prefix}.{name}" if prefix else name], parameter))

    found = torch.zeros(len(numbers), SKETCH * SKETCH, dtype=torch.float64)

    def project(number: int, gradient: torch.Tensor) -> torch.Tensor:
        if isinstance(gradient, DTensor):  # of a head that TRL gathers by itself
            found[number] += _sketch(gradient.to_local(), number)
            return torch.zeros_like(gradient)
        found[number] += _sketch(gradient, number)
        return gradient.new_zeros(()).expand_as(gradient)  # so that no more than one is in memory

    with ExitStack() as hooks, torch.enable_grad():
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(functools.partial(see, name)))
        value = loss()
        for number, parameter in used.values():
            hook = parameter.register_hook(functools.partial(project, number))  # type: ignore[no-untyped-call]
            hooks.enter_context(hook)
        torch.autograd.grad(value, [parameter for _, parameter in used.values()], allow_unused=True)
    return found


def _sketch(gradient: torch.Tensor, seed: int) -> torch.Tensor:
    """Products of a matrix with random vectors from both sides; their mean square is its squared norm."""
    matrix = gradient.reshape(len(gradient), -1) if gradient.dim() > 1 else gradient.reshape(1, -1)
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(SKETCH, matrix.size(0), generator=generator).to(matrix)
    right = torch.randn(matrix.size(1), SKETCH, generator=generator).to(matrix.device)
    return ((left @ matrix).float() @ right).flatten().double().cpu()


class _RankedSizes(TorchFunctionMode):
    """Notes among how many entries each `topk` inside chooses: experts are always as many, tokens are not."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk):
            dim = keywords.get("dim", args[2] if len(args) > 2 else -1)
            self.sizes.add(args[0].size(dim))
        return func(*args, **keywords)


def numbers_in(config: Any) -> frozenset[int]:
    """All whole numbers in a model's config: one of them may be the length from which it computes otherwise."""

    def inside(value: Any) -> Iterator[int]:
        if isinstance(value, dict):
            value = [entry for name, entry in value.items() if not str(name).endswith("_token_id")]
        if isinstance(value, list | tuple):
            for entry in value:
                yield from inside(entry)
        elif isinstance(value, int | float) and math.isfinite(value) and value > 1 and value == int(value):
            yield int(value)

    return frozenset(inside(config.to_dict()))


@contextmanager
def _without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Inside, modules are in evaluation mode: dropout would hide a difference."""
    with ExitStack() as evaluated:
        for module in model.modules():
            # A 4-bit layer of bitsandbytes has no dropout, and on a CPU evaluation rewrites its weights for good.
            if module.training and not hasattr(getattr(module, "weight", None), "quant_state"):
                evaluated.enter_context(attributes(module, training=False))
        yield


@contextmanager
def _same_state(model: torch.nn.Module) -> Iterator[None]:
    """Restore what modules keep between passes: dynamic RoPE remembers the longest."""
    kept = int | float | str | torch.Tensor
    before = [
        (
            module,
            {name: value for name, value in vars(module).items() if isinstance(value, kept)},
            {n: (b, b.clone() if b.numel() <= SMALL else b) for n, b in module.named_buffers(recurse=False)},
        )
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, values, buffers in before:
            for name, value in values.items():
                if vars(module).get(name) is not value:
                    setattr(module, name, value)
            for name, (buffer, value) in buffers.items():
                setattr(module, name, buffer if value is buffer else buffer.copy_(value))


@contextmanager
def _rounded(model: torch.nn.Module, width: int) -> Iterator[None]:
    """Inside, what each innermost module returns is as if rounded once more; angles by what their positions lose."""
    least = torch.finfo(torch.float32).eps  # in which many a module computes whatever the precision
    angle = least * max(1.0, width / 64)  # a product with a position; measured on SmolLM2, most are of slow rotations

    def rough(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            computes_in = getattr(module, "compute_dtype", None)  # of a 4-bit layer
            eps = max(least, torch.finfo(computes_in if isinstance(computes_in, torch.dtype) else output.dtype).eps)
            return output * (1 + eps * torch.randn_like(output))
        if isinstance(output, tuple) and all(isinstance(one, torch.Tensor) for one in output):
            return tuple(one + angle * torch.randn_like(one) if one.is_floating_point() else one for one in output)
        return output

    with ExitStack() as hooks:
        for module in model.modules():
            if not any(module.children()):
                hooks.enter_context(module.register_forward_hook(rough))
        yield

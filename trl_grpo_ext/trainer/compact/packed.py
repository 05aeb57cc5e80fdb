"""Run the rows of a forward pass as one row without padding, each prompt once: the same log-probabilities and gradient.

TRL's method gets the tokens that are scored; hooks on the backbone put in the packed row and its positions.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import extract_model_from_parallel
from torch.nn.functional import scaled_dot_product_attention

from ...errors import UpstreamError
from ..upstream.images import NO_IMAGES, Images
from ..upstream.reading import LossSettings

logger = logging.getLogger(__name__)

Integers = npt.NDArray[np.int64]

Lengths = Integers  # `(rows, 2)`: tokens of each row's prompt and of its completion, without padding
Groups = Integers  # a number for each row, the same for rows that share a prompt
PAIRS = 2**16  # of tokens that padding may take in one block of attention on a CPU, where more blocks then cost less


@dataclass(frozen=True)
class Block:
    """Rows whose attention runs at once; their tokens see those to their left and, before them, all of `before`."""

    places_N_W: torch.Tensor  # of each row's tokens in the packed row; shorter rows repeat the last, which none sees
    before_P: torch.Tensor | None = None  # of the prompt that all rows share
    allowed: torch.Tensor | None = None  # with a prompt, `(W, P + W)`

    def attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        rows, width = self.places_N_W.shape
        places = self.places_N_W.flatten()

        def own(states: torch.Tensor) -> torch.Tensor:  # (N, heads, W, size)
            return states[0].index_select(1, places).view(-1, rows, width, states.size(3)).transpose(0, 1)

        def seen_by_own(states: torch.Tensor) -> torch.Tensor:
            if self.before_P is None:
                return own(states)
            prompt = states.index_select(2, self.before_P).expand(rows, -1, -1, -1)
            return torch.cat([prompt, own(states)], dim=2)

        options |= {"attn_mask": self.allowed, "is_causal": self.allowed is None}
        seen = scaled_dot_product_attention(own(query), seen_by_own(key), seen_by_own(value), **options)
        return seen.transpose(0, 1).flatten(1, 2)


class PackedMask(torch.Tensor):
    """Stands for the attention mask `(1, 1, L, L)` of a packed row, of which it holds no pair."""

    blocks: Sequence[Block]
    back_L: torch.Tensor  # each token's place in the attention of all blocks

    @classmethod
    def of(
        cls, blocks: Sequence[tuple[Sequence[Integers], Integers | None]], length: int, device: torch.device
    ) -> PackedMask:
        """The mask of a packed row, by the places of each block's rows and of the prompt before them."""
        back = np.zeros(length, dtype=np.int64)
        made = []
        first = 0
        for rows, prompt in blocks:
            width = max(map(len, rows))
            for number, places in enumerate(rows):
                back[places] = first + number * width + np.arange(len(places))
            first += len(rows) * width
            padded = np.array([np.pad(places, (0, width - len(places)), "edge") for places in rows])
            places_N_W = torch.from_numpy(padded).to(device)
            if prompt is None:
                made.append(Block(places_N_W))
            else:
                ones = torch.ones(width, len(prompt) + width, dtype=torch.bool, device=device)
                made.append(Block(places_N_W, torch.from_numpy(prompt).to(device), ones.tril(len(prompt))))
        everywhere = torch.ones((), dtype=torch.bool, device=device).expand(1, 1, length, length)
        mask: PackedMask = everywhere.as_subclass(cls)
        mask.blocks = made
        mask.back_L = torch.from_numpy(back).to(device)
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Attention block by block; any other use of the mask is refused, because it would let all tokens meet."""
        if func is scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        if func.__name__ not in {"__get__", "size", "dim", "is_floating_point", "__repr__"}:
            why = f"the model calls {func.__name__} on the mask of packed rows, which only attention may use"
            raise UpstreamError(f"compact_updates: {why}. Set attn_implementation: sdpa, or compact_updates: off.")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _attention(query: Any, key: Any, value: Any, attn_mask: PackedMask, **options: Any) -> torch.Tensor:
    """`scaled_dot_product_attention` of a packed row."""
    seen = torch.cat([block.attention(query, key, value, **options) for block in attn_mask.blocks], dim=1)
    return seen.index_select(1, attn_mask.back_L).unsqueeze(0)


@dataclass(frozen=True)
class PackedRows:
    """The rows of one forward pass as one row of `L` tokens, of which `K` predict a token that is scored."""

    ids_1_L: torch.Tensor  # tokens
    positions_1_L: torch.Tensor  # each token's position in its own row
    mask: PackedMask
    predictors_K: torch.Tensor  # places in the packed row of the tokens that predict
    scored_K: torch.Tensor  # the tokens that they predict
    target_K: torch.Tensor  # where these belong in `(B, T)`
    source_L: torch.Tensor  # where the tokens stood in `(B, P + T)`
    prompted: Sequence[int]  # the rows whose prompts run, in order

    @classmethod
    def of(cls, ids: torch.Tensor, keep: int, lengths: Lengths, groups: Groups) -> PackedRows | None:
        """Pack the rows that have a completion; None if that is less than two tokens. The last of each need not run."""
        width = ids.size(1)
        start = width - keep
        source, positions, predictors, target, causal = (list[Integers]() for _ in range(5))
        blocks = list[tuple[list[Integers], Integers | None]]()
        end = 0
        spare = PAIRS if ids.device.type == "cpu" else math.inf
        for rows in together(lengths, groups):
            prompt = int(lengths[rows[0], 0])
            before = end + np.arange(prompt)
            source.append(rows[0] * width + start - prompt + np.arange(prompt))
            positions.append(np.arange(prompt))
            end += prompt
            own = []
            for row in rows:
                run = np.arange(int(lengths[row, 1]) - 1)
                own.append(end + run)
                source.append(row * width + start + run)
                positions.append(prompt + run)
                predictors.append(np.append(before[-1], own[-1]))
                target.append(row * keep + np.arange(len(run) + 1))
                end += len(run)
            if len(rows) == 1:
                causal.append(np.append(before, own[0]))
            else:
                causal.append(before)
                blocks += [(block, before) for block in _alike([run for run in own if len(run)], prompt, spare)]
        blocks += [(block, None) for block in _alike(causal, 0, spare)]
        if end < 2:  # transformers takes one token for a step of decoding
            return None

        def tensor(numbers: Integers) -> torch.Tensor:
            return torch.from_numpy(numbers).to(ids.device)

        flat = ids.reshape(-1)
        source_L = tensor(np.concatenate(source))
        targets = np.concatenate(target)
        return cls(
            ids_1_L=flat[source_L].unsqueeze(0),
            positions_1_L=tensor(np.concatenate(positions)).unsqueeze(0),
            mask=PackedMask.of(blocks, end, ids.device),
            predictors_K=tensor(np.concatenate(predictors)),
            scored_K=flat[tensor(targets // keep * width + start + targets % keep)],
            target_K=tensor(targets),
            source_L=source_L,
            prompted=[rows[0] for rows in together(lengths, groups)],
        )

    def back(self, values_1_K: torch.Tensor, rows: int, keep: int) -> torch.Tensor:
        """`(B, T)` of `(1, K)`; zero where there is no completion."""
        empty = values_1_K.new_zeros(rows * keep)
        return empty.index_put((self.target_K,), values_1_K.reshape(-1)).view(rows, keep)


def _alike(rows: Sequence[Integers], before: int, spare: float) -> list[list[Integers]]:
    """Rows in blocks of like lengths: those that see `before` more tokens take at most `spare` pairs for padding."""
    blocks = list[list[Integers]]()
    padding = 0
    for row in sorted(rows, key=len, reverse=True):
        width = len(blocks[-1][0]) if blocks else 0
        padding += width * (before + width) - len(row) * (before + len(row))
        if not blocks or padding > spare:
            blocks.append([])
            padding = 0
        blocks[-1].append(row)
    return blocks


def together(lengths: Lengths, groups: Groups) -> list[list[int]]:
    """The rows that have a completion, by group in order of their first."""
    found: dict[int, list[int]] = {}
    for row in np.flatnonzero(lengths[:, 1]).tolist():
        found.setdefault(int(groups[row]), []).append(row)
    return list(found.values())


def reason_against_sharing(model: Any) -> str | None:
    """Why completions that share a prompt would differ from rows of their own; None if they would not."""
    for part, module in model.named_modules():
        for setting, rate in vars(module).items():
            drops = isinstance(module, torch.nn.Dropout) if setting == "p" else "drop" in setting or "jitter" in setting
            if drops and isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0:
                return f"{part} has {setting} {rate:g}, and would draw a prompt's dropout once for all"
    return None


def backbone_of(model: Any) -> torch.nn.Module:
    """The part of a model below its head, which makes the attention mask; also of a wrapped or adapted model."""
    inner: Any = extract_model_from_parallel(model)
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    backbone: torch.nn.Module = getattr(inner, "base_model", inner)
    return backbone


def same_model(one: Any, other: Any) -> bool:
    """Whether two are one model, each wrapped or adapted or not."""
    return one is other or backbone_of(one) is backbone_of(other)


def runs_policy(model: Any, policy: Any) -> bool:
    """Whether what TRL may call as a model is the policy, or runs it: as a part, or inside a function."""
    inner = model.func if isinstance(model, functools.partial) else model
    if not isinstance(inner, torch.nn.Module):
        return True  # as far as can be seen
    backbone = backbone_of(policy)
    return any(module is backbone for module in inner.modules())


def image_token_of(model: Any) -> int | None:
    """The token that stands for a part of an image, if the model sees images."""
    return getattr(model.config, "image_token_id", None)


def in_completions(completion_ids: torch.Tensor, image_token: int | None, images: Images) -> bool:
    """Whether images stand in completions, as tools return them."""
    return bool(images) and image_token is not None and bool((completion_ids == image_token).any())


def window_of(config: Any) -> int | None:
    """Tokens of the sliding window of a model's attention, if any of its layers has one."""
    text = config.get_text_config()
    window: int | None = getattr(text, "sliding_window", None)
    return window if "sliding_attention" in (getattr(text, "layer_types", None) or ["sliding_attention"]) else None


def packing_of(model: Any, loss: LossSettings, *, share: bool, compiled: bool, overridden: bool) -> Packing | None:
    """The `Packing` of a run; None, with the reason logged, if its rows cannot be packed."""
    takes = inspect.signature(type(backbone_of(model)).forward).parameters
    reasons = {
        "the model is compiled (torch_compile)": compiled,
        "top_entropy_quantile cuts at one token's entropy, so a last digit decides which tokens count": (
            loss.top_entropy_quantile < 1.0
        ),
        "the router's auxiliary loss is computed over separate rows": loss.auxiliary_loss,
        "the tokens of an image see each other in both directions (token_type_ids)": (
            image_token_of(model) is not None and "token_type_ids" in takes
        ),
    }
    packing = Packing(share, window_of(model.config))
    if share and not any(reasons.values()) and (why := reason_against_sharing(model)) is not None:
        packing.say_once(why)
        packing.share = False
    # That class may need whole rows; who selects `share_prompts` says that it does not.
    reasons["a class of yours overrides _get_per_token_logps_and_entropies"] = overridden and not packing.share
    for reason, forbids in reasons.items():
        if forbids:
            packing.say_once(reason)
            return None
    return packing


@dataclass
class Packing:
    """Packs the rows of TRL's forward passes; `Trials` finds out whether this is exact."""

    share: bool
    window: int | None = None  # of the model's sliding attention

    def __post_init__(self) -> None:
        self._said: set[str] = set()

    def say_once(self, reason: str) -> None:
        if reason in self._said:
            return
        self._said.add(reason)
        if self.share:
            logger.warning("share_prompts: prompts are not shared: %s.", reason)
        else:
            logger.info("compact_updates: rows keep their padding: %s.", reason)

    def fits(self, lengths: Lengths) -> bool:
        """Whether rows are short enough for the model's sliding window."""
        longest = int(lengths.sum(axis=1).max(initial=0))
        if self.window is not None and longest > self.window:
            self.say_once(f"a row of {longest} tokens is longer than the sliding window of {self.window}")
            return False
        return True

    def measured(
        self, ids: torch.Tensor, mask: torch.Tensor, keep: int, images: Images = NO_IMAGES
    ) -> tuple[Lengths, Groups] | None:
        """Lengths of a pass's rows, and their groups; None if they are not packed."""
        start = ids.size(1) - keep
        lengths_B_2 = torch.stack([mask[:, :start].sum(dim=1), mask[:, start:].sum(dim=1)], dim=1)
        columns = torch.arange(ids.size(1), device=ids.device)
        live = (columns >= start - lengths_B_2[:, :1]) & (columns < start + lengths_B_2[:, 1:])
        tidy = (live == (mask != 0)).all() & (lengths_B_2[:, 0] > 0).all()
        groups_B_1 = self.groups(ids[:, :start], mask[:, :start], images)
        table = torch.cat([lengths_B_2, groups_B_1, tidy.expand(len(ids), 1)], dim=1).cpu().numpy()
        if not table[:, 3].all():
            self.say_once("a prompt is empty, or a row has padding inside")
            return None
        return (table[:, :2], table[:, 2]) if self.fits(table[:, :2]) else None

    def groups(self, prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, images: Images = NO_IMAGES) -> torch.Tensor:
        """`(B, 1)`, a number for each row; rows of the same prompt and images have the same if prompts are shared."""
        if not self.share:
            return torch.arange(len(prompt_ids), device=prompt_ids.device).unsqueeze(1)
        without_padding = torch.where(prompt_mask != 0, prompt_ids, -1)
        groups_B: torch.Tensor = torch.unique(without_padding, dim=0, return_inverse=True)[1]
        if images:
            texts = groups_B.tolist()
            for row, text in enumerate(texts):  # the first row with the same text and images
                groups_B[row] = next(one for one in range(row + 1) if texts[one] == text and images.same(one, row))
        return groups_B.unsqueeze(1)

    def pack(self, ids: torch.Tensor, mask: torch.Tensor, keep: int, images: Images = NO_IMAGES) -> PackedRows | None:
        found = self.measured(ids, mask, keep, images)
        return None if found is None else PackedRows.of(ids, keep, *found)

    def logps(self, method: Callable[..., Any], given: dict[str, Any], packed: PackedRows) -> Any:
        backbone: Any = backbone_of(given["model"])
        ran = 0
        predictors = torch.cat([packed.predictors_K, packed.predictors_K[-1:]])  # TRL's head drops the last one
        scored = torch.cat([packed.scored_K[:1], packed.scored_K]).unsqueeze(0)
        row = {"input_ids": packed.ids_1_L, "attention_mask": packed.mask, "position_ids": packed.positions_1_L}
        if images := Images.of(given):
            row |= images.packed(packed.prompted, packed.source_L)
            if "image_grid_thw" in given and hasattr(backbone, "get_rope_index"):  # positions by the place in an image
                takes = inspect.signature(backbone.get_rope_index).parameters
                positions_3_B_W = backbone.get_rope_index(**{name: given[name] for name in given if name in takes})[0]
                row["position_ids"] = positions_3_B_W.flatten(1)[:, packed.source_L].unsqueeze(1)

        def put(module: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
            return arguments, {**keywords, **row}

        def pick(module: Any, arguments: Any, output: Any) -> Any:
            nonlocal ran
            ran += 1
            output.last_hidden_state = output.last_hidden_state.index_select(1, predictors)
            return output

        asked = (scored, torch.ones_like(scored), len(packed.scored_K))
        with backbone.register_forward_pre_hook(put, with_kwargs=True), backbone.register_forward_hook(pick):
            output = method(given["model"], *asked, compute_entropy=given.get("compute_entropy", False))
        if ran != 1:
            what = f"{type(backbone).__name__} ran {ran} times in one pass of TRL's, not once"
            raise UpstreamError(f"compact_updates: {what}. Set compact_updates: off.")
        shape = len(given["input_ids"]), given["logits_to_keep"]
        return *(None if values is None else packed.back(values, *shape) for values in output[:2]), None

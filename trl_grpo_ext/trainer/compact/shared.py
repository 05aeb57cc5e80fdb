"""Compute each prompt once: its completions share it in a forward pass, with the same log-probabilities and gradient.

A row of the shared layout is `[prompt without its last token][last token, c1][last token, c2]...`, with positions that
restart after the prompt and a mask by which each segment sees the prompt and itself. The last prompt token stands in
front of each completion because the token that predicts it must be its left neighbour: TRL's head shifts labels by one.
TRL's own method is called on these rows; a hook on the model's backbone replaces the mask and positions that the method
passes on, and the results go back to their places in the original rows. Later code sees `(B, T)` as usual.

Sharing saves computing the prompt again. It costs attention over a longer row, and a mask of all pairs of its tokens.
`Price` is the cost in time, measured on the machine, and in memory, from the model's sizes: no pass may need more than
TRL's largest micro-batch. `shared_rows` chooses what to share: nothing, whole groups, or parts of groups.
"""

from __future__ import annotations

import bisect
import inspect
import itertools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import extract_model_from_parallel
from torch.nn.attention.flex_attention import create_block_mask

from ...errors import UpstreamError
from ..facts import LossSettings

logger = logging.getLogger(__name__)

Lengths = npt.NDArray[np.int64]
"""`(rows, 2)`: tokens of each row's prompt and of its completion, without padding."""

Groups = npt.NDArray[np.int64]
"""A number for each row, the same for rows of the same prompt."""

GAIN = 0.95
"""Most that a shared layout may cost, as a share of separate rows; above it the price is too uncertain."""

ATTENTION = ("sdpa", "eager", "flex_attention")
"""Implementations that take a custom mask."""

MEASURING = 10.0
"""Seconds for trying out made-up rows, roughly, unless one round takes longer."""

LADDER = sorted({round(2 ** (step / 6)) for step in range(186)})
"""Sizes of shared rows to compare, each an eighth larger than the one before."""


# --------------------------------------------------------------------------------------------- what a layout costs


@dataclass(frozen=True)
class Price:
    """What a forward pass costs: in time, `overhead + rows * width * (1 + area * width)`, and in memory."""

    overhead: float = 0.0  # of every pass, in tokens
    area: float = 0.0  # of a pair of tokens in masked attention
    causal_area: float = 0.0  # the same without a mask, in rows that have no padding
    pair_memory: float = 0.0  # memory of a pair of tokens in a masked row, as a share of what a token needs

    def masked(self, rows: Any, width: Any) -> Any:
        """Time of rows with a mask."""
        return self.overhead + rows * width * (1.0 + self.area * width)

    def causal(self, rows: Any, width: Any) -> Any:
        """Time of rows without padding."""
        return self.overhead + rows * width * (1.0 + self.causal_area * width)

    def memory(self, rows: Any, width: Any) -> Any:
        """Memory of rows with a mask, in tokens of separate rows."""
        return rows * width * (1.0 + self.pair_memory * width)


def sizes_of(lengths: Lengths, groups: Groups) -> list[int]:
    """Candidate sizes of shared rows: from about the longest row to the longest whole group.

    They come from `LADDER`, so that a part has the same choices in every block.
    """
    live = lengths[:, 1] > 0
    longest, whole = int(lengths[live].sum(axis=1).max(initial=1)), 1
    for group in np.unique(groups[live]):
        members = lengths[live & (groups == group)]
        whole = max(whole, int(members[:, 0].max() - 1 + (members[:, 1] + 1).sum()))
    return LADDER[bisect.bisect_right(LADDER, longest) - 1 : bisect.bisect_left(LADDER, whole) + 1]


def fill_rows(
    lengths: Lengths, groups: Groups, size: int, order: npt.NDArray[np.int64] | None = None
) -> list[list[int]]:
    """Fill rows of a shared layout with the rows of each group in turn, as many as fit into `size` tokens.

    A longer row is alone. Rows without a completion are left out; nothing is computed for them. `order` is grouped,
    longest first, by default; a row of another group begins a new shared row.
    """
    if order is None:
        order = np.lexsort((-lengths[:, 1], groups))
    filled: list[list[int]] = []
    held, group = 0, None
    for row in order[lengths[order, 1] > 0].tolist():
        tokens = int(lengths[row, 1]) + 1
        if groups[row] != group or held + tokens > size:
            filled.append([])
            held, group = int(lengths[row, 0]) - 1, groups[row]
        filled[-1].append(row)
        held += tokens
    return filled


def width_of(lengths: Lengths, filled: Sequence[Sequence[int]]) -> int:
    """Tokens of the longest of some rows of a shared layout."""
    return max(int(lengths[rows[0], 0] - 1 + (lengths[rows, 1] + 1).sum()) for rows in filled)


def shared_rows(
    lengths: Lengths, groups: Groups, price: Price, max_tokens: int | None = None, placeholders: int = 0
) -> list[list[int]] | None:
    """The cheapest shared layout of the rows of one pass, as the rows that each of its rows holds; None if none is."""
    rows, width = len(lengths) + placeholders, int(np.maximum(lengths, 1).max(axis=0).sum())
    separate = rows * width
    limit = separate if max_tokens is None else max_tokens
    alike = not placeholders and bool((lengths == lengths[:1]).all())
    cost = (price.causal if alike else price.masked)(rows, width) * GAIN if separate <= limit else np.inf
    best: list[list[int]] | None = None
    fewest: tuple[float, list[list[int]]] | None = None
    for size, order in itertools.product(sizes_of(lengths, groups), (None, np.arange(len(lengths)))):
        filled = fill_rows(lengths, groups, size, order)
        if not filled:
            return None
        wide = width_of(lengths, filled)
        memory, here = float(price.memory(len(filled), wide)), price.masked(len(filled), wide)
        if fewest is None or memory < fewest[0]:
            fewest = memory, filled
        if memory <= limit and here < cost:
            best, cost = filled, here
    if best is None and cost == np.inf and fewest is not None and fewest[0] < separate:
        return fewest[1]  # nothing is within the limit; this is closest
    return best


# ------------------------------------------------------------------------------------------------------ the layout


@dataclass(frozen=True)
class SharedLayout:
    """Rows of one forward pass in the shared layout: `R` rows of `L` tokens."""

    ids_R_L: torch.Tensor  # tokens
    scored_R_L: torch.Tensor  # 1 at the completions' tokens, which are scored
    positions_R_L: torch.Tensor  # each token's position in its own row
    segments_R_L: torch.Tensor  # 0 in the prompt, from 1 in each of its completions, -1 in padding
    source: torch.Tensor  # where the completions' tokens are in `(R, L - 1)`, the log-probabilities of all but one
    target: torch.Tensor  # where they belong in `(B, T)`

    @classmethod
    def of(cls, ids: torch.Tensor, keep: int, lengths: Lengths, filled: Sequence[Sequence[int]]) -> SharedLayout:
        """Lay rows out."""
        start, width = ids.size(1) - keep, width_of(lengths, filled)
        place = np.zeros((len(filled), width), dtype=np.int64)  # in the flattened ids
        positions, segments = np.zeros_like(place), np.full_like(place, -1)
        source: list[npt.NDArray[np.int64]] = []
        target: list[npt.NDArray[np.int64]] = []
        for number, rows in enumerate(filled):
            prompt = int(lengths[rows[0], 0]) - 1
            place[number, :prompt] = rows[0] * ids.size(1) + start - 1 - prompt + np.arange(prompt)
            positions[number, :prompt], segments[number, :prompt] = np.arange(prompt), 0
            end = prompt
            for segment, row in enumerate(rows, start=1):
                count = int(lengths[row, 1])
                here = slice(end, end + count + 1)
                place[number, here] = row * ids.size(1) + start - 1 + np.arange(count + 1)
                positions[number, here], segments[number, here] = prompt + np.arange(count + 1), segment
                source.append(number * (width - 1) + end + np.arange(count))
                target.append(row * keep + np.arange(count))
                end += count + 1
        device = ids.device
        scored = np.zeros((len(filled), width), dtype=bool)
        flat = np.concatenate(source)
        scored[flat // (width - 1), flat % (width - 1) + 1] = True
        return cls(
            ids_R_L=ids.reshape(-1)[torch.from_numpy(place).to(device)],
            scored_R_L=torch.from_numpy(scored).to(device).long(),
            positions_R_L=torch.from_numpy(positions).to(device),
            segments_R_L=torch.from_numpy(segments).to(device),
            source=torch.from_numpy(flat).to(device),
            target=torch.from_numpy(np.concatenate(target)).to(device),
        )

    def allowed(self) -> torch.Tensor:
        """Which tokens (last axis) a token sees, `(R, L, L)`, made in place: it is the largest part of a pass."""
        query, key = self.segments_R_L.unsqueeze(2), self.segments_R_L.unsqueeze(1)
        width, device = query.size(1), query.device
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        return (query == key).logical_or_(key == 0).logical_and_(causal)

    def mask(self, attention: str, dtype: torch.dtype) -> Any:
        """As an attention implementation takes it: `(R, 1, L, L)`, boolean or what is added to scores, or in blocks."""
        allowed = self.allowed()
        if attention == "flex_attention":
            (rows, width, _), device = allowed.shape, allowed.device
            return create_block_mask(
                lambda row, head, query, key: allowed[row, query, key], rows, None, width, width, device
            )
        allowed = allowed.unsqueeze(1)
        if attention == "sdpa":
            return allowed
        scores = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return scores.masked_fill(~allowed, torch.finfo(dtype).min)

    def back(self, values_R_K: torch.Tensor, rows: int, keep: int) -> torch.Tensor:
        """`(B, T)` of `(R, L - 1)`; zero where there is no completion."""
        empty = values_R_K.new_zeros(rows * keep)
        return empty.index_put((self.target,), values_R_K.reshape(-1)[self.source]).view(rows, keep)


# ---------------------------------------------------------------------------------------------------- what refuses


def reason_against(model: Any) -> str | None:
    """Why prompts cannot be shared in the forward passes of a policy, adapted or not; None if they can."""
    for adapter in getattr(model, "peft_config", {}).values():
        if getattr(adapter, "is_prompt_learning", False):
            return f"{adapter.peft_type.value} prepends tokens of its own to each row"
    base = _without_adapter(model)
    name = type(base).__name__
    if "position_ids" not in inspect.signature(type(backbone_of(model)).forward).parameters:
        return f"{name} takes no position_ids"
    if not hasattr(sys.modules[type(base).__module__], "create_causal_mask"):
        return f"{name} makes its attention mask in its own way, so a mask of four dimensions may not be taken"
    if getattr(base.config, "alibi", False):
        return f"{name} takes its positions from a mask of two dimensions (alibi)"
    attention = attention_of(model)
    if attention not in ATTENTION:
        return f"attention {attention!r} takes no mask of four dimensions; {', '.join(ATTENTION)} do"
    for part, module in model.named_modules():
        for setting, rate in vars(module).items():
            drops = isinstance(module, torch.nn.Dropout) if setting == "p" else "drop" in setting or "jitter" in setting
            if drops and isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0:
                return (
                    f"{part} has {setting} {rate:g}, and would draw the prompt's dropout once for all its completions"
                )
    return None


def attention_of(model: Any) -> str:
    """Name of a model's attention implementation."""
    return str(_without_adapter(model).config.get_text_config()._attn_implementation)


def backbone_of(model: Any) -> torch.nn.Module:
    """The part of a model below its head, which makes the attention mask; also of a wrapped or adapted model."""
    backbone: torch.nn.Module = _without_adapter(extract_model_from_parallel(model)).base_model
    return backbone


def _without_adapter(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def window_of(config: Any) -> int | None:
    """Tokens of the sliding window of a model's attention, if any of its layers has one."""
    text = config.get_text_config()
    layers = getattr(text, "layer_types", None)
    if layers is not None and "sliding_attention" not in layers:
        return None
    window = getattr(text, "sliding_window", None)
    return None if window is None else int(window)


# ---------------------------------------------------------------------------------------------------- at the passes


def shared_prompts(
    model: Any,
    loss: LossSettings,
    relative: bool,
    compiled: bool,
    ranks: int,
    gather: Callable[[torch.Tensor], torch.Tensor],
    budget: int | None,
) -> SharedPrompts | None:
    """The `SharedPrompts` of a run; None, with the reason logged, if prompts cannot be shared."""
    reason = reason_against(model)
    if not relative:
        reason = "the model's positions are absolute or depend on the length, or some of its layers are recurrent"
    if loss.auxiliary_loss:
        reason = "the router's auxiliary loss is computed over separate rows"
    if loss.top_entropy_quantile < 1.0:
        reason = "top_entropy_quantile cuts at one token's entropy, so a last digit decides which tokens count"
    if compiled:
        reason = "the model is compiled (torch_compile)"
    if reason is not None:
        logger.warning("share_prompts: prompts are not shared: %s.", reason)
        return None

    def agree(numbers: Sequence[float]) -> list[float]:
        device = next(model.parameters()).device
        everyone = gather(torch.tensor([numbers], dtype=torch.float32, device=device)).view(ranks, -1)
        return [float(number) for number in everyone.double().mean(dim=0)]

    return SharedPrompts(attention_of(model), window_of(model.config), agree, budget, pair_memory_of(model))


def pair_memory_of(model: Any) -> float:
    """Memory of a pair of tokens in a shared row, as a share of the least that a token's activations need.

    A pair has a place in the mask, which attention turns into numbers; eager attention keeps scores of every head. A
    token keeps its hidden state at every layer; eight stand for what a layer holds while it runs.
    """
    config, attention = _without_adapter(model).config.get_text_config(), attention_of(model)
    size, layers = next(model.parameters()).element_size(), min(int(config.num_hidden_layers), 8)
    pair: float = 1 + size
    if attention == "eager":
        pair += layers * int(config.num_attention_heads) * (size + 4)
    return float(pair / (size * layers * int(config.hidden_size)))


class SharedPrompts:
    """Shares prompts in TRL's forward passes, after measuring that this is exact and what it costs."""

    def __init__(
        self,
        attention: str,
        window: int | None,
        agree: Callable[[Sequence[float]], list[float]],
        budget: int | None,
        pair_memory: float = 0.0,
    ) -> None:
        self._attention, self._window, self._agree, self._pair_memory = attention, window, agree, pair_memory
        self.budget = budget
        self.price: Price | None = None
        self._measured = False
        self._said: set[str] = set()

    def warn_once(self, reason: str) -> None:
        """Warn once that prompts are not shared, and why."""
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("share_prompts: prompts are not shared: %s.", reason)

    def fits(self, lengths: Lengths) -> bool:
        """Whether rows are short enough for the model's sliding window."""
        longest = int(lengths.sum(axis=1).max(initial=0))
        if self._window is not None and longest > self._window:
            self.warn_once(f"a row of {longest} tokens is longer than the sliding window of {self._window}")
            return False
        return True

    def usable(self, ids: torch.Tensor, mask: torch.Tensor, keep: int) -> tuple[Lengths, Groups] | None:
        """The rows of a pass as `lengths_and_groups`; None if prompts are not shared in it."""
        if self.price is None or ids.size(0) < 2:
            return None
        found = lengths_and_groups(ids, mask, keep)
        if found is None:
            self.warn_once("a prompt is empty, or a row has padding inside")
            return None
        return found if self.fits(found[0]) else None

    def layout(
        self, ids: torch.Tensor, mask: torch.Tensor, keep: int, max_tokens: int | None = None
    ) -> SharedLayout | None:
        """The shared layout of the rows of one pass; None if they run as they are."""
        found = self.usable(ids, mask, keep)
        if found is None or self.price is None:
            return None
        filled = shared_rows(*found, self.price, max_tokens)
        return None if filled is None else SharedLayout.of(ids, keep, found[0], filled)

    def logps(self, method: Callable[..., Any], given: dict[str, Any], layout: SharedLayout) -> Any:
        """The result of TRL's method for `given`, its arguments by name, with each prompt computed once per row."""
        backbone = backbone_of(given["model"])
        mask = layout.mask(self._attention, next(backbone.parameters()).dtype)
        ran = 0

        def put(module: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
            nonlocal ran
            ran += 1
            return arguments, {**keywords, "attention_mask": mask, "position_ids": layout.positions_R_L}

        entropies = given.get("compute_entropy", False)
        handle = backbone.register_forward_pre_hook(put, with_kwargs=True)
        try:
            keep = layout.ids_R_L.size(1) - 1
            output = method(given["model"], layout.ids_R_L, layout.scored_R_L, keep, compute_entropy=entropies)
        finally:
            handle.remove()
        if ran != 1:
            raise UpstreamError(
                f"share_prompts: {type(backbone).__name__} ran {ran} times in one pass of TRL's, not once, so the "
                f"mask of shared prompts did not apply. Remove share_prompts."
            )
        rows, keep = given["input_ids"].size(0), given["logits_to_keep"]
        return tuple(None if values is None else layout.back(values, rows, keep) for values in (*output[:2], None))

    # ------------------------------------------------------------------ once

    def measure(self, method: Callable[..., Any], model: Any, width: int, tokens: int) -> None:
        """Try sharing on made-up rows, once: check the log-probabilities, and measure what passes cost.

        All ranks call it and reach the same result. The costs are those of forward passes without a gradient; a
        backward costs in proportion.
        """
        if self._measured:
            return
        self._measured = True
        width, tokens = map(int, self._agree([width, tokens]))  # ranks may have rows of other lengths
        width = max(64, width)
        while width > 64 and Price(pair_memory=self._pair_memory).memory(1, 4 * width) > tokens:
            width = max(64, width - width // 8)
        if self._window is not None:
            width = min(width, self._window)
        device, prompt = next(model.parameters()).device, width // 2
        vocabulary = model.get_input_embeddings().num_embeddings if hasattr(model, "get_input_embeddings") else 16
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocabulary, (4, width), generator=generator).to(device)
        ids[:, :prompt] = ids[0, :prompt]
        keep = width - prompt
        lengths = np.tile(np.array([[prompt, keep]]), (4, 1))
        rows = {"model": model, "input_ids": ids, "attention_mask": torch.ones_like(ids), "logits_to_keep": keep}
        padded = {**rows, "input_ids": torch.cat([ids[:, :3], ids], dim=1)}
        padded["attention_mask"] = torch.cat([torch.zeros_like(ids[:, :3]), torch.ones_like(ids)], dim=1)
        together, alone, long = (
            SharedLayout.of(ids, keep, lengths, filled) for filled in ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 1]])
        )

        def separate(given: dict[str, Any]) -> torch.Tensor:
            names = ("model", "input_ids", "attention_mask", "logits_to_keep")
            logps: torch.Tensor = method(*(given[name] for name in names))[0]
            return logps

        with torch.no_grad():
            expected = separate(rows)
            noise = float((separate(padded) - expected).abs().max())
            gap = float((self.logps(method, rows, together)[0] - expected).abs().max())
            flat = {**rows, "input_ids": ids.reshape(1, -1), "attention_mask": torch.ones_like(ids).reshape(1, -1)}
            calls = (
                lambda: self.logps(method, rows, long),
                lambda: self.logps(method, rows, alone),
                lambda: self.logps(method, rows, together),
                lambda: separate(rows),
                lambda: separate(flat),
            )
            seconds = _seconds(device, calls, self._agree)
        noise, gap, *seconds = self._agree([noise, gap, *seconds])
        floor = 1e-9 if expected.dtype == torch.float64 else 1e-4
        if not gap <= max(floor, 20 * noise):
            self.warn_once(
                f"on made-up rows the log-probabilities differ by {gap:.2g}, where padding alone changes them by "
                f"{noise:.2g}"
            )
            return
        masked = [(layout.ids_R_L.size(0), layout.ids_R_L.size(1)) for layout in (long, alone, together)]
        price = price_of(masked, seconds[:3], [(4, width), (1, 4 * width)], seconds[3:])
        self.price = replace(price, pair_memory=self._pair_memory)
        logger.info(
            "share_prompts: a pass costs as much as %.0f tokens more, attention between two tokens %.2g of a token.",
            self.price.overhead,
            self.price.area,
        )


def price_of(
    masked: Sequence[tuple[int, int]],
    masked_seconds: Sequence[float],
    causal: Sequence[tuple[int, int]],
    causal_seconds: Sequence[float],
) -> Price:
    """Fit the price to the seconds of passes of some shapes `(rows, width)`; no number is negative."""
    shapes = [*((r, w, 1) for r, w in masked), *((r, w, 0) for r, w in causal)]
    seconds = np.array([*masked_seconds, *causal_seconds])
    terms = np.array([[1.0, r * w, r * w * w * m, r * w * w * (1 - m)] for r, w, m in shapes])
    scale = terms.max(axis=0)
    terms = terms / scale / seconds[:, None]  # so that errors are relative
    best, least = np.zeros(4), np.inf
    for used in itertools.product([False, True], repeat=4):  # least squares, with some numbers 0 and none below
        found = np.zeros(4)
        found[list(used)] = np.linalg.lstsq(terms[:, list(used)], np.ones(len(seconds)), rcond=None)[0]
        error = float(np.square(terms @ found - 1.0).sum())
        if found.min() >= 0 and error < least:
            best, least = found, error
    start, token, area, causal_area = best / scale
    token = max(token, 1e-3 * seconds.max() / max(r * w for r, w, _ in shapes))
    return Price(float(start / token), float(area / token), float(min(area, causal_area) / token))


def _seconds(
    device: torch.device, calls: Sequence[Callable[[], Any]], agree: Callable[[Sequence[float]], list[float]]
) -> list[float]:
    """The least seconds of each call over some rounds; CPU seconds with one thread.

    One round warms up. Then as many follow as fit into `MEASURING` seconds, up to five, the same number on each rank,
    since sharded models need all ranks.
    """
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter

    def turn() -> list[float]:
        found = []
        for call in calls:
            started = clock()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.append(max(clock() - started, 1e-7))
        return found

    warm = agree(turn())
    turns = max(1, min(5, int(MEASURING / sum(warm))))
    return [min(found) for found in zip(*(turn() for _ in range(turns)), strict=True)]


def lengths_and_groups(ids: torch.Tensor, mask: torch.Tensor, keep: int) -> tuple[Lengths, Groups] | None:
    """Lengths of a pass's rows, and their `prompt_groups`; None if a prompt is empty or a row has padding inside."""
    start = ids.size(1) - keep
    prompts, completions = mask[:, :start], mask[:, start:]
    lengths_B_2 = torch.stack([prompts.sum(dim=1), completions.sum(dim=1)], dim=1)
    columns = torch.arange(ids.size(1), device=ids.device)
    first, last = start - lengths_B_2[:, :1], start + lengths_B_2[:, 1:]
    tidy = ((columns >= first) & (columns < last)) == (mask != 0)
    if not bool(tidy.all()) or int(lengths_B_2[:, 0].min()) < 1:
        return None
    return lengths_B_2.cpu().numpy(), prompt_groups(ids[:, :start], prompts).cpu().numpy()


def prompt_groups(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor) -> torch.Tensor:
    """`(B,)`, a number for each row, the same for rows of the same prompt."""
    without_padding = torch.where(prompt_mask != 0, prompt_ids, -1)
    groups_B: torch.Tensor = torch.unique(without_padding, dim=0, return_inverse=True)[1]
    return groups_B

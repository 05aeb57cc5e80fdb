"""Tiny vision-language models made from their configs, with processors made in code, and drawings to look at."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests import support
from tests.support import NAMED, SIZES

CHARACTERS = f"{support.CHARACTERS}?:\n"

TEMPLATE = """{%- for message in messages -%}
{{ message['role'] + ':' }}
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}IMAGE{%- else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '#' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'a:' }}{%- endif -%}"""

TEXT = SIZES | {"max_position_embeddings": 256}
SIGHT: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "patch_size": 4, "initializer_range": 0.2}
VISION = SIGHT | {"num_hidden_layers": 2, "num_attention_heads": 2}


def tokenizer_with(*image_tokens: str, **named: str) -> PreTrainedTokenizerFast:
    """One token for each character, and these."""
    special = ["<pad>", "<eos>", "<unk>", *image_tokens]
    vocabulary = {token: number for number, token in enumerate([*special, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **NAMED, extra_special_tokens=named)


def llava() -> tuple[Any, Any, Any]:
    """One image is nine tokens; `pixel_values` has a row for each image."""
    tokenizer = tokenizer_with("<image>", image_token="<image>")
    images = CLIPImageProcessorPil(size={"shortest_edge": 12}, crop_size={"height": 12, "width": 12})
    features = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = LlavaProcessor(images, tokenizer, **features, chat_template=TEMPLATE.replace("IMAGE", "<image>"))
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **VISION, "image_size": 12, "projection_dim": 16},
        text_config={"model_type": "llama", "vocab_size": len(tokenizer), **TEXT},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
    )
    return LlavaForConditionalGeneration, config, processor


class ImagesOnly(Qwen2_5_VLProcessor):  # type: ignore[misc]
    """Without videos, whose processor needs torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
        self.image_token = "<|image_pad|>"
        self.video_token = "<|video_pad|>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids([self.image_token, self.video_token])
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def qwen2_5_vl() -> tuple[Any, Any, Any]:
    """Images are of any size; `pixel_values` has a row for each patch, positions have three dimensions."""
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    tokenizer = tokenizer_with(*names)
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024})
    template = TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(names)), strict=True))
    windows = {"out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = Qwen2_5_VLConfig(
        vision_config={**SIGHT, "depth": 2, "num_heads": 2, **windows},
        text_config={"vocab_size": len(tokenizer), **TEXT, "rope_parameters": rope},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        pad_token_id=0,
    )
    return Qwen2_5_VLForConditionalGeneration, config, ImagesOnly(images, tokenizer, chat_template=template)


def idefics3() -> tuple[Any, Any, Any]:
    """An image is four tokens between others; `pixel_values` has a row for each completion, padded."""
    tokenizer = tokenizer_with("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    size = {"longest_edge": 16}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    template = TEMPLATE.replace("IMAGE", "<image>")
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
    config = Idefics3Config(
        vision_config={**VISION, "image_size": 16},
        text_config={"model_type": "llama", "vocab_size": len(processor.tokenizer), **TEXT},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    return Idefics3ForConditionalGeneration, config, processor


def gemma3() -> tuple[Any, Any, Any]:
    """The tokens of an image see each other in both directions, by `token_type_ids`."""
    names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = tokenizer_with(*names.values(), **names)
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    template = TEMPLATE.replace("IMAGE", "<start_of_image>")
    processor = Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=template)
    config = Gemma3Config(
        vision_config={**VISION, "image_size": 16, "vision_use_head": False},
        text_config={"vocab_size": len(tokenizer), **TEXT, "sliding_window": 256, "initializer_range": 0.1},
        image_token_id=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        mm_tokens_per_image=4,
        pad_token_id=0,
    )
    return Gemma3ForConditionalGeneration, config, processor


MAKERS = {"llava": llava, "qwen2_5_vl": qwen2_5_vl, "idefics3": idefics3, "gemma3": gemma3}


def save_vision_model(name: str, folder: Path) -> tuple[Path, Any]:
    """Save a model where `from_pretrained` finds it; also its processor."""
    architecture, config, processor = MAKERS[name]()
    torch.manual_seed(0)
    architecture(config).save_pretrained(folder)
    return folder, processor


def drawing(seed: int, width: int = 16, height: int = 16) -> Image.Image:
    """Blocks of random colours."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 255, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def pictures(count: int = 4, several: bool = False, same_text: bool = False) -> Dataset:
    """Prompts of different lengths about drawings of different sizes; with `several`, one to three to a prompt."""
    rows = []
    for number in range(count):
        text = "what colour? "[: 4 + 3 * (number % 4)] + f"{number}"
        drawn = [drawing(10 * number + more, 16 + 8 * (number % 2), 16) for more in range(1 + number % 3)]
        prompt = [{"role": "user", "content": "what? " if same_text else text}]
        images: dict[str, Any] = {"images": drawn} if several else {"image": drawn[0]}
        rows.append({"prompt": prompt, "answer": number, **images})
    return Dataset.from_list(rows)

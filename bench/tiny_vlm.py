"""Writes a tiny vision-language model of Qwen2-VL's architecture, with random weights, to a folder.

Small enough for a processor, and whole: model, tokenizer, image processor and chat template, as
`transformers serve` and Transformers in Python load them. Its answers mean nothing; they are the same
each time, and another image has another answer.

Usage: python bench/tiny_vlm.py FOLDER
"""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
           "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    folder = sys.argv[1]
    torch.manual_seed(7)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    )
    fast.add_special_tokens({"additional_special_tokens": SPECIAL})
    number = {token: fast.convert_tokens_to_ids(token) for token in SPECIAL}

    config = Qwen2VLConfig(
        text_config=dict(
            vocab_size=len(fast), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            bos_token_id=None, eos_token_id=number["<|im_end|>"], pad_token_id=number["<|endoftext|>"],
        ),
        vision_config=dict(depth=2, embed_dim=64, hidden_size=64, num_heads=4, mlp_ratio=2),
        image_token_id=number["<|image_pad|>"], video_token_id=number["<|video_pad|>"],
        vision_start_token_id=number["<|vision_start|>"], vision_end_token_id=number["<|vision_end|>"],
    )
    model = Qwen2VLForConditionalGeneration(config).eval()
    # Weights that are larger than usual, so that what is seen changes what is said.
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4.0)
        # Only letters are said, so that every answer is a text.
        for name, token in vocabulary.items():
            if not (len(name) == 1 and name.isascii() and name.isalpha()):
                model.lm_head.weight[token].zero_()
        for token in number.values():
            model.lm_head.weight[token].zero_()
    model.generation_config.eos_token_id = number["<|im_end|>"]
    model.generation_config.pad_token_id = number["<|endoftext|>"]
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    size = {"shortest_edge": 3136, "longest_edge": 12845056}
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size),
        video_processor=Qwen2VLVideoProcessor(),
        tokenizer=fast, chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)


if __name__ == "__main__":
    main()

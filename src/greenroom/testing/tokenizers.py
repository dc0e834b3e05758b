"""Tokenizers built in code: no download, a few hundred tokens, real classes that save and reload."""

from __future__ import annotations

import string

from transformers import CLIPTokenizer, Qwen2Tokenizer, T5Tokenizer

CHAT_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

# Accepts plain text and lists of typed parts as content, the two forms that pipelines use.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_alphabet() -> list[str]:
    """The 256 printable stand-ins for bytes that byte-level tokenizers share, in byte order.

    Printable Latin-1 characters stand for themselves, all others for the characters from U+0100 on, as in the
    GPT-2 tokenizer.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def chat_tokenizer() -> Qwen2Tokenizer:
    """A byte-level tokenizer of one token a byte, with chat markers and a chat template."""
    vocab = {token: index for index, token in enumerate([*_byte_alphabet(), *CHAT_TOKENS])}
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        extra_special_tokens=list(CHAT_TOKENS[1:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=8192,
    )


def clip_tokenizer(pad_token: str = "<|endoftext|>") -> CLIPTokenizer:
    """A CLIP tokenizer of one token a byte; as in CLIP's own, end-of-text has the largest id."""
    alphabet = _byte_alphabet()
    tokens = [*alphabet, *(letter + "</w>" for letter in alphabet), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[], pad_token=pad_token, model_max_length=77)


def t5_tokenizer() -> T5Tokenizer:
    """A T5 unigram tokenizer of one token an ASCII character."""
    letters = string.ascii_letters + string.digits + string.punctuation
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return T5Tokenizer(vocab=pieces + [(letter, -3.0) for letter in letters], extra_ids=0, model_max_length=512)

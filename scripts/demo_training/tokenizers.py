"""The two tokenizers of a FluxPipeline, small, and deaf to case: stock CLIPTokenizer and T5Tokenizer."""

from __future__ import annotations

import itertools
import struct
import unicodedata
from collections import Counter

from tokenizers import pre_tokenizers
from transformers import CLIPTokenizer, T5Tokenizer

from demo_training.prompts import DIGIT_NAMES, SEEN_WORDS, VOCABULARY

CLIP_LENGTH = 64  # tokens; the pipeline pads every prompt to it
CLIP_VOCABULARY = 1400
MARKS = ".,:;!?'\"()-¿¡"
START, END = "<|startoftext|>", "<|endoftext|>"


def clip_tokenizer() -> CLIPTokenizer:
    """Byte-pair merges learnt from the vocabulary; the end-of-text token has the largest id, as CLIP's has."""
    weights = {word: 200 if word in DIGIT_NAMES else 20 if word in SEEN_WORDS else 2 for word in VOCABULARY}
    # Every byte, and every byte that ends a word, has an entry of its own: the unknown token is the end token.
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [f"{byte}</w>" for byte in pieces]
    merges = _merges(weights, CLIP_VOCABULARY - len(pieces) - 2)
    pieces += dict.fromkeys("".join(pair) for pair in merges)
    vocab = {piece: index for index, piece in enumerate([*pieces, START, END])}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=CLIP_LENGTH)


def _merges(weights: dict[str, int], count: int) -> list[tuple[str, str]]:
    """Byte-pair encoding (Sennrich et al. 2016): joins the most frequent pair, again and again.

    The trainer of the tokenizers library is not used: it breaks ties by the order of a hash table, another one in
    every process, and the training would not be repeatable.
    """
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled: dict[str, list[str]] = {}
    for word in weights:
        letters = list(split.pre_tokenize_str(word)[0][0])
        spelled[word] = [*letters[:-1], f"{letters[-1]}</w>"]
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in spelled.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += weights[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for word, parts in spelled.items():
            if len(parts) > 1:
                spelled[word] = _joined(parts, best)
    return merges


def _joined(parts: list[str], pair: tuple[str, str]) -> list[str]:
    joined: list[str] = []
    for part in parts:
        if joined and (joined[-1], part) == pair:
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def t5_tokenizer() -> T5Tokenizer:
    """A unigram vocabulary of whole words, with letters and pairs of letters for the words that are not in it."""
    plain = sorted({_plain(word) for word in VOCABULARY} | set("0123456789"))
    pairs: Counter[str] = Counter()
    for word in plain:
        pairs.update(word[i : i + 2] for i in range(len(word) - 1))
    common = [pair for pair, _ in sorted(pairs.items(), key=lambda item: (-item[1], item[0]))[:160]]
    scored = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -6.0)]
    scored += [(f"▁{word}", -5.0) for word in plain]
    scored += [(pair, -7.0) for pair in common]
    scored += [(letter, -8.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    scored += [(f"▁{mark}", -8.0) for mark in MARKS]
    return T5Tokenizer(vocab=scored, extra_ids=0, _spm_precompiled_charsmap=charsmap(_foldings()))


def _plain(word: str) -> str:
    decomposed = unicodedata.normalize("NFD", word.lower())
    return "".join(char for char in decomposed if not unicodedata.combining(char)).replace("ß", "ss")


def _foldings() -> dict[str, str]:
    """What the T5 tokenizer rewrites first: case and accents fall away, numerals and marks stand alone."""
    folds = {chr(code): chr(code).lower() for code in range(ord("A"), ord("Z") + 1)}
    folds |= {char: _plain(char) for char in "ÀÁÂÄÇÈÉÊËÌÍÎÏÑÒÓÔÖÙÚÛÜßàáâäçèéêëìíîïñòóôöùúûü"}
    folds |= {char: f" {char} " for char in f"0123456789{MARKS}"}
    return folds


def charsmap(replacements: dict[str, str]) -> bytes:
    """A SentencePiece "precompiled charsmap" for characters of one or two UTF-8 bytes.

    Layout (SentencePiece's normalizer and the darts-clone double array it embeds): a little-endian uint32
    with the trie's size in bytes, the trie as uint32 units, then the replacements, each ended by a zero
    byte. A unit holds its label in bits 0-7, "has a value" in bit 8, and in bits 10-30 the offset that is
    XORed with the node's position; a value unit has bit 31 set and holds a position among the replacements.
    """
    keys = {key.encode(): value.encode() for key, value in replacements.items()}
    if any(len(key) > 2 for key in keys):
        raise ValueError("replacements: accepted are characters of at most two UTF-8 bytes")
    texts = bytearray()
    positions: dict[bytes, int] = {}
    for key, value in sorted(keys.items()):
        positions[key] = len(texts)
        texts += value + b"\0"
    leads = sorted({key[:1] for key in keys})
    # One block of 256 units per node that has children, and one for each such block's values.
    units = [0] * 256 * (2 + 2 * sum(1 for lead in leads if lead not in keys))
    units[0] = 256 << 10

    def leaf(node: int, label: int, at: int, value: int) -> None:
        units[node] = label | 1 << 8 | (node ^ at) << 10
        units[at] = value | 1 << 31

    # The root's children share block 1; block 0 keeps the root (position 0), so values start at 1.
    free_value = 1
    free_block = 2
    for lead in leads:
        label = lead[0]
        node = 256 ^ label
        if lead in positions:
            leaf(node, label, free_value, positions[lead])
            free_value += 1
            continue
        children, values = free_block * 256, (free_block + 1) * 256
        free_block += 2
        units[node] = label | (node ^ children) << 10
        for key in sorted(key for key in keys if key[:1] == lead):
            leaf(children ^ key[1], key[1], values + key[1], positions[key])
    trie = struct.pack(f"<{len(units)}I", *units)
    return struct.pack("<I", len(trie)) + trie + bytes(texts)

# SPDX-License-Identifier: Apache-2.0
"""A byte-level tokenizer that needs no download and leaves no row of the embedding unused."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")
"""Each role is one token, so that the chat template costs 8 tokens instead of 22."""

# Qwen's ChatML without its default system prompt: verl's Qwen chat builder looks for <|im_end|> and a
# one-token newline.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: 3 special tokens, the 256 bytes, 3 role names; `len(tokenizer)` is 262.

    Every id is reachable by encoding text. A vocabulary that is padded past `len(tokenizer)` would let the
    trainer put probability on ids which the rollout engine masks, and each importance ratio would carry that
    missing mass.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([PAD, TURN_START, TURN_END, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (PAD, TURN_START, TURN_END)])
    backend.add_tokens([AddedToken(role, normalized=False) for role in ROLES])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=TURN_END,
        pad_token=PAD,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer

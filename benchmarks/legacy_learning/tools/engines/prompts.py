# SPDX-License-Identifier: Apache-2.0
"""Prompts as tokens: a model's tokenizer, its chat template, and the tokens that end a response."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from flashrl_verl.errors import ConfigError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(model: Path, called: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's folder.

    Args:
        model: the folder.
        called: what an error calls it.

    Raises:
        ConfigError: there is none, or it has no chat template.
    """
    # Without its files transformers makes an empty tokenizer of the model's kind, and every prompt is empty.
    if not any((model / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(f"{called} has no tokenizer to write prompts with ({', '.join(_TOKENIZER_FILES)})")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{called}: its tokenizer cannot be loaded: {error}") from error
    if not tokenizer.chat_template:
        raise ConfigError(f"{called}: its tokenizer has no chat template; take an instruction-tuned model")
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> list[int]:
    """Tokens of a conversation, up to where the model answers."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def stop_token_ids(model: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokenizer's end of turn and those of generation_config.json, as vLLM combines them when it has a
    tokenizer."""
    found = set()
    if (model / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(model).eos_token_id
        found.update(ids if isinstance(ids, list) else [ids])
    found.add(tokenizer.eos_token_id)
    return sorted(found - {None})

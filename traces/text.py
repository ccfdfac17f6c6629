"""Text of conversations as tokens of the served model: what formats without block ids need.

A format of text has messages, no ids. Ids are made here: the messages of a prompt are rendered and tokenised
exactly as the server does it (its chat template, its tokenizer), and equal blocks of tokens after equal prefixes
get equal ids. All lengths are then those of the served model, whatever the log says about the model that was
recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Message = dict[str, Any]
Tokens = npt.NDArray[np.int64]


class TemplateError(ValueError):
    """Messages that the chat template refuses."""


class ChatTokenizer(Protocol):
    """Renders and tokenises messages as the served model's chat endpoint does."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message], *, answering: bool = True) -> Tokens:
        """Token ids of a conversation: int64, shape (n,).

        Args:
            messages: OpenAI chat messages.
            tools: OpenAI tool definitions, or none.
            answering: with the tokens that open the assistant's answer at the end.

        Raises:
            TemplateError: the template cannot render these messages.
        """
        ...


class FolderTokenizer:
    """The ``tokenizer.json`` and chat template of a checkpoint folder, by transformers, as SGLang loads them.

    Checkpoints whose tokenizer is Python code (``trust_remote_code``) are not supported.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast  # heavy, and needed for text only

        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message], *, answering: bool = True) -> Tokens:
        try:
            ids = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, add_generation_prompt=answering, return_dict=False
            )
        except Exception as error:  # a template is a program of the checkpoint: it may raise anything
            raise TemplateError(f"the chat template refuses these messages ({error})") from error
        return np.asarray(ids, dtype=np.int64)


def load_tokenizer(folder: str | Path) -> ChatTokenizer:
    """The tokenizer in a checkpoint's folder.

    Raises:
        ValueError: no such folder, or no tokenizer with a chat template in it.
    """
    path = Path(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (path / name).is_file():
            raise ValueError(f"{path}: no {name}; name the folder of the served checkpoint")
    tokenizer = FolderTokenizer(path)
    tokenizer.prompt([{"role": "user", "content": "hello"}], [])
    return tokenizer

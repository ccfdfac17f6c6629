"""A folder's tokenizer and chat template as the server uses them; the only part that needs tokenizers and transformers.

Templates are rendered by transformers' own ``render_jinja_template``, as in SGLang; its tokenizer classes are left out,
because they load torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import orjson

from eval.diagnose.chat import Message, Request
from eval.diagnose.prompt import Tokenize, Tokens
from eval.diagnose.run import RefusedMessagesError, Template


class TemplateError(ValueError):
    """A folder without a usable tokenizer or template. The message says what to do."""


class Served(NamedTuple):
    """What a server makes of messages."""

    tokenize: Tokenize
    template: Template | None  # None: the folder has no chat template


def load_served(folder: Path, settings: dict[str, Any] | None = None) -> Served:
    """The tokenizer and template of a checkpoint's folder; nothing is downloaded.

    Args:
        folder: with ``tokenizer.json``, ``tokenizer_config.json`` and perhaps ``chat_template.jinja``.
        settings: variables of the template, as ``chat_template_kwargs`` of a request.

    Raises:
        TemplateError: a package or the tokenizer is missing, or a file cannot be read.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise TemplateError(
            "--tokenizer needs the packages tokenizers and transformers: install the requirements of the README, or "
            "leave it out (places are then in characters)"
        ) from None
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TemplateError(f"{path}: no such file; pass the folder of the served checkpoint")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise TemplateError(f"{path}: no tokenizer ({error}); is the file whole?") from None

    def tokenize(text: str) -> Tokens:
        made = tokenizer.encode(text, add_special_tokens=False)
        return Tokens(made.ids, [end for _, end in made.offsets])

    config = _config(folder / "tokenizer_config.json")
    source = _source(folder / "chat_template.jinja", config)
    return Served(tokenize, None if source is None else _template(source, config, settings or {}))


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise TemplateError(f"{path}: not JSON ({error}); is the file whole?") from None
    return found if isinstance(found, dict) else {}


def _source(path: Path, config: dict[str, Any]) -> str | None:
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        found = next((t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _template(source: str, config: dict[str, Any], settings: dict[str, Any]) -> Template:
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError:
        raise TemplateError("a chat template needs the package transformers: install it (see the README)") from None
    # Special tokens are variables of the template: a text, or an object around it.
    names = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
    }

    def render(request: Request, answer: tuple[Message, ...], go_on: bool) -> str:
        messages = [message.as_openai() for message in (*request.messages, *answer)]
        tools = [orjson.loads(tool) for tool in request.tools] or None
        try:
            texts, _ = render_jinja_template(
                [messages], tools=tools, chat_template=source, add_generation_prompt=go_on, **{**names, **settings}
            )
        except Exception as error:  # a template is a program of the model's author and raises what it likes
            raise RefusedMessagesError(f"the chat template refuses these messages: {error}") from None
        return str(texts[0])

    return render

"""A byte-level tokenizer with M3's special tokens and the shape of its chat template.

Token id = byte value for 0..255, so that text <-> ids is exact for any bytes and the tiny vocabulary needs no
training. The special tokens follow. The template has the turn structure, thinking and tool-call markers that
SGLang's MiniMax-M3 parsers look for (``srt/parser/reasoning_parser.py``, ``srt/function_call/minimax_m3.py``,
checked against sglang 0.5.23).
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS = "]~!b["
TURN = "]~b]"
EOS = "[e~["
NAMESPACE = "]<]minimax[>["
SPECIAL_TOKENS = (BOS, TURN, EOS, NAMESPACE, "<mm:think>", "</mm:think>")

BYTE_TOKENS = 256

CHAT_TEMPLATE = """\
{%- set ns = ']<]minimax[>[' -%}
{{- ']~!b[' -}}
{%- macro text_of(content) -%}
  {%- if content is string -%}{{ content }}
  {%- elif content is not none -%}
    {%- for part in content -%}{{ part.text if part.text is defined else '' }}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- macro arguments_of(arguments) -%}
  {%- if arguments is mapping -%}
    {%- for key, value in arguments.items() -%}
      {{- ns ~ '<' ~ key ~ '>' ~ (value if value is string else value | tojson) ~ ns ~ '</' ~ key ~ '>' -}}
    {%- endfor -%}
  {%- else -%}{{ arguments }}{%- endif -%}
{%- endmacro -%}
{%- set first_is_system = messages and messages[0].role == 'system' -%}
{{- ']~b]system\\n' -}}
{{- text_of(messages[0].content) if first_is_system else 'You are a helpful assistant.' -}}
{%- if tools -%}
  {{- '\\n\\n# Tools\\n<tools>\\n' -}}
  {%- for tool in tools -%}
    {{- (tool.function if tool.function is defined else tool) | tojson ~ '\\n' -}}
  {%- endfor -%}
  {{- '</tools>' -}}
{%- endif -%}
{{- '[e~[\\n' -}}
{%- for message in messages[1 if first_is_system else 0:] -%}
  {%- if message.role == 'assistant' -%}
    {{- ']~b]ai\\n' -}}
    {%- if message.reasoning_content -%}{{- '<mm:think>' ~ message.reasoning_content ~ '</mm:think>' -}}{%- endif -%}
    {{- text_of(message.content) -}}
    {%- if message.tool_calls -%}
      {{- ns ~ '<tool_call>\\n' -}}
      {%- for call in message.tool_calls -%}
        {%- set fn = call.function if call.function is defined else call -%}
        {{- ns ~ '<invoke name="' ~ fn.name ~ '">' ~ arguments_of(fn.arguments) ~ ns ~ '</invoke>\\n' -}}
      {%- endfor -%}
      {{- ns ~ '</tool_call>' -}}
    {%- endif -%}
    {{- '[e~[\\n' -}}
  {%- else -%}
    {{- ']~b]' ~ message.role ~ '\\n' ~ text_of(message.content) ~ '[e~[\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- ']~b]ai\\n' -}}
  {%- if thinking_mode is defined and thinking_mode == 'disabled' -%}{{- '</mm:think>' -}}
  {%- elif thinking_mode is defined and thinking_mode == 'enabled' -%}{{- '<mm:think>' -}}
  {%- endif -%}
{%- endif -%}
"""


def special_token_id(token: str) -> int:
    """Id of a special token: they follow the 256 byte tokens in order."""
    return BYTE_TOKENS + SPECIAL_TOKENS.index(token)


def write_tokenizer(folder: Path, *, max_length: int) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` into a folder."""
    byte_alphabet = _byte_to_unicode()
    vocab = {byte_alphabet[byte]: byte for byte in range(BYTE_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _byte_to_unicode() -> dict[int, str]:
    """The byte <-> printable character table of byte-level BPE (GPT-2), in byte order."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    table = {byte: chr(byte) for byte in printable}
    for offset, byte in enumerate(byte for byte in range(BYTE_TOKENS) if byte not in table):
        table[byte] = chr(BYTE_TOKENS + offset)
    return table

"""Chat templates of the form that well-known models publish, and small tokenizers that know them.

Each template is written here with the special tokens and the order of the model that it is named
after, and little else. The tokenizers are trained on a few sentences and have merges that reach
over spaces, line ends and signs, so a text that is cut elsewhere is tokenised differently.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from further_templates import FURTHER

QWEN3 = """\
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools

<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}

</tools>

{"name": <function-name>, "arguments": <args-json-object>}<|im_end|>
{% elif messages[0].role == 'system' -%}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- set ns = namespace(query=messages|length - 1, searching=true) -%}
{%- for message in messages[::-1] -%}
{%- if ns.searching and message.role == 'user' -%}
{%- set ns.searching = false -%}{%- set ns.query = messages|length - 1 - loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' -%}
{%- set content = message.content or '' -%}{%- set reasoning = '' -%}
{%- if '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{ '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.query and (loop.last or reasoning) -%}
{{ '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}
{%- endif -%}
{{ content }}
{%- for call in message.tool_calls or [] -%}
{%- if content or not loop.first %}{{ '\\n' }}{% endif -%}
{%- set call = call.function or call -%}
{{ '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}
{{ '<think>\\n\\n</think>\\n\\n' }}
{%- endif -%}
{%- endif -%}
"""

LLAMA31 = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content | trim -%}{%- set messages = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- endif -%}
{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{ 'Environment: ipython\\n' }}{% endif -%}
{{ 'Today Date: 26 Jul 2024\\n\\n' + system + '<|eot_id|>' }}
{%- if tools -%}
{{ '<|start_header_id|>user<|end_header_id|>\\n\\nRespond with JSON for a function call.\\n\\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor -%}
{{ messages[0].content | trim + '<|eot_id|>' }}
{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
{%- if message.tool_calls -%}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('only one call at once') }}{% endif -%}
{%- set call = message.tool_calls[0].function -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name }}
{{- '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
{%- elif message.role in ('tool', 'ipython') -%}
{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
{%- else -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif -%}
"""

_MISTRAL = """\
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list -%}
{%- set ns = namespace(turn=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) -%}
{%- if (message.role == 'user') != (ns.turn % 2 == 0) -%}
{{ raise_exception('after the system message roles must alternate user/assistant') }}
{%- endif -%}
{%- set ns.turn = ns.turn + 1 -%}
{%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{%- if tools and message == users[-1] -%}
{{ '[AVAILABLE_TOOLS]' + SPACE + tools | tojson + '[/AVAILABLE_TOOLS]' }}
{%- endif -%}
{{ '[INST]' + SPACE }}
{%- if system is defined and message == users[-1] %}{{ system + '\\n\\n' }}{% endif -%}
{{ message.content + '[/INST]' }}
{%- elif message.tool_calls -%}
{{ '[TOOL_CALLS]' + SPACE + '[' }}
{%- for call in message.tool_calls -%}
{%- if call.id | length != 9 %}{{ raise_exception('ids of calls have 9 signs') }}{% endif -%}
{{ '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' }}{% if not loop.last %}{{ ', ' }}{% endif -%}
{%- endfor -%}
{{ ']' + eos_token }}
{%- elif message.role == 'assistant' -%}
{{ SPACE + message.content + eos_token }}
{%- elif message.role == 'tool' -%}
{%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 -%}
{{ raise_exception('ids of calls have 9 signs') }}
{%- endif -%}
{{ '[TOOL_RESULTS]' + SPACE + '{"content": ' + message.content | tojson }}
{{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif -%}
{%- endfor -%}
"""
MISTRAL_V3 = "{%- set SPACE = ' ' -%}" + _MISTRAL
MISTRAL_TEKKEN = "{%- set SPACE = '' -%}" + _MISTRAL

CUSTOM = """\
{%- for message in messages -%}
{{ '<' + message.role + '>' + message.content + '<end>' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif -%}
"""

PLAIN = """\
{%- for message in messages -%}
{{ message.role + ': ' + message.content + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif -%}
"""
"""Without any special token."""

_SENTENCES = (
    "the answer is 42\n\nuser: hello there\n",
    "assistant: I think the answer is hello\n",
    '{"name": "add", "arguments": {"a": 1, "b": 2}}\n',
    "what is 1 + 1? it is 2.\n\n",
    "tool: the result is 3\n",
)


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of model: how its conversations look."""

    template: str
    special: tuple[str, ...]
    """Special tokens of turns and roles."""
    words: tuple[str, ...]
    """Added tokens that are not special: a decoded text shows them."""
    stops: tuple[str, ...]
    """Tokens that end a turn, the usual one first."""
    kind: str = "bytes"
    """Of the tokenizer: `bytes` (byte-level BPE) or `metaspace` (spaces belong to words)."""


FAMILIES = {
    "qwen3": Family(
        QWEN3,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        (
            "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
            "</tool_response>",
        ),
        ("<|im_end|>", "<|endoftext|>"),
    ),
    "llama31": Family(
        LLAMA31,
        (
            "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
            "<|eom_id|>", "<|python_tag|>",
        ),
        (),
        ("<|eot_id|>", "<|eom_id|>"),
    ),
    "mistral_v3": Family(
        MISTRAL_V3,
        (
            "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
        ),
        (),
        ("</s>",),
        kind="metaspace",
    ),
    "mistral_tekken": Family(
        MISTRAL_TEKKEN,
        (
            "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
        ),
        (),
        ("</s>",),
    ),
    "custom": Family(
        CUSTOM, ("<end>", "<system>", "<user>", "<assistant>", "<tool>"), (), ("<end>",)
    ),
    "plain": Family(PLAIN, ("<eos>",), (), ("<eos>",)),
}  # fmt: skip


@functools.lru_cache
def chat_tokenizer(name: str) -> Any:
    """The tokenizer of a family, with its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    family = _family(name)
    tokenizer = Tokenizer(models.BPE(byte_fallback=family.kind == "metaspace"))
    alphabet: Sequence[str] = ()
    if family.kind == "bytes":
        # Words may begin with a space or a line end, and a line end may follow a sign.
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
        alphabet = sorted({chr(i) for i in range(32, 127)} | {"\n", "▁"})
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=list(alphabet), show_progress=False, max_token_length=12
    )
    tokenizer.train_from_iterator(_SENTENCES * 4, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(s, special=True, normalized=False) for s in family.special]
    )
    tokenizer.add_tokens([AddedToken(w, special=False, normalized=False) for w in family.words])
    beginnings = [s for s in family.special if s in ("<s>", "<bos>", "<|begin_of_text|>")]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=beginnings[0] if beginnings else None,
        eos_token=family.stops[0],
        additional_special_tokens=list(family.special),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = family.template
    return fast


def stop_ids(name: str) -> tuple[int, ...]:
    """Ids of the tokens that end a turn of a family."""
    tokenizer = chat_tokenizer(name)
    family = _family(name)
    return tuple(tokenizer.convert_tokens_to_ids(s) for s in family.stops)


def _family(name: str) -> Family:
    return FAMILIES[name] if name in FAMILIES else Family(*FURTHER[name])

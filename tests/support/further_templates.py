"""Chat templates of further model families, written after their public formats.

Each has something that the first ones (`chat_models`) have not: Gemma 3 calls the assistant `model`
and has no system role, Phi-4 shows no tool's answer, DeepSeek-R1 opens the reasoning in the prompt,
leaves it out later and numbers tools' answers by what came before, Qwen2.5 has a system message of
its own, GLM-4.5 ends a turn with the next role's token, Command R strips what turns say.
"""

from __future__ import annotations

GEMMA3 = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
{%- set prefix = messages[0].content + '\\n\\n' -%}{%- set messages = messages[1:] -%}
{%- else -%}{%- set prefix = '' -%}{%- endif -%}
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
{{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}
"""

PHI4 = """\
{%- for message in messages -%}
{%- if message.role in ('system', 'user', 'assistant') -%}
{{ '<|im_start|>' + message.role + '<|im_sep|>' + message.content + '<|im_end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif -%}
"""

DEEPSEEK_R1 = """\
{%- set ns = namespace(tool=false, first=true, system='') -%}
{%- for message in messages if message.role == 'system' -%}
{%- set ns.system = message.content -%}
{%- endfor -%}
{{ bos_token + ns.system }}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{%- set ns.tool = false -%}{{ '<|User|>' + message.content }}
{%- elif message.role == 'assistant' -%}
{%- if ns.tool -%}
{{ '<|tool_outputs_end|>' + message.content + '<|end_of_sentence|>' }}{%- set ns.tool = false -%}
{%- else -%}
{{ '<|Assistant|>' + message.content.split('</think>')[-1] + '<|end_of_sentence|>' }}
{%- endif -%}
{%- elif message.role == 'tool' -%}
{%- set ns.tool = true -%}
{{ '<|tool_outputs_begin|>' if ns.first else '\\n' }}{%- set ns.first = false -%}
{{ '<|tool_output_begin|>' + message.content + '<|tool_output_end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if ns.tool %}{{ '<|tool_outputs_end|>' }}{% endif -%}
{%- if add_generation_prompt and not ns.tool %}{{ '<|Assistant|><think>\\n' }}{% endif -%}
"""

QWEN25 = """\
{%- set own = 'You are Qwen.' -%}
{%- set system = messages[0].content if messages[0].role == 'system' else own -%}
{{ '<|im_start|>system\\n' + system }}
{%- if tools -%}
{{ '\\n\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor -%}
{{ '\\n</tools>\\n<tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n</tool_call>' }}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first)
    or (message.role == 'assistant' and not message.tool_calls) -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' -%}
{{ '<|im_start|>' + message.role }}
{%- if message.content %}{{ '\\n' + message.content }}{% endif -%}
{%- for call in message.tool_calls -%}
{{ '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

GLM45 = """\
{{- '[gMASK]<sop>' -}}
{%- if tools -%}
{{ '<|system|>\\n# Tools' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor -%}
{{ '\\n<tool_call>{function-name}\\n<arg_key>{key}</arg_key>' }}
{%- endif -%}
{%- set ns = namespace(query=-1) -%}
{%- for message in messages if message.role == 'user' -%}
{%- set ns.query = messages.index(message) -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role in ('system', 'user') -%}
{{ '<|' + message.role + '|>\\n' + message.content }}
{%- elif message.role == 'assistant' -%}
{%- set content = message.content -%}{%- set reasoning = '' -%}
{%- if '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{ '<|assistant|>\\n<think>' + (reasoning if loop.index0 > ns.query else '') + '</think>' }}
{%- if content.strip() %}{{ '\\n' + content.strip() }}{% endif -%}
{%- elif message.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif -%}
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|assistant|>' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '\\n<think></think>' }}{% endif -%}
{%- endif -%}
"""

COMMAND_R = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + messages[0].content + '<|END_OF_TURN_TOKEN|>' }}
{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{%- set role = '<|USER_TOKEN|>' if message.role == 'user' else '<|CHATBOT_TOKEN|>' -%}
{{ '<|START_OF_TURN_TOKEN|>' + role + message.content.strip() + '<|END_OF_TURN_TOKEN|>' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif -%}
"""

Signs = tuple[str, ...]
_THINK = ("<think>", "</think>")
_CALL = ("<tool_call>", "</tool_call>")
FURTHER: dict[str, tuple[str, Signs, Signs, Signs]] = {
    "gemma3": (
        GEMMA3,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        (),
        ("<end_of_turn>", "<eos>"),
    ),
    "phi4": (
        PHI4,
        ("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"),
        (),
        ("<|im_end|>", "<|endoftext|>"),
    ),
    "deepseek_r1": (
        DEEPSEEK_R1,
        (
            "<s>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>", "<|tool_outputs_begin|>",
            "<|tool_outputs_end|>", "<|tool_output_begin|>", "<|tool_output_end|>",
        ),
        _THINK,
        ("<|end_of_sentence|>",),
    ),
    "qwen25": (
        QWEN25,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        _CALL,
        ("<|im_end|>", "<|endoftext|>"),
    ),
    "glm45": (
        GLM45,
        (
            "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
            "<|observation|>",
        ),
        (*_THINK, *_CALL, "<tool_response>", "</tool_response>"),
        ("<|user|>", "<|observation|>", "<|endoftext|>"),
    ),
    "command_r": (
        COMMAND_R,
        (
            "<s>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>",
            "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>",
        ),
        (),
        ("<|END_OF_TURN_TOKEN|>",),
    ),
}  # fmt: skip
"""Template, special tokens, added words that are not special, and tokens that end a turn."""

"""Chat templates in the manner of those that models come with, and conversations for them."""

from __future__ import annotations

from typing import Any

TEMPLATES = {
    "turn markers": (
        "{% for message in messages %}\n"
        "    {% if loop.first and message['role'] != 'system' %}\n"
        "{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}\n"
        "    {% endif %}\n"
        "{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}\n"
        "{%- endfor %}\n"
        "{% if add_generation_prompt %}\n"
        "    {{- '<|im_start|>assistant\\n' }}\n"
        "{% endif %}\n"
    ),
    "bos, and strict turns": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System messages are not supported') }}{% endif %}"
        "{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Turns must alternate: user, assistant, user, ...') }}{% endif %}"
        "{% if message['role'] == 'user' %}{{ '[ASK] ' ~ message['content'] ~ ' [/ASK]' }}"
        "{% else %}{{ message['content'] ~ eos_token }}{% endif %}{% endfor %}"
    ),
    "namespace, slices and macros": (
        "{% set ns = namespace(system='', turns=0) %}"
        "{% macro header(name) %}<|{{ name | upper }}|>{% endmacro %}"
        "{%- if messages[0].role == 'system' -%}"
        "{%- set ns.system = messages[0].content -%}{%- set rest = messages[1:] -%}"
        "{%- else -%}{%- set rest = messages -%}{%- endif -%}"
        "{{ header('system') }}{{ ns.system or 'none' }}\n"
        "{% for m in rest %}{% set ns.turns = ns.turns + 1 %}"
        "{{ ns.turns }}. {{ header(m.role) }} {{ m.get('name', '-') }}: {{ m['content'] }}\n"
        "{% endfor %}{{ header('assistant') if add_generation_prompt }}"
    ),
    "tools as JSON": (
        "{%- if tools %}{{ '<tools>' }}{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}"
        "\n{{ tools | tojson(indent=2) }}{{ '</tools>\n' }}{% endif %}"
        "{%- for message in messages %}{{ message | tojson }}\n{% endfor %}"
        "{%- if tools is none %}no tools{% endif %}"
    ),
    "loop control and filters": (
        "{% for message in messages %}"
        "{% if message.role == 'system' %}{% continue %}{% endif %}"
        "{% if loop.index > 3 %}{% break %}{% endif %}"
        "{{ message.content.strip().split(' ') | reverse | join('_') }}|"
        "{% generation %}{{ message.content | length }}{% endgeneration %};{% endfor %}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{{ undefined_name }}{{ undefined_name is defined }}{{ range(3) | list }}"
    ),
    "attribute of a missing value": "{{ messages[0].nothing.content }}",
    "concatenation with a missing value": "{{ 'a' + messages[0].nothing }}",
}

_HELLO = {"role": "user", "content": "Hello, wörld! 👋🏽"}
_ANSWER = {"role": "assistant", "content": '  Hi <there> & "you"\n'}
_SYSTEM = {"role": "system", "content": "Answer in rhyme.\n\nAlways."}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [_HELLO],
    "system first": [_SYSTEM, _HELLO],
    "three turns": [_HELLO, _ANSWER, {"role": "user", "content": "더 말해 줘"}],
    "five turns": [_SYSTEM, _HELLO, _ANSWER, _HELLO, _ANSWER, {"role": "user", "content": ""}],
    "two users in a row": [_HELLO, _HELLO],
    "special tokens in the content": [
        {"role": "user", "content": "<|im_end|>\n<|im_start|>system\n{{ bos_token }}{% raw %}"}
    ],
    "a name and a null": [
        {"role": "user", "name": "Ada", "content": "Who am I?"},
        {"role": "assistant", "content": "Ada.", "tool_calls": None},
    ],
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Wetter für einen Ort <heute>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]

"""Make templates.json: what transformers renders and encodes; see README.md for the environment.

Each case is a tokenizer's folder (its files as text) and what transformers makes of it: the text
and token ids of some conversations, with and without the generation prompt, and the ids of a plain
text. The templates are written for this file, in the manner of the models they are named after.
"""

# pyright: reportMissingImports=false
# ruff: noqa: E501  (lines of templates)
import datetime
import json
import tempfile
from pathlib import Path

import tokenizers
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

HERE = Path(__file__).parent
NOW = datetime.datetime(2025, 2, 3, 4, 5, 6)
PLAIN = "def f(x):\n    return <|eot|> x"

SPECIAL = ("<|bos|>", "<|eos|>", "<|eot|>", "<|start|>", "<|end|>", "<|message|>", "<think>")

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{#- The first message may set the scene. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set scene = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set scene = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Tools: ipython\\n" }}
{%- endif %}
{{- "Known until: March\\nToday: " + date_string + "\\n\\n" }}
{{- scene }}
{{- "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("One call at a time!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot|>" }}
    {%- else %}
        {{- "<|start|>ipython<|end|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""

QWEN3 = """\
{%- if tools %}
    {{- '<|start|>system\\nTools:' }}
    {%- for tool in tools %}
        {{- "\\n" ~ (tool | tojson) }}
    {%- endfor %}
    {{- '<|end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|start|>system\\n' + messages[0].content + '<|end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not(message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|start|>' + message.role + '\\n' + content + '<|end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or (not loop.last and thought)) %}
            {{- '<|start|>' + message.role + '\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if call.function %}{%- set call = call.function %}{%- endif %}
                {{- '<call>{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
                {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
                {{- '}</call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|start|>user' }}{%- endif %}
        {{- '\\n<tool>\\n' + content + '\\n</tool>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

DEEPSEEK = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% set ns = namespace(is_first=false, is_tool=false, scene='', is_first_scene=true) %}\
{%- for message in messages %}{%- if message['role'] == 'system' %}\
{%- if ns.is_first_scene %}{% set ns.scene = ns.scene + message['content'] %}{% set ns.is_first_scene = false %}\
{%- else %}{% set ns.scene = ns.scene + '\\n\\n' + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}\
{{ bos_token }}{{ ns.scene }}\
{%- for message in messages %}\
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{ '<|User|>' + message['content'] }}{%- endif %}\
{%- if message['role'] == 'assistant' and 'tool_calls' in message %}{%- set ns.is_tool = true -%}\
{%- for call in message['tool_calls'] %}{{ '<|Call|>' + call['type'] + call['function']['name'] }}{%- endfor %}{%- endif %}\
{%- if message['role'] == 'assistant' and message['content'] is not none and 'tool_calls' not in message %}\
{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}\
{{ '<|Assistant|>' + content + eos_token }}{%- endif %}\
{%- endfor -%}\
{% if add_generation_prompt and not ns.is_tool %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""

GPT_OSS = """\
{#- Macros first, as if the file were a module. #}
{%- macro list_of(things, level=0) -%}
    {%- for thing in things -%}
        {{- "  " * level + "- " + thing -}}
        {%- if not loop.last %}{{- "\\n" }}{% endif -%}
    {%- endfor -%}
{%- endmacro -%}
{%- macro system() -%}
    {{- (model_identity | default("You read and write text.")) + "\\n" }}
    {{- "Today: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}
    {%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
    {{- "Reasoning: " + reasoning_effort + "\\n" }}
    {{- list_of(["analysis", "final"], 1) }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}{{- system() }}{{- "<|end|>" }}
{%- if messages[0].role in ["developer", "system"] %}
    {%- set orders = messages[0].content %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set orders = "" %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if orders or tools %}
    {{- "<|start|>developer<|message|># Instructions\\n\\n" }}{{- orders }}{{- "<|end|>" }}
{%- endif %}
{%- set last_call = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "content" in message and "<|message|>" in message.content %}
            {{- raise_exception("Channels belong in fields of their own.") }}
        {%- endif %}
        {%- if "tool_calls" in message %}
            {%- set last_call.name = message.tool_calls[0].function.name %}
            {{- "<|start|>assistant to=" ~ last_call.name ~ "<|message|>" ~ message.tool_calls[0].function.arguments|tojson ~ "<|end|>" }}
        {%- elif loop.last and not add_generation_prompt %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
            {%- set last_call.name = none %}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_call.name is none %}{{- raise_exception("A result without a call.") }}{%- endif %}
        {{- "<|start|>functions." + last_call.name + "<|message|>" + message.content|tojson + "<|end|>" }}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|start|>system\nYou are small and helpful<|end|>\n' }}{% endif %}"
    "{{'<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)

IDIOMS = """\
{{ bos_token ~ (eos_token or 'none') ~ (pad_token if pad_token is defined else '-') ~ sep_token }}
  {% for message in messages %}
  {% if message['role'] == 'system' %}{% continue %}{% endif %}
{{ loop.index }}/{{ loop.length }} {{ message['role'] | upper }}{{ ',' if not loop.last }}
    {% if message['content'] is string %}
{{ message['content'] | replace('x', 'y') | e }}
    {% else %}
        {% for part in message['content'] | selectattr('type', 'equalto', 'text') %}
[{{ part.text | trim }}]
        {% endfor %}
{{ message['content'] | map(attribute='text') | join('+') }}
    {% endif %}
    {% generation %}
{{ message | tojson(indent=2) }}
    {% endgeneration %}
    {% if loop.index0 == 2 %}{% break %}{% endif %}
  {% endfor %}
{% set counts = {'user': 0} %}
{%- for key, value in counts.items() %}{{ key }}={{ value }}{% endfor %}
{{ [3, 1, 2] | sort | first }} {{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 3 }} {{ '%s:%d' % ('a', 3) }}
{{ documents is none }} {{ tools is none }} {{ nothing is defined }} {{ 'é<b>&"' | tojson }}
{{ {'b': 1, 'a': [none, true]} | tojson(sort_keys=true, separators=(',', ':')) }} {{ image_token }}
"""

CONVERSATIONS = {
    "one": [{"role": "user", "content": "  What is x?  "}],
    "many": [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": "a <b> & 'é' \U0001f600"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nx", "tool_calls": None},
        {"role": "user", "content": "again"},
    ],
    "answered": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nx"},
    ],
    "called": [
        {"role": "user", "content": "2+2"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "é": "<"}}}
            ],
        },
        {"role": "tool", "content": "4"},
    ],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ],
}


def tokenizer_json() -> str:
    """A character tokenizer of printable ASCII that begins plain texts with `<|bos|>`."""
    texts = [*SPECIAL, "?", "\n", *(chr(i) for i in range(32, 127) if chr(i) != "?")]
    model = tokenizers.models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token="?")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex("[\\s\\S]"), "isolated"
    )
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    backend.add_special_tokens([tokenizers.AddedToken(s, normalized=False) for s in SPECIAL])
    return backend.to_str()


def cases() -> dict[str, dict[str, str]]:
    """Folders by name; between them every place and form in which a template is kept."""

    def settings(**given) -> str:
        common = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        return json.dumps({**common, "bos_token": "<|bos|>", "eos_token": "<|eos|>", **given})

    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": QWEN3}]
    added = {"0": {"content": "<|bos|>", "special": True}}
    return {
        "llama3": {"tokenizer_config.json": settings(chat_template=LLAMA3, pad_token=None)},
        "qwen3": {"tokenizer_config.json": settings(chat_template=several)},
        "deepseek": {
            "tokenizer_config.json": settings(
                chat_template=DEEPSEEK,
                added_tokens_decoder=added,
                bos_token={"__type": "AddedToken", "content": "<|bos|>", "special": True},
            ),
            "special_tokens_map.json": json.dumps({"bos_token": "<|eot|>"}),
        },
        "gpt_oss": {
            "tokenizer_config.json": settings(chat_template="{{ 'an older one' }}"),
            "chat_template.jinja": GPT_OSS,
        },
        "smollm2": {"tokenizer_config.json": settings(chat_template=SMOLLM2)},
        "idioms": {
            "tokenizer_config.json": settings(chat_template=IDIOMS, image_token="<|message|>"),
            "special_tokens_map.json": json.dumps(
                {"bos_token": {"content": "<|start|>"}, "sep_token": "<|end|>"}
            ),
        },
    }


def answers(files: dict[str, str]) -> dict:
    """What transformers makes of one folder; a refused conversation is left out."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        tokenizer = AutoTokenizer.from_pretrained(folder)
    found = {"plain": tokenizer(PLAIN)["input_ids"], "chats": []}
    for name, messages in CONVERSATIONS.items():
        for prompt in (True, False):
            given = {"add_generation_prompt": prompt}
            try:
                text = tokenizer.apply_chat_template(messages, tokenize=False, **given)
            except Exception as error:
                print(f"  {name}: {error!r}"[:200])
                continue
            ids = tokenizer.apply_chat_template(messages, return_dict=False, **given)
            found["chats"].append({"conversation": name, **given, "text": text, "ids": ids})
    return found


def main() -> None:
    """Write templates.json beside this file."""

    class Frozen(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return NOW

    chat_template_utils.datetime = Frozen
    common, out = tokenizer_json(), {}
    for name, files in cases().items():
        print(name)
        out[name] = {"files": files, **answers({"tokenizer.json": common, **files})}
    path = HERE / "templates.json"
    golden = {
        "now": NOW.isoformat(),
        "plain": PLAIN,
        "tokenizer.json": common,
        "conversations": CONVERSATIONS,
        "cases": out,
    }
    path.write_text(json.dumps(golden) + "\n", encoding="utf-8")
    print(path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()

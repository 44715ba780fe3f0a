"""Conversations with every kind of turn, and chat templates in the constructs of published ones.

The templates are written for the tests. They use what those of Qwen 3, Qwen 3.5 and Gemma 4 use: macros that call
each other, namespaces, scans of neighbouring messages, `previtem` and `nextitem`, dictsort, tojson, thoughts that are
cut out of earlier answers, tool calls as JSON and as tags, and a generation prompt that `enable_thinking` changes.
"""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Says the weather, e.g. "rain" <b>',
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "a town, like Z\u00fcrich"},
                "days": {"type": "array", "items": {"type": "integer"}, "nullable": True},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "where": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
            },
            "required": ["place"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "", "parameters": {"type": "object"}}}


def call(name: str, arguments: object, call_id: str) -> dict[str, object]:
    """Return a call of a tool, as an answer has it."""
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


ASKED = {"role": "user", "content": " What is the weather\n in Z\u00fcrich? "}
CALLS = {
    "role": "assistant",
    "content": "Let me look.",
    "reasoning_content": "\nThe user asks for weather.\n",
    "tool_calls": [
        call("weather", {"place": "Z\u00fcrich", "days": [1, 2], "deep": {"b": None, "a": 1.5}, "now": True}, "c1"),
        call("clock", {}, "c2"),
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": '{"sky": "rain <b>"}'},
    {"role": "tool", "tool_call_id": "c2", "name": "clock", "content": "12:00"},
]
ANSWERED = {"role": "assistant", "content": "<think>\nIt rains.\n</think>\n\nRain."}
CHANNELLED = {"role": "assistant", "content": "<|channel>thought\nIt rains.\n<channel|>Rain."}
BRIEF = {"role": "system", "content": " Be brief. "}
CHATS: dict[str, list[dict[str, object]]] = {
    "question": [ASKED],
    "system": [BRIEF, ASKED],
    "turns": [ASKED, ANSWERED, {"role": "user", "content": "And tomorrow?"}],
    "channels": [BRIEF, ASKED, CHANNELLED, {"role": "user", "content": "And tomorrow?"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": " Two."}]}],
    "calls": [BRIEF, ASKED, CALLS],
    "results": [BRIEF, ASKED, CALLS, *RESULTS],
    "after": [ASKED, CALLS, *RESULTS, ANSWERED, {"role": "user", "content": "Thanks."}],
    "silent": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call("clock", {}, "c3")]}, RESULTS[1]],
}

QWEN3 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "Call <tools>:" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools> as\n<tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == "user" and message.content is string
        and not message.content.startswith('<tool_response>') %}
        {%- set ns.searching = false %}{%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set said = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + said + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if not thought and '</think>' in said %}
            {%- set thought = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set said = said.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- said }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if said or not loop.first %}{{- '\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + said + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""

QWEN35 = r"""{%- macro words_of(content, counts=false) %}
    {%- if content is string %}{{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}
            {%- if 'text' in item %}{{- item.text }}{%- else %}{{- raise_exception('Unexpected part.') }}{%- endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}{{- '' }}
    {%- else %}{{- raise_exception('Unexpected content.') }}{%- endif %}
{%- endmacro %}
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools>\n<tool_call>\n<function=name>\n<parameter=a>\nvalue\n</parameter>\n</function>\n</tool_call>' }}
    {%- if messages[0].role == 'system' %}{{- '\n\n' + words_of(messages[0].content)|trim }}{%- endif %}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + words_of(messages[0].content)|trim + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = words_of(message.content, true)|trim %}
    {%- if message.role == "system" %}
        {%- if not loop.first %}{{- raise_exception('The system message comes first.') }}{%- endif %}
    {%- elif message.role == "user" %}{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if message.reasoning_content is string %}
            {{- '<think>\n' + message.reasoning_content|trim + '\n</think>\n\n' }}
        {%- elif '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- content }}
        {%- if message.tool_calls and message.tool_calls is iterable and message.tool_calls is not mapping %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- ('\n\n' if loop.first and content|trim else '\n' if not loop.first else '') + '<tool_call>\n' }}
                {{- '<function=' + tool_call.name + '>\n' }}
                {%- for name, value in tool_call.arguments|items %}
                    {{- '<parameter=' + name + '>\n' }}
                    {%- set value = value | tojson | safe if value is mapping or (value is sequence and value is not
                        string) else value | string %}
                    {{- value }}{{- '\n</parameter>\n' }}
                {%- endfor %}
                {{- '</function>\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' }}{{- content }}{{- '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- else %}{{- raise_exception('Unexpected role.') }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}
    {%- else %}{{- '<think>\n' }}{%- endif %}
{%- endif %}"""

GEMMA4 = r"""{%- macro properties_of(properties, required, filter_keys=false) -%}
    {%- set ns = namespace(found=false) -%}
    {%- for key, value in properties | dictsort -%}
        {%- if ns.found %},{% endif -%}{%- set ns.found = true -%}
        {{ key }}:{
        {%- if value['description'] -%}description:<|"|>{{ value['description'] }}<|"|>,{%- endif -%}
        {%- if value['enum'] -%}enum:{{ argument(value['enum']) }},{%- endif -%}
        {%- if value['items'] is mapping and value['items'] -%}
            items:{type:{{ argument(value['items']['type'] | upper) }}},
        {%- endif -%}
        {%- if value['nullable'] %}nullable:true,{%- endif -%}
        {%- if value['type'] | upper == 'OBJECT' and value['properties'] is mapping -%}
            properties:{ {{- properties_of(value['properties'], value['required'] | default([])) -}} },
        {%- endif -%}
        type:<|"|>{{ value['type'] | upper }}<|"|>}
    {%- endfor -%}
{%- endmacro -%}
{%- macro argument(value, escape_keys=True) -%}
    {%- if value is string -%}{{- '<|"|>' + value + '<|"|>' -}}
    {%- elif value is boolean -%}{{- 'true' if value else 'false' -}}
    {%- elif value is mapping -%}{{- '{' -}}
        {%- for key, item in value | dictsort -%}
            {{- '<|"|>' + key + '<|"|>' if escape_keys else key -}}:{{- argument(item, escape_keys=escape_keys) -}}
            {%- if not loop.last %},{% endif -%}
        {%- endfor -%}{{- '}' -}}
    {%- elif value is sequence -%}{{- '[' -}}
        {%- for item in value -%}{{- argument(item) -}}{%- if not loop.last %},{% endif -%}{%- endfor -%}{{- ']' -}}
    {%- else -%}{{- value -}}{%- endif -%}
{%- endmacro -%}
{%- macro without_thoughts(text) -%}
    {%- set ns = namespace(kept='') -%}
    {%- for part in text.split('<channel|>') -%}
        {%- set ns.kept = ns.kept + (part.split('<|channel>')[0] if '<|channel>' in part else part) -%}
    {%- endfor -%}
    {{- ns.kept | trim -}}
{%- endmacro -%}
{%- set ns = namespace(previous=None) -%}{%- set turns = messages -%}
{{- bos_token -}}
{%- if (enable_thinking is defined and enable_thinking) or tools or messages[0]['role'] in ['system', 'developer'] -%}
    {{- '<|turn>system\n' -}}
    {%- if enable_thinking is defined and enable_thinking -%}{{- '<|think|>\n' -}}{%- endif -%}
    {%- if messages[0]['role'] in ['system', 'developer'] -%}
        {{- messages[0]['content'] | trim -}}{%- set turns = messages[1:] -%}
    {%- endif -%}
    {%- for tool in tools or [] %}
        {{- '<|tool>declaration:' + tool['function']['name'] + '{description:' -}}
        {{- argument(tool['function']['description']) -}}
        {%- set params = tool['function']['parameters'] -%}
        {%- if params['properties'] -%}
            ,parameters:{properties:{ {{- properties_of(params['properties'], params['required']) -}} },required:
            {{- argument(params['required']) -}} }
        {%- endif -%}
        {{- '}<tool|>' -}}
    {%- endfor %}
    {{- '<turn|>\n' -}}
{%- endif %}
{%- for message in turns if message['role'] != 'tool' -%}
    {%- set ns.previous = None -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{- '<|turn>' + role + '\n' }}
    {%- set thought = message.get('reasoning') or message.get('reasoning_content') -%}
    {%- if thought and message.get('tool_calls') -%}
        {{- '<|channel>thought\n' + thought + '\n<channel|>' -}}
    {%- endif -%}
    {%- for tool_call in message['tool_calls'] or [] -%}
        {{- '<|tool_call>call:' + tool_call['function']['name'] + '{' -}}
        {%- for key, value in tool_call['function']['arguments'] | dictsort -%}
            {{- ',' if not loop.first -}}{{- key -}}:{{- argument(value, escape_keys=False) -}}
        {%- endfor -%}
        {{- '}<tool_call|>' -}}{%- set ns.previous = 'call' -%}
        {%- for answer in turns if answer['role'] == 'tool' and answer.get('tool_call_id') == tool_call['id'] -%}
            {{- '<|tool_response>response:' + answer['name'] + '{value:' + argument(answer['content']) -}}
            {{- '}<tool_response|>' -}}{%- set ns.previous = 'response' -%}
        {%- endfor -%}
    {%- endfor -%}
    {%- if message['content'] is string -%}
        {{- without_thoughts(message['content']) if role == 'model' else message['content'] | trim -}}
    {%- elif message['content'] is sequence -%}
        {%- for item in message['content'] if item['type'] == 'text' -%}{{- item['text'] | trim -}}{%- endfor -%}
    {%- endif -%}
    {%- if ns.previous == 'call' -%}{{- '<|tool_response>' -}}
    {%- elif ns.previous != 'response' or message['content'] -%}{{- '<turn|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.previous is none -%}
    {{- '<|turn>model\n' -}}
    {%- if not enable_thinking | default(false) -%}{{- '<|channel>thought\n<channel|>' -}}{%- endif -%}
{%- endif -%}"""

TEMPLATES = {"qwen3": QWEN3, "qwen3_5": QWEN35, "gemma4": GEMMA4}

"""Chat templates of more families, in the constructs of published ones, written for the tests.

They use what the published templates of Mistral, LFM2, OLMo 3, GLM, Granite, Phi 4 mini, SmolLM3, EXAONE 4 and DeepSeek
use: ids of calls that must have nine characters, `raise_exception` for roles that do not alternate, parts with
thoughts, `strftime_now`, `selectattr`, slices and `namespace`, `tojson` with `ensure_ascii` and `indent`, filters on
conditions of a loop, `continue`, `{% generation %}`, templates that show nothing of an answer but its content, and
such as show no tools.
"""

import re

MISTRAL_LIST = r"""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}{{- raise_exception("Alternate.") }}{%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}{{- tool | tojson }}{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}{{- "[INST] " + system_message + "\n\n" }}
        {%- else %}{{- "[INST] " }}{%- endif %}
        {{- message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}{{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {%- if not message.tool_call_id is defined or message.tool_call_id|length != 9 %}
            {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception("Unknown role.") }}{%- endif %}
{%- endfor %}"""

MISTRAL_NAMED = r"""{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- '[SYSTEM_PROMPT]' -}}
    {%- if messages[0]['content'] is string %}{{- messages[0]['content'] -}}
    {%- else %}{%- for block in messages[0]['content'] %}{{- block['text'] }}{%- endfor %}{%- endif %}
    {{- '[/SYSTEM_PROMPT]' -}}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}
    {{- '[SYSTEM_PROMPT]Today is ' + strftime_now("%Y-%m-%d") + '. Think so:[THINK]thoughts[/THINK]answer' }}
    {{- '[/SYSTEM_PROMPT]' }}
{%- endif %}
{%- if tools is defined and tools is not none and tools|length > 0 %}
    {{- '[AVAILABLE_TOOLS]' + (tools| tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if message['content'] is string %}{{- '[INST]' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST]' }}
            {%- for block in message['content'] | sort(attribute='type') %}
                {%- if block['type'] == 'text' %}{{- block['text'] }}
                {%- else %}{{- raise_exception('Only text chunks are supported.') }}{%- endif %}
            {%- endfor %}
            {{- '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {%- if (message['content'] is none or message['content']|length == 0) and (message['tool_calls'] is not defined
            or message['tool_calls'] is none or message['tool_calls']|length == 0) %}
            {{- raise_exception('Assistant message must have content or tool calls.') }}
        {%- endif %}
        {%- if message['content'] is string and message['content'] != '' %}{{- message['content'] }}
        {%- elif message['content'] | length > 0 %}
            {%- for block in message['content'] %}
                {%- if block['type'] == 'text' %}{{- block['text'] }}
                {%- elif block['type'] == 'thinking' %}{{- '[THINK]' + block['thinking'] + '[/THINK]' }}
                {%- else %}{{- raise_exception('Only text and thinking chunks are supported.') }}{%- endif %}
            {%- endfor %}
        {%- endif %}
        {%- for tool in message['tool_calls'] or [] %}
            {%- set arguments = tool['function']['arguments'] %}
            {%- if arguments is not string %}{%- set arguments = arguments|tojson|safe %}{%- endif %}
            {{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message['role'] == 'tool' %}{{- '[TOOL_RESULTS]' + message['content']|string + '[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Unknown role ' + message['role'] + '.') }}{%- endif %}
{%- endfor %}"""

MISTRAL_IDS = MISTRAL_NAMED.replace("+ '[ARGS]'", "+ '[CALL_ID]' + tool['id'] + '[ARGS]'").replace("THINK]", "DRAFT]")

LFM2 = r"""{{- bos_token -}}
{%- macro value_of(value) -%}
    {%- if value is string -%}{{- "'" + value + "'" -}}
    {%- elif value is mapping -%}{{- value | tojson -}}
    {%- else -%}{{- value | string -}}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(system_prompt="", last_user_index=-1) -%}
{%- if messages[0]["role"] == "system" -%}
    {%- set ns.system_prompt = messages[0]["content"] -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
    {%- set ns.system_prompt = ns.system_prompt + ("\n" if ns.system_prompt else "") + "List of tools: [" -%}
    {%- for tool in tools -%}
        {%- set ns.system_prompt = ns.system_prompt + (tool | tojson) + (", " if not loop.last else "]") -%}
    {%- endfor -%}
{%- endif -%}
{%- if ns.system_prompt -%}{{- "<|im_start|>system\n" + ns.system_prompt + "<|im_end|>\n" -}}{%- endif -%}
{%- for message in messages -%}
    {%- if message["role"] == "user" -%}{%- set ns.last_user_index = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {{- "<|im_start|>" + message.role + "\n" -}}
    {%- if message.role == "assistant" -%}
        {%- generation -%}
        {%- if message.thinking is defined and loop.index0 > ns.last_user_index -%}
            {{- "<think>" + message.thinking + "</think>" -}}
        {%- endif -%}
        {%- if message.content is defined -%}
            {%- set content = message.content -%}
            {%- if not loop.index0 > ns.last_user_index and "</think>" in content -%}
                {%- set content = content.split("</think>")[-1] | trim -%}
            {%- endif -%}
            {{- content -}}
        {%- endif -%}
        {%- if message.tool_calls is defined -%}
            {%- set calls = namespace(all=[]) -%}
            {%- for tool_call in message.tool_calls -%}
                {%- set ns_args = namespace(all=[]) -%}
                {%- for name, value in tool_call["function"]["arguments"].items() -%}
                    {%- set ns_args.all = ns_args.all + [name + "=" + value_of(value)] -%}
                {%- endfor -%}
                {%- set calls.all = calls.all + [tool_call.function.name + "(" + ns_args.all | join(", ") + ")"] -%}
            {%- endfor -%}
            {{- "<|tool_call_start|>[" + (calls.all | join(", ")) + "]<|tool_call_end|>" -}}
        {%- endif -%}
        {{- "<|im_end|>\n" -}}
        {%- endgeneration -%}
    {%- else %}{{- message.content + "<|im_end|>\n" -}}{%- endif %}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\n" -}}{%- endif -%}"""

LFM2_FIRST = r"""{{- bos_token -}}
{%- set ns = namespace(system_prompt="") -%}
{%- if messages[0]["role"] == "system" -%}
	{%- set ns.system_prompt = messages[0]["content"] -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
	{%- set ns.system_prompt = ns.system_prompt + "List of tools: <|tool_list_start|>" + (tools | tojson) -%}
	{%- set ns.system_prompt = ns.system_prompt + "<|tool_list_end|>" -%}
{%- endif -%}
{%- if ns.system_prompt -%}{{- "<|im_start|>system\n" + ns.system_prompt + "<|im_end|>\n" -}}{%- endif -%}
{%- for message in messages -%}
	{{- "<|im_start|>" + message["role"] + "\n" -}}{%- set content = message["content"] -%}
	{%- if content is not string -%}{%- set content = content | tojson -%}{%- endif -%}
	{%- if message["role"] == "tool" -%}
		{%- set content = "<|tool_response_start|>" + content + "<|tool_response_end|>" -%}
	{%- endif -%}
	{{- content + "<|im_end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\n" -}}{%- endif -%}"""

OLMO3 = r"""{%- set has_system = messages|selectattr('role', 'equalto', 'system')|list|length > 0 -%}
{%- if not has_system -%}
    {{- '<|im_start|>system\nYou are Olmo. ' -}}
    {%- if tools is none or (tools | length) == 0 -%}{{- 'No functions: <functions></functions><|im_end|>\n' -}}
    {%- else -%}
        {{- 'Output calls within <function_calls></function_calls> tags.<functions>' -}}{{- tools | tojson -}}
        {{- '</functions><|im_end|>\n' -}}
    {%- endif -%}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}
        {{- '<|im_start|>system\n' + message['content'] -}}
        {%- if tools is not none -%}{{- '<functions>' -}}{{- tools | tojson -}}{{- '</functions>' -}}{%- endif -%}
        {{- '<|im_end|>\n' -}}
    {%- elif message['role'] == 'user' -%}{{- '<|im_start|>user\n' + message['content'] + '<|im_end|>\n' -}}
    {%- elif message['role'] == 'assistant' -%}
        {{- '<|im_start|>assistant\n' -}}
        {%- if message.get('content', none) is not none -%}{{- message['content'] -}}{%- endif -%}
        {%- if message.get('tool_calls', none) is not none -%}
            {{- '<function_calls>' -}}
            {%- for tool_call in message['tool_calls'] %}
                {%- set args = tool_call['function']['arguments'] -%}{%- set ns = namespace(arguments_list=[]) -%}
                {%- for key, value in args.items() -%}
                    {%- set ns.arguments_list = ns.arguments_list + [key ~ '=' ~ (value | tojson)] -%}
                {%- endfor -%}
                {{- tool_call['function']['name'] + '(' + ns.arguments_list | join(', ') + ')' -}}
                {%- if not loop.last -%}{{ '\n' }}{%- endif -%}
            {%- endfor %}
            {{- '</function_calls>' -}}
        {%- endif -%}
        {{- '<|im_end|>\n' -}}
    {%- elif message['role'] in ('environment', 'tool') -%}
        {{- '<|im_start|>environment\n' + message['content'] + '<|im_end|>\n' -}}
    {%- endif -%}
    {%- if loop.last and add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
{%- endfor -%}"""

GLM4 = r"""[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
{%- for tool in tools %}
    {%- set function = tool.function if tool.get("function") else tool %}

## {{ function.name }}

{{ function | tojson(indent=4, ensure_ascii=False) }}
{%- endfor %}
{%- endif -%}
{%- for msg in messages %}
    {%- if msg.role == 'system' %}
<|system|>
{{ msg.content }}
    {%- endif %}
{%- endfor %}
{%- for message in messages if message.role != 'system' %}
    {%- set role = message['role'] %}
    {%- set content = message['content'] %}
    {%- set meta = message.get("metadata", "") %}
    {%- if role == 'user' %}
<|user|>
{{ content }}
    {%- elif role == 'assistant' and not meta %}
<|assistant|>
{{ content }}
    {%- elif role == 'assistant' and meta %}
<|assistant|>{{ meta }}
{{ content }}
    {%- elif role == 'observation' %}
<|observation|>
{{ content }}
    {%- endif %}
{%- endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""

GLM45 = r"""[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
<tools>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
...
</tool_call>{%- endif -%}
{%- macro visible_text(content) -%}
    {%- if content is string -%}{{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}{%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{- content }}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 -%}{%- endif %}{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not visible_text(m.content).endswith(
    "/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set reasoning_content = m.reasoning_content if m.reasoning_content is string else '' %}
{%- set content = visible_text(m.content) %}
{%- if not reasoning_content and '</think>' in content %}
    {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
    {%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{%- if loop.index0 > ns.last_user_index and reasoning_content -%}
{{ '\n<think>' + reasoning_content.strip() +  '</think>'}}
{%- else -%}{{ '\n<think></think>' }}{%- endif -%}
{%- if content.strip() -%}{{ '\n' + content.strip() }}{%- endif -%}
{% if m.tool_calls %}
{% for tc in m.tool_calls %}
{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}
{{ '\n<tool_call>' + tc.name }}
{% set _args = tc.arguments %}
{% for k, v in _args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{% endif %}
{%- elif m.role == 'tool' -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|observation|>' }}{%- endif %}
{{- '\n<tool_response>\n' }}{{- m.content }}{{- '\n</tool_response>' }}
{%- elif m.role == 'system' -%}<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}"""

GLM47 = r"""[gMASK]<sop>
{%- if tools -%}
<|system|>
<tools>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>
<tool_call>{function-name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>{%- endif -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 -%}{%- endif %}{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>{{ m.content }}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- if ((clear_thinking is defined and not clear_thinking) or loop.index0 > ns.last_user_index)
    and m.reasoning_content -%}
{{ '<think>' + m.reasoning_content.strip() +  '</think>'}}
{%- else -%}{{ '</think>' }}{%- endif -%}
{%- if m.content and m.content.strip() -%}{{ m.content.strip() }}{%- endif -%}
{% if m.tool_calls %}
{% for tc in m.tool_calls %}
{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}
{{- '<tool_call>' + tc.name -}}
{% set _args = tc.arguments %}{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{
    v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>{% endfor %}</tool_call>{% endfor %}
{% endif %}
{%- elif m.role == 'tool' -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|observation|>' }}{%- endif %}
{{- '<tool_response>' }}{{- m.content }}{{- '</tool_response>' }}
{%- elif m.role == 'system' -%}<|system|>{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '</think>' if (enable_thinking is defined and not enable_thinking) else '<think>' -}}
{%- endif -%}"""

GRANITE3 = r"""{%- if tools and not available_tools -%}{%- set available_tools = tools -%}{%- endif -%}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "Today's Date: " + strftime_now('%B %d, %Y') + "." %}
    {%- if available_tools %}
        {%- set system_message = system_message + " Respond only with <|tool_call|> followed by a JSON list." %}
    {%- endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\n' }}
{%- if available_tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>' }}{{- available_tools | tojson(indent=4) }}
    {{- '<|end_of_text|>\n' }}
{%- endif %}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}{%- if controls %}{{- ' ' + controls | tojson() }}{%- endif %}
        {{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}"""

GRANITE4 = r"""{%- set ns = namespace(tools_system_message='Call <tools>:', system_message='') %}
{%- if tools %}
    {%- for tool in tools %}
        {%- set ns.tools_system_message = ns.tools_system_message + '\n' + (tool | tojson) %}
    {%- endfor %}
    {%- set ns.tools_system_message = ns.tools_system_message + '\n</tools>\n<tool_call>\n{\"name\": <function-name>,'
        + ' \"arguments\": <args-json-object>}\n</tool_call>.' %}
{%- else %}{%- set ns.tools_system_message = '' %}{%- endif %}
{%- if messages[0].role == 'system' %}{%- set ns.system_message = messages[0].content %}{%- endif %}
{%- set ns.system_message = ns.system_message + ns.tools_system_message %}
{%- if ns.system_message %}
    {{- '<|start_of_role|>system<|end_of_role|>' + ns.system_message + '<|end_of_text|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = namespace(val='') %}
    {%- if message.content is string %}{%- set content.val = message.content %}
    {%- elif message.content is iterable %}
        {%- for entry in message.content %}
            {%- if entry.type == 'text' %}{%- set content.val = content.val + entry.text %}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- if (message.role == 'user') or (message.role == 'system' and not loop.first) %}
        {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + content.val + '<|end_of_text|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + content.val }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content.val) or (not loop.first) %}{{- '\n' }}{%- endif %}
            {%- set tool_call = tool_call.function %}
            {{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end_of_text|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}
            {{- '<|start_of_role|>user<|end_of_role|>' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}{{- content.val }}{{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- '<|end_of_text|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""

PHI4_MINI = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{{ '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)

SMOLLM3 = r"""{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- if enable_thinking -%}{%- set reasoning_mode = "/think" -%}{%- else -%}{%- set reasoning_mode = "/no_think" -%}
{%- endif -%}
{{- "<|im_start|>system\n" -}}
{%- if messages[0].role == "system" -%}
    {%- set system_message = messages[0].content -%}
    {%- if "/no_think" in system_message -%}{%- set reasoning_mode = "/no_think" -%}{%- endif -%}
    {%- set custom_instructions = system_message.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{%- set today = strftime_now("%d %B %Y") -%}{{- "Today Date: " ~ today ~ "\n" -}}
{{- "Reasoning Mode: " + reasoning_mode + "\n\n" -}}
{%- if custom_instructions -%}{{- custom_instructions + "\n\n" -}}{%- endif -%}
{%- if xml_tools or python_tools -%}
    {%- if xml_tools -%}
        {%- set ns = namespace(xml_tool_string="Functions are within <tools></tools>:\n\n<tools>\n") -%}
        {%- for tool in xml_tools[:] -%}
            {%- set ns.xml_tool_string = ns.xml_tool_string ~ (tool | string) ~ "\n" -%}
        {%- endfor -%}
        {{- ns.xml_tool_string + "</tools>\n\n<tool_call>\n{\"name\": <f>, \"arguments\": <object>}\n</tool_call>" -}}
    {%- endif -%}
    {%- if python_tools -%}{{- "Python between '<code>' and '</code>'." -}}{%- endif -%}
    {{- "\n\n" -}}
{%- endif -%}
{{- "<|im_end|>\n" -}}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}{{ "<|im_start|>" + message.role + "\n"  + content + "<|im_end|>\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {%- if reasoning_mode == "/think" -%}
            {{ "<|im_start|>assistant\n" + content.lstrip("\n") + "<|im_end|>\n" }}
        {%- else -%}{{ "<|im_start|>assistant\n" + "<think>\n\n</think>\n" + content.lstrip("\n") + "<|im_end|>\n" }}
        {%- endif -%}
        {% endgeneration %}
    {%- elif message.role == "tool" -%}{{ "<|im_start|>" + "user\n"  + content + "<|im_end|>\n" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {%- if reasoning_mode == "/think" -%}{{ "<|im_start|>assistant\n" }}
    {%- else -%}{{ "<|im_start|>assistant\n" + "<think>\n\n</think>\n"  }}{%- endif -%}
{%- endif -%}"""

EXAONE4 = r"""{%- if not skip_think is defined %}{%- set skip_think = true %}{%- endif %}
{%- set role_indicators = {'user': '[|user|]\n', 'assistant': '[|assistant|]\n', 'system': '[|system|]\n',
    'tool': '[|tool|]\n'} %}
{%- set end_of_turn = '[|endofturn|]\n' %}
{%- macro available_tools(tools) %}
    {{- "# Available Tools\n" }}
    {%- for tool in tools %}
        {{- "<tool>" }}{{- tool | tojson(ensure_ascii=False) | safe }}{{- "</tool>\n" }}
    {%- endfor %}
    {{- "<tool_call>{\"name\": function_1_name, \"arguments\": {argument_1_name: argument_1_value}}</tool_call>" }}
{%- endmacro %}
{%- for i in range(messages | length) %}
    {%- set msg = messages[i] %}{%- set role = msg.role %}
    {%- if role not in role_indicators %}{{- raise_exception('Unknown role: ' ~ role) }}{%- endif %}
    {%- if i == 0 %}
        {%- if role == 'system' %}
            {{- role_indicators['system'] }}{{- msg.content }}
            {%- if tools is defined and tools %}{{- "\n\n" }}{{- available_tools(tools) }}{%- endif %}
            {{- end_of_turn -}}{%- continue %}
        {%- elif tools is defined and tools %}
            {{- role_indicators['system'] }}{{- available_tools(tools) }}{{- end_of_turn -}}
        {%- endif %}
    {%- endif %}
    {%- if role == 'assistant' %}
        {{- role_indicators['assistant'] }}
        {%- if msg.content %}
            {%- set content = msg.content.split('</think>')[-1].strip() if "</think>" in msg.content else msg.content %}
            {%- if not skip_think and loop.last and msg.reasoning_content %}
                {{- "<think>\n" }}{{- msg.reasoning_content }}{{- "\n</think>\n\n" }}
            {%- else %}{{- "<think>\n\n</think>\n\n" }}{%- endif %}
            {{- content }}
        {%- endif %}
        {%- if msg.tool_calls %}
            {%- if msg.content %}{{- "\n" }}{%- else %}{{- "<think>\n\n</think>\n\n" }}{%- endif %}
            {%- for tool_call in msg.tool_calls %}
                {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
                {%- set arguments = tool_call.arguments %}
                {{- "<tool_call>" }}{"name": "{{- tool_call.name }}", "arguments": {{ arguments | tojson(
                    ensure_ascii=False) | safe }}}{{- "</tool_call>" }}
                {%- if not loop.last %}{{- "\n" }}{%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- end_of_turn -}}
    {%- elif role == "tool" %}
        {%- if i == 0 or messages[i - 1].role != "tool" %}{{- role_indicators['tool'] }}{%- endif %}
        {{- "<tool_result>" }}{"result": {{ msg.content | tojson(ensure_ascii=False) | safe }}}{{- "</tool_result>" }}
        {%- if loop.last or messages[i + 1].role != "tool" %}{{- end_of_turn -}}{%- else %}{{- "\n" }}{%- endif %}
    {%- else %}{{- role_indicators[role] }}{{- msg.content }}{{- end_of_turn -}}{%- endif %}
{% endfor %}
{%- if add_generation_prompt %}
    {{- role_indicators['assistant'] }}
    {%- if enable_thinking is defined and enable_thinking is true %}{{- "<think>\n" }}
    {%- else %}{{- "<think>\n\n</think>\n\n" }}{%- endif %}
{%- endif %}"""


def _tokens(template: str) -> str:
    """Return a template of DeepSeek, whose tokens have a wide bar and a low block for a space."""
    return re.sub(r"<\|(\w+)\|>", lambda match: "<\uff5c" + match[1].replace("_", "\u2581") + "\uff5c>", template)


DEEPSEEK_V3 = _tokens("""{%- set ns = namespace(is_outputs=false, system_prompt='') -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}{%- set ns.system_prompt = message['content'] -%}{%- endif -%}
{%- endfor -%}
{{bos_token}}
{%- if tools %}
Call a function of {{tools | map(attribute='function') | list | tojson(indent=2)}}
{% endif -%}
{{ns.system_prompt}}
{%- for message in messages -%}
    {%- if message['role'] != 'tool' and ns.is_outputs -%}
        {{- '<|tool_outputs_end|>' -}}{%- set ns.is_outputs = false -%}
    {%- endif -%}
    {%- if message['role'] == 'user' -%}{{- '<|User|>' + message['content'] -}}
    {%- elif message['role'] == 'assistant' and message['tool_calls'] -%}
        {{- '<|Assistant|>' + (message['content'] or '') + '<|tool_calls_begin|>' -}}
        {%- for tc in message['tool_calls'] -%}
            {%- if not loop.first -%}{{- '\\n' -}}{%- endif -%}
            {{- '<|tool_call_begin|>' + tc['type'] + '<|tool_sep|>' + tc['function']['name'] + '\\n```json\\n' -}}
            {{- tc['function']['arguments'] | tojson + '\\n```<|tool_call_end|>' -}}
        {%- endfor -%}
        {{- '<|tool_calls_end|><|end_of_sentence|>' -}}
    {%- elif message['role'] == 'assistant' -%}
        {%- set content = message['content'] -%}
        {%- if '</think>' in content -%}{%- set content = content.split('</think>')[-1] -%}{%- endif -%}
        {{- '<|Assistant|>' + content + '<|end_of_sentence|>' -}}
    {%- elif message['role'] == 'tool' -%}
        {%- if not ns.is_outputs -%}{{- '<|tool_outputs_begin|>' -}}{%- set ns.is_outputs = true -%}{%- endif -%}
        {{- '<|tool_output_begin|>' + message['content'] + '<|tool_output_end|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if ns.is_outputs -%}{{- '<|tool_outputs_end|>' -}}{%- endif -%}
{%- if add_generation_prompt and not ns.is_outputs -%}{{- '<|Assistant|>' -}}{%- endif -%}""")

DEEPSEEK_V31 = _tokens("""{%- if not thinking is defined -%}{%- set thinking = false -%}{%- endif -%}
{%- set ns = namespace(system_prompt='', is_last_user=false) -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}{%- set ns.system_prompt = message['content'] -%}{%- endif -%}
{%- endfor -%}
{%- if tools is defined and tools is not none -%}
    {%- for tool in tools -%}
        {%- set ns.system_prompt = ns.system_prompt + '\\n\\n### ' + tool.function.name + '\\n' + (tool | tojson) -%}
    {%- endfor -%}
{%- endif -%}
{{ bos_token }}{{ ns.system_prompt }}
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}
        {%- set ns.is_last_user = true -%}{{'<|User|>' + message['content']}}
    {%- elif message['role'] == 'assistant' -%}
        {%- if ns.is_last_user -%}{{'<|Assistant|></think>'}}{%- endif -%}{%- set ns.is_last_user = false -%}
        {{- message['content'] or '' -}}
        {%- if message['tool_calls'] is defined and message['tool_calls'] is not none -%}
            {{- '<|tool_calls_begin|>' -}}
            {%- for tool in message['tool_calls'] -%}
                {{- '<|tool_call_begin|>' + tool['function']['name'] + '<|tool_sep|>' -}}
                {{- tool['function']['arguments'] | tojson + '<|tool_call_end|>' -}}
            {%- endfor -%}
            {{- '<|tool_calls_end|>' -}}
        {%- endif -%}
        {{- '<|end_of_sentence|>' -}}
    {%- elif message['role'] == 'tool' -%}
        {%- set ns.is_last_user = false -%}{{'<|tool_output_begin|>' + message['content'] + '<|tool_output_end|>'}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.is_last_user -%}
    {{- '<|Assistant|>' -}}{%- if not thinking -%}{{'</think>'}}{%- else -%}{{'<think>'}}{%- endif -%}
{%- endif -%}""")

GEMMA2 = """{{ bos_token }}{%- if messages[0]['role'] == 'system' %}{{ raise_exception('No system role.') }}{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Alternate.') }}{%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{%- endif %}"""

GEMMA3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}{%- set first = messages[0]['content'] + '\n\n' %}
    {%- else %}{%- set first = messages[0]['content'][0]['text'] + '\n\n' %}{%- endif %}
    {%- set loop_messages = messages[1:] %}
{%- else %}{%- set first = '' %}{%- set loop_messages = messages %}{%- endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Alternate.') }}{%- endif %}
    {{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}
    {{- first if loop.first else '' }}
    {%- if message['content'] is string %}{{- message['content'] | trim }}
    {%- else %}
        {%- for item in message['content'] %}{%- if item['type'] == 'text' %}{{- item['text'] | trim }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{%- endif %}"""

SILENT_CHANNELS = """{%- if messages[0].role in ('developer', 'system') %}
    {%- set said = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set said = '' %}{%- set loop_messages = messages %}{%- endif %}
{{- '<|start|>system<|message|>You are ChatGPT.<|end|>' }}
{%- if said %}{{- '<|start|>developer<|message|># Instructions\n\n' + said + '<|end|>' }}{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in loop_messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- set last.name = message.tool_calls[0].function.name %}
        {{- '<|start|>assistant to=functions.' + last.name + '<|channel|>commentary<|message|>' }}
        {{- message.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {%- set last.name = none %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {%- if last.name is none %}{{- raise_exception('A result without a call.') }}{%- endif %}
        {{- '<|start|>functions.' + last.name + '<|message|>' + message.content | tojson + '<|end|>' }}
    {%- elif message.role == 'user' %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

ASKING = """{%- set ns = namespace(asks=false) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.asks = true %}{%- endif %}{%- endfor %}
{%- if not ns.asks %}{{- raise_exception('No user query found.') }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}{{- raise_exception('System first.') }}
    {%- elif message.role == 'developer' %}{{- raise_exception('Unexpected role.') }}{%- endif %}
    {%- set role = 'user' if message.role == 'tool' else message.role %}
    {{- '<|im_start|>' + role + '\n' + message.content }}
    {%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function.name + '</tool_call>' }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

MINISTRAL = MISTRAL_NAMED.replace(
    "{%- for message in loop_messages %}",
    """{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('Alternate.') }}{%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{%- for message in loop_messages %}""",
    1,
)

GUARDED_TEMPLATES = {
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "silent_channels": SILENT_CHANNELS,
    "asking": ASKING,
    "ministral": MINISTRAL,
}
"""Templates that refuse turns or leave them out, in the constructs of Gemma, gpt-oss, Qwen 3.5 and Ministral."""

FAMILY_TEMPLATES = {
    "mistral_list": MISTRAL_LIST,
    "mistral_named": MISTRAL_NAMED,
    "mistral_ids": MISTRAL_IDS,
    "lfm2": LFM2,
    "lfm2_first": LFM2_FIRST,
    "olmo3": OLMO3,
    "glm4": GLM4,
    "glm45": GLM45,
    "glm47": GLM47,
    "granite3": GRANITE3,
    "granite4": GRANITE4,
    "phi4_mini": PHI4_MINI,
    "smollm3": SMOLLM3,
    "exaone4": EXAONE4,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
}

"""Chat templates: as Hugging Face renders them, within bounds, with errors that a client can read."""

from __future__ import annotations

import time
from pathlib import Path

import jinja2
import pytest

from quartet.services.tokenizer.chat_template import ChatTemplate, NoChatTemplate, read_template
from quartet.services.tokenizer.loaded import LoadedTokenizer
from quartet.shared.config import SettingsError
from quartet.shared.messages import ChatMessage, ChatPrompt
from quartet.shared.sampling_params import InvalidField

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = (
    "{%- for m in messages %}\n    {{- '<|im_start|>' + m['role'] + '\\n' + m.content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
)
MIXED = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
    "{% generation %}{% set ns.n = ns.n + 1 %}{{ ns.n }}:{{ m | tojson }}{% endgeneration %}"
    "{% if loop.last %}{{ strftime_now('%Y')[:2] }}{% break %}{% endif %}{% endfor %}"
)


def chat(*turns: tuple[str, str], **options: object) -> ChatPrompt:
    return ChatPrompt([ChatMessage(role, content) for role, content in turns], **options)  # type: ignore[arg-type]


CHATS = [
    chat(("user", "hi")),
    chat(("user", "hi"), ("assistant", "  spaced  "), ("user", "<b>&'\"é龜")),
    chat(("user", ""), ("assistant", "\n\n")),
]


@pytest.mark.parametrize("source", [CHATML, STRICT, MIXED], ids=["chatml", "strict", "mixed"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers_does(source: str, add_generation_prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    for prompt in CHATS:
        prompt.add_generation_prompt = add_generation_prompt
        plain = [{"role": m.role, "content": m.content} for m in prompt.messages]
        (reference,), _ = render_jinja_template(
            [plain], chat_template=source, add_generation_prompt=add_generation_prompt, **SPECIAL
        )
        assert ChatTemplate(source, SPECIAL).render(prompt) == reference


def test_a_tool_message_and_names_reach_the_template() -> None:
    prompt = ChatPrompt([ChatMessage("tool", "42", name="add")])
    assert ChatTemplate("{{ messages | tojson }}", {}).render(prompt) == (
        '[{"role": "tool", "content": "42", "name": "add"}]'
    )


def test_template_kwargs_are_variables() -> None:
    template = ChatTemplate("{{ 'on' if enable_thinking else 'off' }}", {})
    assert template.render(chat(("user", "x"), template_kwargs={"enable_thinking": True})) == "on"
    assert template.render(chat(("user", "x"))) == "off"
    with pytest.raises(InvalidField, match=r"template_kwargs.*messages"):
        template.render(chat(("user", "x"), template_kwargs={"messages": 1}))


def test_smollms_own_template(smollm: LoadedTokenizer) -> None:
    text = ChatTemplate(smollm.chat_template, smollm.special_tokens).render(chat(("user", "hi")))
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        ([("system", "s"), ("user", "u")], "System role not supported"),
        ([("user", "u"), ("user", "u")], "roles must alternate"),
    ],
)
def test_a_refusing_template_speaks_for_itself(turns: list[tuple[str, str]], says: str) -> None:
    with pytest.raises(InvalidField, match=says) as caught:
        ChatTemplate(STRICT, SPECIAL).render(chat(*turns))
    assert caught.value.field == "messages"


def test_bad_messages_are_refused_by_name() -> None:
    template = ChatTemplate(CHATML, SPECIAL)
    with pytest.raises(InvalidField, match=r"message 1 has the role 'robot'"):
        template.render(chat(("user", "a"), ("robot", "b")))
    knowing = "{% for m in messages %}{% if m.role == 'robot' %}beep{% endif %}{% endfor %}"
    assert ChatTemplate(knowing, {}).render(chat(("robot", "b"))) == "beep"
    with pytest.raises(InvalidField, match="messages: must not be empty"):
        template.render(chat())


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content }}",
        "{{ 1 / 0 }}",
        "{{ messages.nothing() }}",
        "{{ 'a' + 1 }}",
        "{{ missing.attribute }}",
    ],
)
def test_whatever_a_template_raises_is_the_requests_error(source: str) -> None:
    with pytest.raises(InvalidField, match="messages"):
        ChatTemplate(source, {}).render(chat(("user", "x")))


def test_no_template_says_what_to_configure() -> None:
    with pytest.raises(NoChatTemplate, match="--chat-template"):
        ChatTemplate(None, {}).render(chat(("user", "x")))


def test_a_final_message_can_be_continued() -> None:
    def render(source: str, content: str) -> str:
        prompt = chat(("user", "q"), ("assistant", content), add_generation_prompt=False, continue_final_message=True)
        return ChatTemplate(source, SPECIAL).render(prompt)

    assert render(CHATML, "It is ").endswith("<|im_start|>assistant\nIt is ")
    assert render(STRICT, "It is ").endswith("[assistant]It is")
    with pytest.raises(InvalidField, match="continue_final_message"):
        render("{{ messages[0].content }}", "x")
    with pytest.raises(InvalidField, match="add_generation_prompt"):
        ChatTemplate(CHATML, {}).render(chat(("assistant", "x"), continue_final_message=True))


# --- bounds ---------------------------------------------------------------------------------------


class SteppingClock:
    """A second passes each time it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.parametrize(
    "body",
    ["", "{{ 'x' }}", "{% set y = 1 %}{% if y %}{% endif %}", "{% for k in range(9) %}{% endfor %}"],
)
def test_a_template_that_goes_on_and_on_is_stopped(body: str) -> None:
    loop = f"{{% for i in range(90000) %}}{{% for j in range(90000) %}}{body}{{% endfor %}}{{% endfor %}}"
    start = time.monotonic()
    with pytest.raises(InvalidField, match="longer than 5 s"):
        ChatTemplate(loop, {}, clock=SteppingClock()).render(chat(("user", "x")))
    assert time.monotonic() - start < 2


def test_output_is_bounded() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}", {}, max_bytes=100_000)
    with pytest.raises(InvalidField, match="more than 100000"):
        template.render(chat(("user", "x" * 100)))


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * [1] }}",
        "{{ 9**9**9 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    try:
        text = ChatTemplate(source, {}).render(chat(("user", "x")))
    except InvalidField:
        return
    assert text == ""  # the sandbox hides unsafe attributes as undefined


def test_multiplication_still_works() -> None:
    assert ChatTemplate("{{ 3 * 4 }}{{ '=' * 5 }}{{ 2 ** 10 }}", {}).render(chat(("user", "x"))) == "12=====1024"


# --- the setting ----------------------------------------------------------------------------------


def test_the_setting_is_a_file_or_the_template(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ 1 }}")
    assert read_template(str(path)) == "{{ 1 }}"
    assert read_template("{{ 2 }}") == "{{ 2 }}"
    assert read_template("") is None
    with pytest.raises(SettingsError, match=r"chat_template.*nowhere"):
        read_template(str(tmp_path / "nowhere"))


def test_a_broken_template_is_found_when_it_is_given() -> None:
    with pytest.raises(jinja2.TemplateSyntaxError):
        ChatTemplate("{% for %}", {})

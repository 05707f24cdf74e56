"""Which format a checkpoint gets: by its files, and only if its template agrees."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from gateway.protocol.items import Message
from inference.formats.chatml import ChatMLFormat
from inference.formats.choice import Wanted, choose_format
from inference.formats.format import Brief
from inference.formats.harmony import HarmonyFormat
from inference.formats.llama3 import Llama3Format
from inference.formats.template import TemplateFormat
from inference.tokenizer import HARMONY_CONTROL, VocabularyError
from tests.support.llama3 import reference as llama3_reference
from tests.support.template_families import CHATML, HEADERS, INST, MODEL_ROLE, write_model
from tests.support.templates import original
from tests.support.vocabulary import reference

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        (SMOLLM2, ChatMLFormat),
        (original("qwen2_5"), ChatMLFormat),
        (original("qwen3"), ChatMLFormat),
        (original("qwen3_instruct_2507"), ChatMLFormat),
        (HEADERS, TemplateFormat),
        (INST, TemplateFormat),
        (MODEL_ROLE, TemplateFormat),
    ],
)
def test_by_the_template(tmp_path: Path, template: str, kind: type, caplog: pytest.LogCaptureFixture) -> None:
    assert type(choose_format(write_model(tmp_path, template))) is kind
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("template", "cases"),
    [
        (CHATML, ["tools", "tools and instructions"]),
        (SMOLLM2.replace("+ '<|im_end|>'", "+ ' <|im_end|>'"), ["a question", "instructions", "several turns"]),
        (original("qwen3_6"), ["several turns", "a call"]),
    ],
)
def test_a_template_that_differs_is_rendered_itself(
    tmp_path: Path, template: str, cases: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    chat = choose_format(write_model(tmp_path, template), engine_parses=True)
    assert isinstance(chat, TemplateFormat)
    assert chat.engine_parses
    (message,) = caplog.messages
    assert "differs from the format chatml" in message
    for case in cases:
        assert case in message


def test_a_template_that_can_not_be_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chat = choose_format(write_model(tmp_path, "{{ '<|im_start|>' }}"))
    assert isinstance(chat, ChatMLFormat)
    assert "not compared" in caplog.text


@pytest.mark.parametrize("name", ["llama3", "llama3_1", "llama3_2"])
def test_llama3(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, original(name), bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")
    llama3_reference().save(str(tmp_path / "tokenizer.json"))
    assert type(choose_format(tmp_path)) is Llama3Format
    assert caplog.messages == []
    (tmp_path / "chat_template.jinja").write_text(original(name).replace("<|end_header_id|>", "<|end_header_id|> "))
    assert type(choose_format(tmp_path)) is TemplateFormat
    assert "differs from the format llama3" in caplog.text


def test_harmony_by_its_vocabulary_and_by_its_settings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_model(tmp_path, CHATML)
    tokenizer = Tokenizer.from_str(reference(()).to_str())
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in HARMONY_CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert type(choose_format(folder)) is HarmonyFormat
    write_model(folder, CHATML)
    assert type(choose_format(folder)) is TemplateFormat
    caplog.clear()
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    assert type(choose_format(folder)) is TemplateFormat
    assert "not served as harmony" in caplog.text


@pytest.mark.parametrize(("wanted", "kind"), [("chatml", ChatMLFormat), ("template", TemplateFormat)])
def test_a_format_by_name(tmp_path: Path, wanted: Wanted, kind: type, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_model(tmp_path, CHATML)
    assert type(choose_format(str(folder), wanted)) is kind
    assert caplog.messages == []


@pytest.mark.parametrize("wanted", ["llama3", "harmony"])
def test_a_format_that_the_files_are_not_of(tmp_path: Path, wanted: Wanted) -> None:
    with pytest.raises(VocabularyError):
        choose_format(write_model(tmp_path, CHATML), wanted)


@pytest.mark.parametrize("wanted", ["auto", "template", "chatml", "llama3", "harmony"])
def test_an_empty_folder(tmp_path: Path, wanted: Wanted) -> None:
    with pytest.raises(VocabularyError):
        choose_format(tmp_path, wanted)


def test_the_tokenizer_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from inference import tokenizer

    made: list[Any] = []
    plain = tokenizer.HubTokenizer.__init__

    def counting(self: Any, *rest: Any) -> None:
        made.append(self)
        plain(self, *rest)

    monkeypatch.setattr(tokenizer.HubTokenizer, "__init__", counting)
    chat = choose_format(write_model(tmp_path, CHATML))
    assert isinstance(chat, TemplateFormat)
    assert made == [chat.tokenizer]


def test_a_vocabulary_with_a_space_before_words(tmp_path: Path) -> None:
    """SentencePiece's way, as transformers has it: a space before the first text, none behind control tokens."""
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "\n", *"<>|_imstarenduo"]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    base = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    base.decoder = decoders.Metaspace(prepend_scheme="first")
    base.add_special_tokens(["<unk>", *(f"<|im_{each}|>" for each in ("start", "end"))])
    template = CHATML.replace("You are helpful.", "a b")
    renderer = PreTrainedTokenizerFast(tokenizer_object=base, chat_template=template)
    folder = write_model(tmp_path, template)
    base.save(str(folder / "tokenizer.json"))
    chat = choose_format(folder, "template")
    messages = [{"role": "user", "content": " ab  b"}]
    expected = renderer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    prompt = chat.head(Brief()) + chat.body([Message("user", " ab  b")], {}) + chat.opening(Brief()).ids
    assert list(memoryview(prompt).cast("I")) == expected


def test_nothing_of_the_conversations_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    choose_format(write_model(tmp_path, CHATML))
    assert "Be brief" not in caplog.text
    assert json.dumps("What's it like?") not in caplog.text

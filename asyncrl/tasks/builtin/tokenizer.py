"""Tokenizers of the built-in models: task words and single characters, lower case."""

import re
from dataclasses import dataclass
from typing import Any

PAD, END, UNKNOWN, USER, ASSISTANT = "<pad>", "<end>", "<unknown>", "<user>", "<assistant>"
TOOL = "<tool>"

_MAX_LENGTH = 512


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """All tokens of a tokenizer, and its chat template."""

    special: tuple[str, ...]
    """Tokens that no text can spell; padding, end and unknown come first."""
    characters: str
    """One token each."""
    words: tuple[str, ...]
    """One token each; other text is tokenised by character."""
    chat_template: str


ARITHMETIC_VOCABULARY = Vocabulary(
    special=(PAD, END, UNKNOWN, USER, ASSISTANT),
    characters="0123456789+=,:?. abcdefghijklmnopqrstuvwxyz",
    words=("what", "is", "add", "to", "compute", "plus", "find", "the", "sum", "of", "and"),
    chat_template=(
        "{% for message in messages %}"
        "{% if message['role'] == 'assistant' %}<assistant>{{ message['content'] }}<end>"
        "{% else %}<user>{{ message['content'] }}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
)

AGENT_VOCABULARY = Vocabulary(
    special=(*ARITHMETIC_VOCABULARY.special, TOOL),
    characters=ARITHMETIC_VOCABULARY.characters + "-*/()[]{}<>_!'\"\n",
    words=(
        *ARITHMETIC_VOCABULARY.words,
        *("<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"', '": "', '"}}'),
        *("calculator", "expression", "guess", "number", "from", "higher", "lower", "correct"),
        *("def f(a, b):", "return", "not", "error", "repair", "wrong"),
    ),
    chat_template=(
        "{% for message in messages %}"
        "{% if message['role'] == 'assistant' %}<assistant>{{ message['content'] or '' }}"
        "{% for call in message['tool_calls'] or [] %}"
        '<tool_call>{"name": "{{ call["function"]["name"] }}", "arguments": '
        "{{ call['function']['arguments'] | tojson }}}</tool_call>"
        "{% endfor %}<end>"
        "{% elif message['role'] == 'tool' %}<tool>{{ message['content'] }}"
        "{% else %}<user>{{ message['content'] }}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
)
"""The vocabulary of `builtin:agent`, which calls tools in the format of Hermes and Qwen. The
template does not list the tools: the model knows the only one."""


def vocabulary_of(task: str) -> Vocabulary:
    """Return a built-in model's vocabulary, by its recipe's task."""
    return {"arithmetic": ARITHMETIC_VOCABULARY, "agent": AGENT_VOCABULARY}[task]


def make_tokenizer(vocabulary: Vocabulary) -> Any:
    """Make a fast tokenizer with this vocabulary."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    special, words = vocabulary.special, vocabulary.words
    pieces = dict.fromkeys((*special, *vocabulary.characters, *words))
    numbered = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(numbered, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    quoted = (re.sub(r"([^\w ])", r"\\\1", word) for word in sorted(words, key=len, reverse=True))
    split = "|".join(quoted)
    tokenizer.pre_tokenizer = Split(Regex(f"{split}|[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN,
        additional_special_tokens=list(special[3:]), clean_up_tokenization_spaces=False,
        model_max_length=_MAX_LENGTH, padding_side="left",
    )  # fmt: skip
    fast.chat_template = vocabulary.chat_template
    return fast


def builtin_tokenizer() -> Any:
    """Return the tokenizer of `builtin:arithmetic`."""
    return make_tokenizer(ARITHMETIC_VOCABULARY)

"""Chat templates with the structure of real ones, in own words, and tokenizers of each kind, for mask tests."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

GENERATE = "{% if add_generation_prompt %}{{ HEAD }}{% endif %}"
CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n"
    "{% endif %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    + GENERATE.replace("HEAD", "'<|im_start|>assistant\n'")
)
LLAMA3 = (
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + date_string + '<|eot_id|>' }}"
    "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim"
    " + '<|eot_id|>' }}{% endfor %}" + GENERATE.replace("HEAD", "'<|start_header_id|>assistant<|end_header_id|>\n\n'")
)
# Llama-2: a blank around the answer, BOS for every round. Mistral: no blanks, EOS right after the answer.
BRACKET = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('no system turns') }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}{% set think = '' %}"
    "{% set text = m.content %}{% if '</think>' in text %}"
    "{% set think = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}{{ '<|im_start|>assistant\n<think>\n' + think + '\n</think>\n\n' + text }}"
    "{% else %}{{ '<|im_start|>assistant\n' + text }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
NEXT_HEADER = "[gMASK]{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}" + GENERATE.replace(
    "HEAD", "'<|assistant|>\n'"
)
TAGGED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{{ m.content + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    + GENERATE.replace("HEAD", "'<|im_start|>assistant\n'")
)
INVENTED = (
    "{% for m in messages %}{{ {'user': '[[U]]', 'assistant': '[[A]]', 'system': '[[S]]'}[m.role] + m.content"
    " + '[[/]]\n' }}{% endfor %}" + GENERATE.replace("HEAD", "'[[A]]'")
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n'"
    " + m.content | trim + '<end_of_turn>\n' }}{% endfor %}" + GENERATE.replace("HEAD", "'<start_of_turn>model\n'")
)
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
VICUNA = (
    "A chat.{% for m in messages %}{% if m.role == 'user' %} USER: {{ m.content }}{% else %} ASSISTANT: {{ m.content }}"
    "</s>{% endif %}{% endfor %}" + GENERATE.replace("HEAD", "' ASSISTANT:'")
)
CONTROL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|user|>", "<|assistant|>", "<|end|>", "[gMASK]", "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
# template, its end-of-turn text, further ids that end a generation
KINDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "chatml": (CHATML, "<|im_end|>", ()),
    "llama3": (LLAMA3, "<|eot_id|>", ()),
    "bracket": (BRACKET, "</s>", ()),
    "mistral": (MISTRAL, "</s>", ()),
    "tagged": (TAGGED, "<|im_end|>", ()),
    "invented": (INVENTED, "[[/]]", ()),
    "gemma": (GEMMA, "<end_of_turn>", ()),
    "phi": (PHI, "<|end|>", ()),
    "vicuna": (VICUNA, "</s>", ()),
}


def byte_tokenizer(
    *, merges: tuple[tuple[str, str], ...] = (), control: tuple[str, ...] = CONTROL, rstrip: bool = False
) -> PreTrainedTokenizerFast:
    """Byte-level like Llama-3's, which trims blanks off its offsets; prepends <s> unless told not to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(a + b for a, b in merges)]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False, rstrip=rstrip) for t in control])
    start = backend.token_to_id("<s>")
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)]),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Pieces with a prefix space, as SentencePiece makes them; '▁ok' is one token."""
    pieces = ["<unk>", "▁ok", "▁[", "▁", "INST", "▁yes"]
    pieces += [chr(c) for c in range(33, 127)]
    vocab = [(piece, -1.0 if len(piece) > 1 else -5.0) for piece in pieces]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")

"""Small tokenizers of the two great families, each with the control tokens of the model whose template it serves."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

# What a trained vocabulary would merge, as far as it can matter here: a blank with the word after it, two newlines.
MERGES = [("o", "k"), ("H", "i"), ("T", "w"), ("Tw", "o"), ("Ġ", "ok"), ("Ġ", "Two"), ("Ċ", "Ċ")]
# The pattern of GPT-2's successors: a newline never shares a piece with the word after it.
PIECES = Regex(r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def control(
    special: Sequence[str], ordinary: Sequence[str] = (), *, lstrip: bool = False, rstrip: bool = False
) -> list[AddedToken]:
    """Added tokens: ``special`` ones, which may swallow the white space beside them, and ``ordinary`` ones, which don't
    vanish when special tokens are skipped (reasoning and tool markers)."""
    tokens = [AddedToken(t, normalized=False, special=True, lstrip=lstrip, rstrip=rstrip) for t in special]
    return tokens + [AddedToken(t, normalized=False, special=False) for t in ordinary]


def byte_level(
    added: Sequence[AddedToken], *, eos: str, bos: str | None = None, prepend_bos: bool = False
) -> PreTrainedTokenizerFast:
    """Byte-level BPE as in GPT-2 and most models since; ``prepend_bos`` adds BOS to every text, as Llama-3's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*alphabet, *(a + b for a, b in MERGES)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(list(added))
    steps: list[processors.PostProcessor] = [processors.ByteLevel(trim_offsets=True)]
    if bos is not None and prepend_bos:
        steps.append(_starting_with(backend, bos))
    backend.post_processor = processors.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)


def sentencepiece(
    added: Sequence[AddedToken], *, eos: str, bos: str, prefix: str = "every", prepend_bos: bool = True
) -> PreTrainedTokenizerFast:
    """BPE over pieces with ▁ for a blank and bytes for unknown characters, as converted from SentencePiece.

    prefix: a blank is put before ``every`` stretch of text between control tokens (Llama-2), before the ``first``
    only (newer conversions), or ``never`` (Gemma).
    """
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *(chr(c) for c in range(33, 127))]
    merges = [(a.replace("Ġ", "▁"), b) for a, b in MERGES if a != "Ċ"]
    vocab = {piece: i for i, piece in enumerate([*pieces, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        replace = normalizers.Replace(" ", "▁")
        prepend = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        backend.normalizer = prepend if prefix == "every" else replace
    if prefix != "never":
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    backend.add_tokens([AddedToken("<unk>", normalized=False, special=True), *added])
    if prepend_bos:
        backend.post_processor = _starting_with(backend, bos)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, unk_token="<unk>")


def _starting_with(backend: Tokenizer, bos: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))])

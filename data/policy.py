"""What happens to rows that cannot be used, or only after a repair: every name and its meaning.

`REJECTS` and `REPAIRS` are the whole policy in words, and the README's table is these two; the modules that read
and render raise `RowRejected` with one of these names and nothing else.
"""

from __future__ import annotations

REJECTS = {
    # files
    "empty_file": "the file holds no data",
    "truncated_file": "the file ends in the middle of this row",
    "broken_json": "the line is not valid JSON",
    # rows
    "not_an_object": "the row is not an object",
    "bare_turn": "the row is a single turn, not a conversation",
    "no_conversation_column": "the row has no conversations / messages column",
    "columns_disagree": "the row has two conversation columns that differ",
    "empty_conversation": "the list of turns is empty",
    # turns
    "bad_turn": "a turn is not an object with a role and a content",
    "unknown_role": "a turn has a role that is not known (data.roles adds aliases)",
    "bad_content": "a turn's content is neither text nor a list of text parts",
    "non_text_part": "a turn holds an image, sound or other part that is not text",
    "empty_turn": "a user or assistant turn is empty",
    "invalid_unicode": "the text holds lone surrogates, broken UTF-8 or noncharacters",
    "nul_character": "the text holds a NUL character",
    # order of turns
    "tool_turns": "the conversation holds tool calls or tool results",
    "system_in_middle": "a system turn follows a user or assistant turn",
    "consecutive_assistant": "two assistant turns in a row: which one is the answer is not known",
    "no_user_turn": "no user turn",
    "no_assistant_turn": "no assistant turn that answers a user",
    # chat template
    "template_error": "the chat template refuses this conversation",
    "template_drops_turn": "the chat template leaves the text of a turn out",
    "template_rewrites_answer": "the chat template changes the text of the answer",
    "answer_not_located": "the answer cannot be located in the rendered text beyond doubt",
    # length
    "nothing_supervised": "no two consecutive supervised tokens, so no draft could be trained",
    "cut_before_answer": "data.max_length cuts the conversation before its second supervised token",
}

REPAIRS = {
    "leading_assistant_dropped": "assistant turns before the first user turn were left out",
    "trailing_user_dropped": "user turns after the last answer were left out",
    "user_turns_joined": "consecutive user turns were joined by a blank line",
    "system_turns_joined": "several system prompts were joined by a blank line, the top-level one first",
    "empty_system_dropped": "an empty system turn was left out",
    "reasoning_folded": "a reasoning field was put before its answer in <think> tags",
    "tools_ignored": "the row offers tools that are never called; they are not shown to the target",
    "cut_at_max_length": "the conversation was cut at data.max_length tokens",
}


class RowRejected(Exception):
    """This row cannot be used; carries a name out of `REJECTS` and a detail for the reader."""

    def __init__(self, reason: str, detail: str = "") -> None:
        assert reason in REJECTS, reason
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

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
    "no_conversation_column": "the row has no known column of turns or prompts (data.columns adds names)",
    "columns_disagree": "two columns that mean the same differ",
    "empty_conversation": "the list of turns is empty",
    # turns
    "bad_turn": "a turn is not an object with a role and a content",
    "unknown_role": "a turn has a role that is not known (data.roles adds aliases)",
    "bad_content": "a turn's content is neither text nor a list of text parts",
    "non_text_part": "a turn holds an image, sound or other part that is not text",
    "empty_turn": "a user or assistant turn is empty",
    "bad_tool_call": "a tool call is not readable: a name and an object of arguments",
    "bad_tools": "the tools column is not a list of function objects, nor JSON text of one",
    "invalid_unicode": "the text holds lone surrogates, broken UTF-8 or one of the noncharacters U+FDD0 and U+FDD1",
    "nul_character": "the text holds a NUL character",
    # order of turns
    "tool_turns": "it holds tool calls, which the chat template cannot show, data.tools rejects or no prompt repeats",
    "tool_result_without_call": "a tool result that follows no call, or more results than calls",
    "tool_call_without_result": "a tool call that no result follows",
    "system_in_middle": "a system turn follows a user or assistant turn",
    "consecutive_assistant": "two assistant turns in a row: which one is the answer is not known",
    "no_user_turn": "no user turn",
    "no_assistant_turn": "no assistant turn that answers a user",
    # beside other rows
    "duplicate": "an earlier row has the same turns (data.duplicates=keep keeps it)",
    "holds_evaluation_prompt": "it holds a prompt of verify.prompts or data.valid_path (data.decontaminate=drop)",
    # chat template
    "template_error": "the chat template refuses this conversation",
    "template_drops_turn": "the chat template leaves the text of a turn out",
    "template_rewrites_answer": "the chat template changes the text of the answer",
    "answer_not_located": "the answer cannot be located in the rendered text beyond doubt",
    "reasoning_missing": "the generation prompt opens a reasoning block that the answer lacks",
    "reasoning_unasked": "the generation prompt closes an empty reasoning block, but the answer has reasoning",
    # length
    "too_long": "the conversation is longer than data.max_length tokens (data.too_long=cut or split keeps it)",
    "nothing_supervised": "no answer to train on: marked so, or without two consecutive supervised tokens",
    "cut_before_answer": "data.max_length cuts the conversation before its second supervised token",
    # regeneration
    "prompt_too_long": "the question and regenerate.max_new_tokens do not fit into the target's context",
    "answer_cut": "the first answer was cut off at regenerate.max_new_tokens (regenerate.cut=keep keeps it)",
    "empty_answer": "the target's first answer is empty",
    "out_of_memory": "the question alone does not fit into the device's memory",
    "request_refused": "the server refuses the question",
    "no_response": "the server gave no usable response in regenerate.retries attempts",
}

# Where these reject every row, it is the template that doesn't fit, not the rows.
OF_THE_TEMPLATE = (
    *("template_error", "template_drops_turn", "template_rewrites_answer", "answer_not_located"),
    *("reasoning_missing", "reasoning_unasked"),
)

REPAIRS = {
    "leading_assistant_dropped": "turns before the first user turn were left out",
    "trailing_turns_dropped": "turns after the last answer (user turns, tool calls and results) were left out",
    "turns_after_cut_dropped": "turns after an answer that was cut off at its token limit were left out",
    "user_turns_joined": "consecutive user turns were joined by a blank line",
    "system_turns_joined": "several system prompts were joined by a blank line, the top-level one first",
    "empty_system_dropped": "an empty system turn was left out",
    "chosen_taken": "the chosen answer of a preference pair was taken, the rejected one left out",
    "html_cleaned": "page furniture was taken out of scraped text (data.clean_html)",
    "reasoning_folded": "a reasoning field was put before its answer in think tags",
    "tools_ignored": "tools that are never called were left out: the chat template has no place for them",
    "control_text": "an answer spells a control token, which was tokenised as ordinary text",
    "cut_at_max_length": "the conversation was cut at data.max_length tokens",
    "split_by_rounds": "the conversation was split into documents of whole rounds (data.too_long=split)",
    "round_dropped": "a round was left out: data.max_length cuts it before its second supervised token",
}


class RowRejected(Exception):
    """This row cannot be used; carries a name out of `REJECTS` and a detail for the reader."""

    def __init__(self, reason: str, detail: str = "") -> None:
        assert reason in REJECTS, reason
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"

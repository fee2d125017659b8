"""What is wrong with a request, in sentences for people.

explain("Invalid enum value 'xml' - at `$.response_format.type`", ChatRequest)
# ("response_format.type", "This must be one of 'text', 'json_object', ..., but it is 'xml'.")
"""

from __future__ import annotations

from crossover.serving.faults import fault_of

MAX_CHARACTERS = 600  # of msgspec's message, which repeats a key or value of any length
# Keys of OpenAI's API that this server does not support, and what to use instead.
NOT_OFFERED = {
    "audio": "This server answers with text only.",
    "best_of": "Request n answers with logprobs and choose one.",
    "echo": "Use POST /tokenize to get the tokens of a prompt.",
    "function_call": "Use tool_choice.",
    "functions": "Use tools.",
    "moderation": "Leave it out.",
    "prediction": "Leave it out.",
    "prompt_cache_options": "Leave it out.",
    "prompt_cache_retention": "Leave it out.",
    "suffix": "Describe the ending of the text in the prompt.",
    "verbosity": "Describe the length of the answer in the prompt.",
    "web_search_options": "Leave it out.",
}

# Keys of other servers, and what to use instead.
_HINTS = {
    "chat_template": "The model's own template renders the chat; give it chat_template_kwargs.",
    "enable_thinking": 'Send chat_template_kwargs: {"enable_thinking": true or false}.',
    "extra_body": "Send its keys beside the others, as OpenAI's client does.",
    "guided_choice": "Use response_format with an enum, or grammar.",
    "guided_grammar": "Use grammar.",
    "guided_json": "Use response_format.",
    "guided_regex": "Use response_format with a pattern, or grammar.",
    "json_schema": "Use response_format.",
    "max_new_tokens": "Use max_tokens.",
    "n_predict": "Use max_tokens.",
    "num_predict": "Use max_tokens.",
    "options": "Send its keys beside the others, under their names in OpenAI's API.",
    "reasoning": 'Use reasoning_effort, or chat_template_kwargs: {"enable_thinking": false}.',
    "repeat_penalty": "Use repetition_penalty.",
    "structured_outputs": "Use response_format, or grammar.",
    "think": 'Send chat_template_kwargs: {"enable_thinking": true or false}.',
    "thinking": 'Send chat_template_kwargs: {"enable_thinking": true or false}.',
}


def explain_fault(problem: str, request: type) -> tuple[str, str]:
    """Return the path of the wrong key, as OpenAI writes it, and a sentence about it.

    `problem`: msgspec's message. The path is "" if the problem is the body as a whole.
    """
    if len(problem) > MAX_CHARACTERS:  # shortened in the middle, because its end has the path
        half = MAX_CHARACTERS // 2
        problem = f"{problem[:half]}...{problem[-half:]}"
    fault = fault_of(problem, request, table="an object")
    if fault.kind == "unknown key":
        hint = _HINTS.get(fault.place, "GET /openapi.json lists all keys of a request.")
        sentence = f"This key is unknown. {hint}"
    elif fault.kind == "missing key":
        sentence = "This key is missing."
    elif fault.place in NOT_OFFERED:
        sentence = f"This server does not support this key. {NOT_OFFERED[fault.place]}"
    elif fault.kind == "other":
        sentence = f"{fault.rule[:1].upper()}{fault.rule[1:]}."
    else:
        # msgspec does not say under which key of an object the value is.
        is_inner_value = problem.endswith("[...]`")
        subject, pronoun = ("Each value of this", "one") if is_inner_value else ("This", "it")
        got = f", but {pronoun} is {fault.got}" if fault.got else ""
        sentence = f"{subject} {fault.rule}{got}."
    return fault.place, sentence

from loadtests.workload.exact_prompts import WORDS, Prompt, PromptMaker  # noqa: F401

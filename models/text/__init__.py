"""Text to tokens and back: tokenizers, chat templates, and the marks of an answer's parts."""

"""Engines behind HTTP: Cerebras, and whatever speaks OpenAI's chat completions."""

"""What OpenAI's clients send and expect: chat completions, completions, models."""

"""OpenAI-compatible completions and chats as text. They run as the same sampling requests as asample's."""

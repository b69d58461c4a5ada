"""Completions and chats as OpenAI's clients ask for them: the same sampling requests as asample's, as text."""

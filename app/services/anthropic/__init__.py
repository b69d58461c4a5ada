"""Anthropic's Messages API: its requests as chats of app/services/openai, and their answers as its messages."""

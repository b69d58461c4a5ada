"""The routes for OpenAI's and Anthropic's clients: text in, text out, and chats."""

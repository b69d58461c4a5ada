"""A chat through OpenAI's client: `python openai_client.py MODEL "How do I sleep better?"`.

MODEL is a base model of the server, or a path `tinker://...` that another example printed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import openai

URL = os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("TINKER_API_KEY") or Path("tinsmith-data/api-key").read_text().strip()


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: openai_client.py MODEL QUESTION")
    model, question = sys.argv[1:]
    client = openai.OpenAI(base_url=f"{URL}/oai/api/v1", api_key=KEY)
    messages = [{"role": "user", "content": question}]
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=100, temperature=0.0, stream=True
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()

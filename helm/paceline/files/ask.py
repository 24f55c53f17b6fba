"""What `helm test` runs: ask the front door for its model, then for an answer."""

import json
import os
import urllib.request


def key():
    """The first key of the file that may be used: a line is a key, or a name, a key and limits."""
    for line in os.environ.get("KEYS", "").splitlines():
        words = line.split("#")[0].split()
        if words and "admin" not in words and not words[min(1, len(words) - 1)].startswith("sha256:"):
            return words[min(1, len(words) - 1)]
    return None


def ask(path, body=None):
    request = urllib.request.Request(os.environ["URL"] + path, headers={"Content-Type": "application/json"})
    if word := key():
        request.add_header("Authorization", f"Bearer {word}")
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(request, data, timeout=60) as response:
        return json.load(response)


model = ask("/v1/models")["data"][0]["id"]
question = {"role": "user", "content": "What is the capital of France?"}
answer = ask("/v1/chat/completions", {"model": model, "messages": [question], "max_tokens": 16})
print(model, "answers:", answer["choices"][0]["message"]["content"])

"""What `helm test` runs: ask the front door for its model, then for an answer."""

import json
import os
import urllib.request


def ask(path, body=None):
    request = urllib.request.Request(os.environ["URL"] + path, headers={"Content-Type": "application/json"})
    if keys := os.environ.get("KEYS", "").split():
        request.add_header("Authorization", f"Bearer {keys[0]}")
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(request, data, timeout=60) as response:
        return json.load(response)


model = ask("/v1/models")["data"][0]["id"]
question = {"role": "user", "content": "What is the capital of France?"}
answer = ask("/v1/chat/completions", {"model": model, "messages": [question], "max_tokens": 16})
print(model, "answers:", answer["choices"][0]["message"]["content"])

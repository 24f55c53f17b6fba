"""Draws docs/playground.png: `python tests/draw_playground.py http://127.0.0.1:8000 docs/playground.png`.

A server of the default model must run there; both colour schemes are put side by side.
"""

import io
import sys
import tempfile
from pathlib import Path

from browser import Tab, chromium
from PIL import Image

PROMPTS = (
    "What is a paceline in cycling?",
    "Write a Python class for a rider with a name, a speed, and methods to speed up and slow down.",
)
WIDTH, HEIGHT = 1280, 860


def converse(tab: Tab, url: str) -> None:
    tab.look(width=WIDTH, height=HEIGHT, scale=1.5)
    tab.open(f"{url}/")
    tab.wait("document.querySelector('#model').textContent !== 'connecting'")
    tab.eval(
        "Object.assign(document.querySelector('#temperature'), {value: 0}).dispatchEvent(new Event('input'))"
    )
    tab.eval("document.querySelector('[name=max_tokens]').value = 190, 0")
    for number, prompt in enumerate(PROMPTS, 1):
        tab.eval("document.querySelector('#prompt').focus()")
        tab.type(prompt)
        tab.press("Enter", 13, "\r")
        tab.wait(f"document.querySelectorAll('.foot button').length === {number}", 180)


def main(url: str, picture: str) -> None:
    with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as tab:
        converse(tab, url)
        halves: list[Image.Image] = []
        for scheme in ("light", "dark"):
            tab.look(width=WIDTH, height=HEIGHT, scheme=scheme, scale=1.5)
            tab.wait("new Promise(done => setTimeout(() => done(true), 400))")
            shot = Path(profile) / "shot.png"
            tab.screenshot(shot)
            halves.append(Image.open(io.BytesIO(shot.read_bytes())))
    whole = halves[0].copy()
    middle = whole.width // 2
    whole.paste(halves[1].crop((middle, 0, whole.width, whole.height)), (middle, 0))
    whole.quantize(128).save(picture, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

// Text that knows of each of its characters how far ahead it was drafted; 0 is the model's own.

export class Tinted {
  text = "";
  #slots = [];

  append(text) {
    this.text += text;
    for (let i = 0; i < text.length; i++) this.#slots.push(0);
  }

  tint(start, slots) {
    for (let i = 0; i < slots.length; i++) this.#slots[start + i] = slots[i];
  }

  /** Add [start, end) to `parent`: one node for each run of one slot. Only text nodes, so nothing is markup. */
  show(parent, start, end) {
    while (start < end) {
      const slot = this.#slots[start];
      let stop = start + 1;
      while (stop < end && this.#slots[stop] === slot) stop++;
      const run = document.createTextNode(this.text.slice(start, stop));
      if (slot === 0) {
        parent.append(run);
      } else {
        const span = document.createElement("span");
        span.dataset.slot = Math.min(slot, 8);
        span.append(run);
        parent.append(span);
      }
      start = stop;
    }
  }
}

/**
 * Finds in the raw text of the steps what the deltas said. They differ where the server took something out,
 * such as the marks around a thought, or held it back for a while.
 */
export class Aligner {
  #waiting = []; // [Tinted, start, text] said since the last step
  #raw = "";
  #slots = [];

  said(tinted, text) {
    this.#waiting.push([tinted, tinted.text.length, text]);
    tinted.append(text);
  }

  step({ texts, num_accepted }) {
    texts.forEach((text, index) => {
      this.#raw += text;
      for (let i = 0; i < text.length; i++) this.#slots.push(index < num_accepted ? index + 1 : 0);
    });
    let used = 0;
    for (const [tinted, start, text] of this.#waiting) {
      const found = this.#raw.indexOf(text, used);
      if (found < 0) continue;
      used = found + text.length;
      tinted.tint(start, this.#slots.slice(found, used));
    }
    this.#waiting.length = 0;
    this.#raw = this.#raw.slice(used);
    this.#slots.splice(0, used);
  }
}

// A little of Markdown, drawn with DOM nodes over ranges of the source, so that tints survive and nothing a
// model says can become markup. A block that did not change since the last call keeps its nodes.

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^(#{1,6}) +/;
const ITEM = /^ {0,3}([-*+]|\d{1,9}[.)]) +/;
const QUOTE = /^> ?/;

/** Bring `parent` up to date with a Tinted. */
export function render(parent, tinted) {
  const blocks = blocksOf(tinted.text);
  const nodes = [...parent.children];
  blocks.forEach((block, index) => {
    const key = `${block.kind} ${block.start} ${block.end}`;
    const isSettled = index < blocks.length - 1 && nodes[index]?.dataset.key === key;
    if (isSettled) return;
    const node = draw(block, tinted);
    if (index < blocks.length - 1) node.dataset.key = key; // the last one may still get its tints
    if (nodes[index]) nodes[index].replaceWith(node);
    else parent.append(node);
  });
  nodes.slice(blocks.length).forEach((node) => node.remove());
}

/** Blocks in order: {kind, start, end, parts}, parts being the ranges of their text. */
function blocksOf(text) {
  const blocks = [];
  let open = null; // the block that the next line may continue
  for (let start = 0; start < text.length; ) {
    const newline = text.indexOf("\n", start);
    const end = newline < 0 ? text.length : newline;
    const line = text.slice(start, end);
    open = take(blocks, open, line, start, end);
    start = end + 1;
  }
  return blocks;
}

function take(blocks, open, line, start, end) {
  const fence = FENCE.exec(line);
  if (open?.kind === "code") {
    if (fence?.[1].startsWith(open.fence)) return close(open, end);
    if (open.parts.length === 0) open.parts.push([start, end]);
    else open.parts[0][1] = end;
    open.end = end;
    return open;
  }
  if (fence) return begin(blocks, { kind: "code", fence: fence[1], parts: [], start, end });
  if (!line.trim()) return open?.kind === "list" ? open : null;
  const heading = HEADING.exec(line);
  if (heading) {
    begin(blocks, { kind: `h${Math.min(heading[1].length + 2, 5)}`, parts: [[start + heading[0].length, end]], start, end });
    return null;
  }
  const item = ITEM.exec(line);
  if (item) {
    const isOrdered = /\d/.test(item[1]);
    if (open?.kind !== "list" || open.isOrdered !== isOrdered) {
      open = begin(blocks, { kind: "list", isOrdered, first: parseInt(item[1], 10) || 1, parts: [], start, end });
    }
    open.parts.push([start + item[0].length, end]);
    open.end = end;
    return open;
  }
  if (open?.kind === "list" && /^\s/.test(line)) {
    open.parts.at(-1)[1] = open.end = end;
    return open;
  }
  const quote = QUOTE.exec(line);
  if (quote) {
    if (open?.kind !== "quote") open = begin(blocks, { kind: "quote", parts: [], start, end });
    open.parts.push([start + quote[0].length, end]);
    open.end = end;
    return open;
  }
  if (open?.kind === "p") {
    open.parts[0][1] = open.end = end;
    return open;
  }
  return begin(blocks, { kind: "p", parts: [[start, end]], start, end });
}

function begin(blocks, block) {
  blocks.push(block);
  return block;
}

function close(block, end) {
  block.end = end;
  return null;
}

function draw(block, tinted) {
  if (block.kind === "code") {
    const code = element("code");
    for (const [start, end] of block.parts) tinted.show(code, start, end);
    return element("pre", code);
  }
  if (block.kind === "list") {
    const list = element(block.isOrdered ? "ol" : "ul");
    if (block.isOrdered) list.start = block.first;
    for (const [start, end] of block.parts) list.append(inline(element("li"), tinted, start, end));
    return list;
  }
  const node = element(block.kind === "quote" ? "blockquote" : block.kind);
  block.parts.forEach(([start, end], index) => {
    if (index > 0) node.append("\n");
    inline(node, tinted, start, end);
  });
  return node;
}

// In this order: `code`, **strong**, *emphasis*, [text](address). Group 2 of each is what is shown.
const INLINE = /(`+)([^`]+)\1|(\*\*|__)(?=\S)(.+?\S|\S)\3|(?<![\w*])([*_])(?=\S)([^*_\n]*[^*_\s])\5(?![\w*])|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/gs;

function inline(parent, tinted, start, end) {
  const source = tinted.text.slice(start, end);
  let shown = 0;
  for (const match of source.matchAll(INLINE)) {
    tinted.show(parent, start + shown, start + match.index);
    const at = start + match.index;
    const [whole, ticks, code, stars, strong, star, emphasis, label, address] = match;
    if (code !== undefined) {
      const node = element("code");
      tinted.show(node, at + ticks.length, at + whole.length - ticks.length);
      parent.append(node);
    } else if (strong !== undefined) {
      parent.append(inline(element("strong"), tinted, at + stars.length, at + whole.length - stars.length));
    } else if (emphasis !== undefined) {
      parent.append(inline(element("em"), tinted, at + star.length, at + whole.length - star.length));
    } else {
      const link = element("a");
      link.href = address;
      link.rel = "noopener noreferrer nofollow";
      link.target = "_blank";
      tinted.show(link, at + 1, at + 1 + label.length);
      parent.append(link);
    }
    shown = match.index + whole.length;
  }
  tinted.show(parent, start + shown, end);
  return parent;
}

function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

// A bar of parts with a legend that names each part, its amount and what it is for.

import { fillChildren, make, setAttribute, setText } from "./elements.js";

/**
 * @typedef {{kind: string, name: string, amount: number, words: string, note?: string}} BarPart
 *     kind: class of its colour, "part-…"; words: its amount in words
 */

/**
 * Returns a stacked bar.
 * @param {boolean} [hasLegend]
 * @returns {{element: HTMLElement,
 *     update: (parts: BarPart[], whole: number, label: string, mark?: number) => void}}
 *     whole: amount of the whole width; label: the bar's text for screen readers; mark: amount at which a line is drawn
 */
export function makeStackedBar(hasLegend = true) {
  const bar = make("div", { class: "engine-stack", role: "img" });
  const line = make("i", { class: "engine-mark", hidden: true });
  const legend = make("ul", { class: "engine-parts" });
  const element = make("div", { class: "engine-stacked" }, make("div", { class: "engine-stack-box" }, bar, line));
  if (hasLegend) element.append(legend);
  return {
    element,
    update(parts, whole, label, mark) {
      setAttribute(bar, "aria-label", label);
      fillChildren(bar, parts, () => make("i"), (piece, part) => {
        setAttribute(piece, "class", `engine-piece ${part.kind}`);
        setAttribute(piece, "title", `${part.name}: ${part.words}`);
        piece.style.width = `${whole > 0 ? (100 * part.amount) / whole : 0}%`;
      });
      line.hidden = mark === undefined;
      if (mark !== undefined) line.style.left = `${Math.min(100, (100 * mark) / whole)}%`;
      if (hasLegend) fillChildren(legend, parts, makeEntry, showEntry);
    },
  };
}

function makeEntry() {
  const [name, note] = ["engine-part-name", "engine-part-note"].map((kind) => make("span", { class: kind }));
  return make("li", {}, make("i", { class: "engine-swatch" }), name, make("strong"), note);
}

function showEntry(entry, part) {
  const [swatch, name, words, note] = entry.children;
  setAttribute(swatch, "class", `engine-swatch ${part.kind}`);
  setText(name, part.name);
  setText(words, part.words);
  setText(note, part.note ?? "");
}

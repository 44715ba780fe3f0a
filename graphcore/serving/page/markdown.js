/**
 * Markdown as elements. The lexer gives tokens, and each token becomes elements with text: nothing of an answer is
 * ever read as markup, and no picture or address is loaded.
 */

import { copyButton } from "./copying.js";
import { make } from "./dom.js";
import { Preformatted } from "./preformatted.js";

const DEEPEST = 24; // levels of quotes and lists that are drawn
const MOST_CELLS = 2_000; // of a table that is drawn as one
const SAFE_ADDRESS = /^(?:https?:\/\/|mailto:)[^\s]+$/i;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

/**
 * Returns the elements of tokens of marked's lexer.
 * @param {object[]} tokens
 * @param {number} [depth] levels around them
 * @returns {(Node|string)[]}
 */
export function elementsOf(tokens, depth = 0) {
  return tokens.map((token) => elementOf(token, depth)).filter((element) => element !== null);
}

function elementOf(token, depth) {
  if (depth > DEEPEST) return token.raw ?? "";
  const build = BUILDERS[token.type];
  return build ? build(token, depth + 1) : (token.raw ?? "");
}

const BUILDERS = {
  space: () => null,
  def: () => null,
  checkbox: () => null, // drawn by its item
  hr: () => make("hr"),
  br: () => make("br"),
  heading: ({ depth, tokens }, level) => make(`h${Math.min(depth + 2, 6)}`, {}, ...elementsOf(tokens, level)),
  paragraph: ({ tokens }, level) => make("p", {}, ...elementsOf(tokens, level)),
  blockquote: ({ tokens }, level) => make("blockquote", {}, ...elementsOf(tokens, level)),
  code: ({ lang, text }) => codeBlock(lang ?? "", text),
  html: ({ raw, block }) => (block ? make("p", { class: "as-written" }, raw.trimEnd()) : raw),
  list,
  table,
  text: ({ tokens, text }, level) => (tokens ? make("span", {}, ...elementsOf(tokens, level)) : plain(text)),
  escape: ({ text }) => plain(text),
  strong: ({ tokens }, level) => make("strong", {}, ...elementsOf(tokens, level)),
  em: ({ tokens }, level) => make("em", {}, ...elementsOf(tokens, level)),
  del: ({ tokens }, level) => make("del", {}, ...elementsOf(tokens, level)),
  codespan: ({ text }) => make("code", {}, text),
  link: ({ href, tokens, raw }, level) => link(href, elementsOf(tokens, level), raw),
  image: ({ href, text, raw }) => link(href, [`Picture: ${text || href}`], raw),
};

function list({ ordered, start, items }, level) {
  const from = ordered && start !== 1 && Number.isSafeInteger(start) ? start : null;
  return make(ordered ? "ol" : "ul", { start: from }, ...items.map((item) => listItem(item, level)));
}

function listItem({ task, checked, tokens }, level) {
  const mark = task ? make("span", { class: "task" }, checked ? "\u2611 " : "\u2610 ") : null;
  return make("li", { class: task ? "task-item" : null }, mark, ...elementsOf(tokens, level));
}

function table({ header, rows, raw }, level) {
  if (header.length * rows.length > MOST_CELLS) return asWritten(raw);
  const cell = (tag, { tokens, align }) => {
    const scope = tag === "th" ? "col" : null;
    return make(tag, { scope, class: align ? `align-${align}` : null }, ...elementsOf(tokens, level));
  };
  const row = (tag, cells) => make("tr", {}, ...cells.map((one) => cell(tag, one)));
  const whole = make("table", {},
    make("thead", {}, row("th", header)), make("tbody", {}, ...rows.map((cells) => row("td", cells))));
  return make("div", { class: "table-scroll", tabindex: 0, role: "group", "aria-label": "Table" }, whole);
}

/** Returns a link that says where it leads, or what was written if the address may not be opened. */
function link(href, children, raw) {
  if (!SAFE_ADDRESS.test(href)) return raw;
  return make("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

/** The lexer leaves the entities of HTML as they are. */
function plain(text) {
  return text.replace(/&(amp|lt|gt|quot|apos|nbsp|#\d{1,7}|#x[\da-f]{1,6});/gi, (whole, name) => {
    if (name[0] !== "#") return ENTITIES[name.toLowerCase()] ?? whole;
    const code = name[1] === "x" || name[1] === "X" ? parseInt(name.slice(2), 16) : Number(name.slice(1));
    return code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code <= 0xdfff) ? String.fromCodePoint(code) : whole;
  });
}

/**
 * Makes a block of text shown as it was written.
 * @param {string} text
 * @returns {HTMLElement}
 */
export function asWritten(text) {
  const element = make("div", { class: "as-written" });
  new Preformatted(element).append(text);
  return element;
}

/**
 * Makes a block of code with its language and a button that copies it.
 * @param {string} language
 * @param {string} text
 * @returns {HTMLElement}
 */
export function codeBlock(language, text) {
  const { block, code } = openCodeBlock(language);
  code.append(text);
  return block;
}

/**
 * Makes an empty block of code that grows.
 * @param {string} language
 * @returns {{block: HTMLElement, code: Preformatted}}
 */
export function openCodeBlock(language) {
  const name = language.trim().split(/\s/, 1)[0].slice(0, 40);
  const text = make("code");
  const pre = make("pre", { tabindex: 0, role: "group", "aria-label": name ? `Code, ${name}` : "Code" }, text);
  const head = make("div", { class: "code-head" }, make("span", {}, name || "text"),
    copyButton(() => text.textContent, "Copy code"));
  return { block: make("div", { class: "code-block" }, head, pre), code: new Preformatted(text) };
}

/**
 * Markdown that grows. Finished blocks are drawn once; only the last, open one is drawn again as text comes. Blocks
 * that are too long or too deeply nested for the lexer are shown as they were written.
 */

import { elementsOf, openCodeBlock } from "./markdown.js";
import { make } from "./dom.js";
import { Preformatted } from "./preformatted.js";
import { Lexer } from "./vendor/marked.esm.js";

const FIRST_WINDOW = 4_000; // characters given to the lexer at once
const LAST_WINDOW = 32_000; // longest block that the lexer gets
const SLOW_MILLISECONDS = 20; // a lexer so slow gets no longer block: its time grows with the square of the length
const GROUP = 40; // blocks that are laid out together, and only where they are seen
const MOST_ELEMENTS = 60_000; // after which the rest is shown as it was written
const FENCE = /^( {0,3})(`{3,}|~{3,})([^\n]*)(?:\n|$)/;
/** A line with so many quotes, lists or columns before its text that drawing it is slow. */
const DEEP_LINE = /^(?:[ \t]*(?:>|[*+-](?=[ \t])|\d{1,9}[.)](?=[ \t]))){10}|^[ \t]{60}/m;
const AT_BEGINNING = { isInLine: false, gap: "" };
const MAY_END = /^[ \t]*[`~]{0,20}[ \t]*$/; // an unfinished line that may become the end of a block

/** Draws a text into an element, in steps that are short whatever the text is. */
export class StreamedMarkdown {
  #group = make("div", { class: "blocks" });
  #elements = 0;
  #text = "";
  #settled = 0; // characters of finished blocks
  #open = make("div", { class: "open-block" });
  #window = FIRST_WINDOW;
  #grown = null; // a block of code, or of text as written, that grows: {isEnd, writer}
  #drawn = ""; // text of the open block that is drawn
  #isEnded = false;

  /** @param {HTMLElement} root */
  constructor(root) {
    root.replaceChildren(this.#group, this.#open);
  }

  /**
   * Sets the text so far, which begins with the one before.
   * @param {string} text
   * @param {boolean} isEnded true if no more comes
   */
  set(text, isEnded) {
    this.#text = text.includes("\r") ? text.replaceAll(/\r\n?/g, "\n") : text;
    this.#isEnded = isEnded;
  }

  /**
   * Draws some milliseconds long, or until all is drawn.
   * @param {number} milliseconds
   * @returns {boolean} true if all is drawn
   */
  draw(milliseconds) {
    const end = performance.now() + milliseconds;
    while (this.#step()) if (performance.now() > end) return false;
    return true;
  }

  /** Draws the next part; returns false if all is drawn. */
  #step() {
    if (this.#grown) return this.#grow();
    const rest = this.#skipEmptyLines();
    if (rest === "" || rest === this.#drawn) return this.#settleOpen(rest);
    if (this.#elements > MOST_ELEMENTS) return this.#beginWritten(Infinity);
    const fence = FENCE.exec(rest);
    if (fence && !(fence[2][0] === "`" && fence[3].includes("`"))) return this.#beginCode(rest, fence);
    return this.#lex(rest);
  }

  #skipEmptyLines() {
    const start = /[^\n]/g;
    start.lastIndex = this.#settled;
    this.#settled = start.exec(this.#text)?.index ?? this.#text.length;
    return this.#text.slice(this.#settled, this.#settled + LAST_WINDOW + 1);
  }

  #settleOpen(rest) {
    if (rest === "" || this.#isEnded) this.#settle(rest.length, [...this.#open.childNodes]);
    return false;
  }

  #settle(length, nodes) {
    this.#settled += length;
    this.#open.replaceChildren();
    if (this.#group.childNodes.length >= GROUP) {
      this.#group.classList.add("is-finished");
      this.#group = make("div", { class: "blocks" });
      this.#open.before(this.#group);
    }
    this.#group.append(...nodes);
    for (const node of nodes) this.#elements += 1 + (node.getElementsByTagName?.("*").length ?? 0);
    this.#window = FIRST_WINDOW;
    this.#drawn = "";
  }

  #lex(rest) {
    const { source, isBeforeDeep } = this.#source(rest);
    const [tokens, milliseconds] = source === "" ? [null, 0] : timed(source);
    if (tokens === null) return this.#beginWritten();
    const isWhole = source.length === rest.length;
    let count = countFinished(tokens, isWhole);
    if (count === 0 && isBeforeDeep) count = tokens.length;
    if (count > 0) return this.#settleTokens(tokens.slice(0, count));
    if (isWhole) return this.#drawOpen(rest, tokens);
    // Twice, because a busy machine may have stopped the first time for long.
    const isSlow = milliseconds > SLOW_MILLISECONDS && timed(source)[1] > SLOW_MILLISECONDS;
    if (isSlow || this.#window >= LAST_WINDOW) {
      return this.#beginWritten(source.length);
    }
    this.#window *= 2;
    return true;
  }

  #settleTokens(tokens) {
    this.#settle(tokens.reduce((length, { raw }) => length + raw.length, 0), elementsOf(tokens));
    return true;
  }

  #drawOpen(rest, tokens) {
    this.#open.replaceChildren(...elementsOf(tokens));
    this.#drawn = rest;
    return this.#isEnded;
  }

  /** Returns what the lexer gets: whole lines, without a line that is too deep; "" if the first one is. */
  #source(rest) {
    let source = rest.slice(0, this.#window);
    if (source.length < rest.length) source = source.slice(0, source.lastIndexOf("\n") + 1 || source.length);
    const deep = DEEP_LINE.exec(source);
    return { source: source.slice(0, deep?.index), isBeforeDeep: deep !== null };
  }

  #beginCode(rest, [opening, indent, marks, language]) {
    if (rest.length > LAST_WINDOW && opening.length === rest.length) return this.#beginWritten();
    if (!opening.endsWith("\n") && !this.#isEnded) return false;
    const { block, code } = openCodeBlock(language);
    const closing = new RegExp(`^ {0,3}${marks[0]}{${marks.length},}[ \\t]*$`);
    const isEnd = (line) => closing.test(line);
    const margin = indent ? new RegExp(`^ {0,${indent.length}}`) : null;
    this.#settle(opening.length, [block]);
    this.#grown = { writer: code, isEnd, margin, ...AT_BEGINNING };
    return true;
  }

  /** Begins a block of text as written, which ends with the first empty line after some characters. */
  #beginWritten(least = 0) {
    const block = make("div", { class: "as-written" });
    this.#settle(0, [block]);
    const end = this.#settled + least;
    const isEnd = (line) => this.#settled >= end && /^[ \t]*$/.test(line);
    this.#grown = { writer: new Preformatted(block), isEnd, margin: null, ...AT_BEGINNING };
    return true;
  }

  /** Appends to the block that grows, up to its end; of an unfinished line only what cannot become the end. */
  #grow() {
    const grown = this.#grown;
    const part = this.#text.slice(this.#settled, this.#settled + LAST_WINDOW);
    const isAll = this.#settled + part.length === this.#text.length;
    let [at, shown] = [0, ""];
    while (at < part.length) {
      const lineEnd = part.indexOf("\n", at);
      const line = part.slice(at, lineEnd < 0 ? part.length : lineEnd);
      const isOpen = lineEnd < 0 && !(isAll && this.#isEnded);
      if (isOpen && !grown.isInLine && (isAll ? MAY_END.test(line) : at > 0)) break;
      const next = lineEnd < 0 ? part.length : lineEnd + 1;
      if (!isOpen && !grown.isInLine && grown.isEnd(line)) return this.#finish(grown.writer, shown, next);
      shown += grown.gap + (grown.margin && !grown.isInLine ? line.replace(grown.margin, "") : line);
      grown.gap = lineEnd < 0 ? "" : "\n"; // shown before the next line: the last one of a block has none
      grown.isInLine = lineEnd < 0;
      at = next;
    }
    grown.writer.append(shown);
    this.#settled += at;
    return !isAll && at > 0;
  }

  #finish(writer, shown, length) {
    writer.append(shown);
    this.#settled += length;
    this.#grown = null;
    return true;
  }
}

/** Returns how many tokens at the beginning cannot change any more. */
function countFinished(tokens, isWhole) {
  const blocks = tokens.flatMap(({ type }, at) => (type === "space" ? [] : [at]));
  if (blocks.length === 0) return 0;
  const isFirstLine = isWhole && !tokens[blocks.at(-1)].raw.includes("\n"); // it may yet belong to the block before
  return blocks.at(isFirstLine ? -2 : -1) ?? 0;
}

/** Returns what `lexed` returns, and how many milliseconds it took. */
function timed(source) {
  const began = performance.now();
  return [lexed(source), performance.now() - began];
}

/** Returns tokens; null if the lexer cannot read a text. Blanks at its end are left out: the lexer changes "- ". */
function lexed(source) {
  let end = source.length;
  while (end > 0 && (source[end - 1] === " " || source[end - 1] === "\t")) end -= 1;
  const text = source.slice(0, end) || source;
  try {
    const tokens = Lexer.lex(text, { gfm: true });
    const length = tokens.reduce((sum, { raw }) => sum + raw.length, 0);
    return length === text.length ? tokens : null; // else nobody knows where a block ends
  } catch {
    return null; // nested too deeply
  }
}

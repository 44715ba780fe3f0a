/** An answer on the page: thinking, text, calls of tools, its error, and what it took. */

import { canContinue, endText, progressText, statisticsText } from "./answer_facts.js";
import { copyButton } from "./copying.js";
import { make } from "./dom.js";
import { drawSoon } from "./draw_queue.js";
import { beginsAsJson, indentedJson } from "./json_texts.js";
import { openCodeBlock } from "./markdown.js";
import { footButton, messageFoot, versionsRow } from "./message_foot.js";
import { counted } from "./number_texts.js";
import { StreamedMarkdown } from "./streamed_markdown.js";
import { resultsForm, ToolCallsView } from "./tool_calls_view.js";

/** Draws an answer while it grows. */
export class AnswerView {
  #thinkingText = make("div", { class: "markdown" });
  #thinkingLength = make("span", { class: "muted" });
  #thinking = make("details", { class: "thinking", hidden: true },
    make("summary", {}, "Thinking ", this.#thinkingLength), this.#thinkingText);
  #text = make("div", { class: "answer-text" });
  #calls = new ToolCallsView();
  #below = make("div", { class: "below" });
  #facts = make("p", { class: "facts" });
  #parts = { thinking: null, content: null };
  #kind = "";
  #indented; // JSON of the whole answer; null if it is none
  #draw = (milliseconds) => this.#drawParts(milliseconds);
  #state = null;
  #message;
  #actions;
  element = make("article", { class: "message assistant", tabindex: -1, "aria-label": "Answer" },
    this.#thinking, this.#text, this.#calls.element, this.#below);

  /**
   * @param {Message} message
   * @param {object} actions follow, showsThinking, and what is done with the message: retry, resume, sendResults
   */
  constructor(message, actions) {
    this.#actions = actions;
    this.#message = message;
    this.#thinking.addEventListener("toggle", () => drawSoon(this.#draw));
  }

  /**
   * Shows a message as it is now.
   * @param {Message} message
   * @param {{progress: object|null, isLast: boolean, versions: object}} around
   */
  update(message, around) {
    const isNew = this.#state === null;
    const state = JSON.stringify([message.state, message.error, around.isLast, around.versions.ids]);
    this.#message = message;
    if (state !== this.#state) this.#drawBelow(around);
    if (this.#isRunning && !isNew && this.#state !== state) this.#forget();
    this.#state = state;
    if (isNew) this.#thinking.hidden = message.thinking === "";
    this.grow(around.progress);
  }

  /**
   * Shows that an answer which is being made has grown.
   * @param {object|null} progress
   */
  grow(progress) {
    if (this.#isRunning) this.#facts.textContent = progressText(progress);
    this.#drawThinkingHead();
    this.element.setAttribute("aria-busy", "true");
    drawSoon(this.#draw);
  }

  get #isRunning() {
    return this.#message.state === "running";
  }

  /** A text that goes on after its end is drawn anew, because its last block was finished. */
  #forget() {
    this.#parts = { thinking: null, content: null };
    this.#kind = "";
    this.#indented = undefined;
  }

  #drawThinkingHead() {
    const { thinking, content } = this.#message;
    if (this.#thinking.hidden && thinking !== "") {
      this.#thinking.hidden = false;
      this.#thinking.open = this.#isRunning && this.#actions.showsThinking();
    }
    const isThinking = this.#isRunning && content === "";
    this.#thinkingLength.textContent = `${counted(thinking.length, "character")}${isThinking ? " so far" : ""}`;
  }

  #drawParts(milliseconds) {
    let isWhole = this.#drawContent(milliseconds);
    if (this.#thinking.open) isWhole = this.#drawThinking(milliseconds) && isWhole;
    this.#calls.set(this.#message.toolCalls);
    this.#actions.follow();
    this.element.setAttribute("aria-busy", String(this.#isRunning || !isWhole));
    if (!isWhole) drawSoon(this.#draw);
  }

  #drawContent(milliseconds) {
    const { content } = this.#message;
    const isEnded = !this.#isRunning;
    const json = beginsAsJson(content);
    if (isEnded && this.#indented === undefined) this.#indented = json ? indentedJson(content) : null;
    const indented = this.#indented ?? null;
    const kind = !json || (isEnded && indented === null) ? "markdown" : isEnded ? "json" : "json so far";
    if (kind !== this.#kind || this.#parts.content === null) this.#begin(kind);
    this.#parts.content.set(indented ?? content, isEnded);
    return this.#parts.content.draw(milliseconds);
  }

  #begin(kind) {
    this.#kind = kind;
    if (kind === "markdown") {
      const root = make("div", { class: "markdown" });
      this.#text.replaceChildren(root);
      this.#parts.content = new StreamedMarkdown(root);
    } else {
      const { block, code } = openCodeBlock("json");
      this.#text.replaceChildren(block);
      this.#parts.content = new GrowingCode(code);
    }
  }

  #drawThinking(milliseconds) {
    this.#parts.thinking ??= new StreamedMarkdown(this.#thinkingText);
    this.#parts.thinking.set(this.#message.thinking, !this.#isRunning || this.#message.content !== "");
    return this.#parts.thinking.draw(milliseconds);
  }

  #drawBelow(around) {
    const { isLast, versions } = around;
    const message = this.#message;
    const hadFocus = this.#below.contains(document.activeElement);
    const calls = isLast && message.state === "done" && message.toolCalls.length > 0;
    this.#facts.textContent = this.#isRunning ? progressText(around.progress) : statisticsText(message);
    const end = endText(message);
    this.#below.replaceChildren(...[
      message.error && make("p", { class: "message-error" }, message.error.text),
      end && make("p", { class: "end" }, end),
      calls && resultsForm(message, (texts) => this.#actions.sendResults(message, texts)),
      messageFoot(versionsRow(versions), this.#facts, this.#isRunning ? null : this.#buttons(isLast)),
    ].filter(Boolean));
    this.element.classList.toggle("is-running", this.#isRunning);
    if (hadFocus) this.element.focus({ preventScroll: true });
  }

  #buttons(isLast) {
    const message = this.#message;
    const buttons = make("div", { class: "foot-buttons" });
    const { resume, retry } = this.#actions;
    if (isLast && canContinue(message)) buttons.append(footButton("Continue", () => resume(this.#message)));
    buttons.append(footButton("Retry", () => retry(this.#message)));
    if (message.content) buttons.append(copyButton(() => this.#message.content, "Copy answer"));
    return buttons;
  }
}

/** JSON that grows, or is whole: as StreamedMarkdown. */
class GrowingCode {
  #code;
  #text = "";
  #length = 0;

  constructor(code) {
    this.#code = code;
  }

  set(text) {
    this.#text = text;
  }

  draw() {
    this.#code.append(this.#text.slice(this.#length));
    this.#length = this.#text.length;
    return true;
  }
}

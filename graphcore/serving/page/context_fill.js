/** How much of the model's context the shown conversation fills, as its last answer has said. */

import { make } from "./dom.js";
import { whole } from "./number_texts.js";

const NEARLY_FULL = 0.8;

/** A line of text with a bar. It is hidden until the size of the context and an answer's usage are known. */
export class ContextFill {
  #chat;
  #size = null; // tokens of the context
  #text = make("span");
  #filled = make("i");
  element = make("p", { class: "context-fill hint", hidden: true }, this.#text,
    make("span", { class: "fill-bar", "aria-hidden": "true" }, this.#filled));

  /** @param {Chat} chat */
  constructor(chat) {
    this.#chat = chat;
    chat.addEventListener("change", () => this.#draw());
  }

  /**
   * Sets the size of the model's context.
   * @param {number|null} size tokens; null if the server does not say it
   */
  setSize(size) {
    this.#size = size;
    this.#draw();
  }

  #draw() {
    const used = this.#chat.path.findLast(({ role }) => role === "assistant")?.statistics?.contextTokens;
    this.element.hidden = !used || !this.#size;
    if (this.element.hidden) return;
    const share = Math.min(1, used / this.#size);
    const isNearlyFull = share >= NEARLY_FULL;
    this.element.classList.toggle("is-nearly-full", isNearlyFull);
    this.#text.textContent =
      `Context${isNearlyFull ? " nearly full" : ""}: ${whole(used)} of ${whole(this.#size)} tokens`;
    this.#filled.style.width = `${100 * share}%`;
  }
}
